#include "ops/checks.h"

namespace fused_norm::ops {

bool is_16_bit(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

void check_layout(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(!tensor.is_nested(), name, " must be a dense strided tensor, but is nested");
  TORCH_CHECK(tensor.layout() == at::kStrided, name,
              " must be a dense strided tensor, but has layout ", tensor.layout());
}

void check_floating(at::ScalarType type, const char* name) {
  TORCH_CHECK(is_16_bit(type) || type == at::kFloat || type == at::kDouble, name,
              " must be float16, bfloat16, float32 or float64, but is ", type);
}

void raise_cpu_only(const at::Tensor& tensor) {
  TORCH_CHECK(false, "this fused_norm was built without CUDA, but input is on ", tensor.device(),
              "; rebuild with FUSED_NORM_CUDA=1 pip install --no-build-isolation --force-reinstall "
              "--no-deps .");
}

}  // namespace fused_norm::ops
