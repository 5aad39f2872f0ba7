#include "ops/checks.h"

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#ifdef FUSED_NORM_WITH_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif

namespace fused_norm::ops {

std::optional<at::ScalarType> dtype_of(const OptionalTensor& tensor) {
  return has(tensor) ? std::optional(tensor->scalar_type()) : std::nullopt;
}

bool is_16_bit(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

bool is_floating(at::ScalarType type) {
  return is_16_bit(type) || type == at::kFloat || type == at::kDouble;
}

void check_layout(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(!tensor.is_nested(), name, " must be a dense strided tensor, but is nested");
  TORCH_CHECK(tensor.layout() == at::kStrided, name,
              " must be a dense strided tensor, but has layout ", tensor.layout());
}

void check_floating(at::ScalarType type, const char* name) {
  TORCH_CHECK(is_floating(type), name, " must be float16, bfloat16, float32 or float64, but is ",
              type);
}

void check_device(const at::Tensor& tensor, const char* name, const at::Tensor& other,
                  const char* other_name) {
  TORCH_CHECK(tensor.device() == other.device(), name, " is on ", tensor.device(), ", but ",
              other_name, " is on ", other.device());
}

c10::SymBool are_alike(c10::SymIntArrayRef sizes, c10::SymIntArrayRef others, bool broadcasts) {
  c10::SymBool alike =
      sizes.size() == others.size() || (broadcasts && sizes.size() < others.size());
  for (size_t i = 1; i <= std::min(sizes.size(), others.size()); ++i) {
    const c10::SymInt& size = sizes[sizes.size() - i];
    const c10::SymBool same = size.sym_eq(others[others.size() - i]);
    alike = alike.sym_and(broadcasts ? same.sym_or(size.sym_eq(1)) : same);
  }
  return alike;
}

void check_like(const at::Tensor& tensor, const char* name, const at::Tensor& other,
                const char* other_name) {
  TORCH_SYM_CHECK(are_alike(tensor.sym_sizes(), other.sym_sizes()), name,
                  " must have the shape of ", other_name, " ", other.sym_sizes(),
                  ", but has shape ", tensor.sym_sizes());
  check_device(tensor, name, other, other_name);
}

void check_given(const at::Tensor& tensor, const char* name, at::ScalarType dtype,
                 c10::SymIntArrayRef sizes, const at::Tensor& beside, Strides strides) {
  const bool contiguous = strides == Strides::kContiguous;
  check_layout(tensor, name);
  const bool fits = tensor.scalar_type() == dtype && tensor.device() == beside.device() &&
                    (!contiguous || tensor.is_contiguous());
  TORCH_SYM_CHECK(are_alike(tensor.sym_sizes(), sizes).sym_and(fits), name, " must be ",
                  contiguous ? "contiguous, " : "", "of shape ", sizes, " and dtype ", dtype,
                  " on ", beside.device(), ", but has shape ", tensor.sym_sizes(), ", strides ",
                  tensor.sym_strides(), " and dtype ", tensor.scalar_type(), " on ",
                  tensor.device());
}

void check_normalized(const at::Tensor& tensor, const char* name,
                      c10::SymIntArrayRef normalized_shape) {
  const size_t row_dims = normalized_shape.size();
  TORCH_CHECK(row_dims > 0, "normalized_shape must have at least one dimension, but is []");
  const c10::SymIntArrayRef sizes = tensor.sym_sizes();
  TORCH_CHECK(sizes.size() >= row_dims && sizes.slice(sizes.size() - row_dims) == normalized_shape,
              "normalized_shape is ", normalized_shape, ", but ", name, " has shape ", sizes,
              ", whose last dimensions differ from it");
}

void check_param(const OptionalTensor& param, const char* name,
                 c10::SymIntArrayRef normalized_shape, const at::Tensor& input) {
  if (!has(param)) return;
  check_layout(*param, name);
  TORCH_CHECK(param->sym_sizes() == normalized_shape, name,
              " must have the shape of normalized_shape ", normalized_shape, ", but has shape ",
              param->sym_sizes());
  check_device(*param, name, input, "input");
}

at::Tensor new_tensor(const at::Tensor& like, c10::SymIntArrayRef sizes, at::ScalarType dtype) {
#ifdef FUSED_NORM_WITH_CUDA
  if (like.is_cuda()) {  // past the dispatcher, which takes the host as long again
    const at::IntArrayRef known = C10_AS_INTARRAYREF_SLOW(sizes);
    return at::Tensor(at::detail::empty_cuda(known, dtype, like.device(), std::nullopt));
  }
#endif
  check_built_for(like);
  return at::empty_symint(sizes, like.options().dtype(dtype));
}

void check_built_for([[maybe_unused]] const at::Tensor& tensor) {
#ifndef FUSED_NORM_WITH_CUDA
  TORCH_CHECK(tensor.is_cpu() || tensor.is_meta(),
              "this fused_norm was built without CUDA, but input is on ", tensor.device(),
              "; rebuild with FUSED_NORM_CUDA=1 pip install --no-build-isolation --force-reinstall "
              "--no-deps .");
#endif
}

int tier_number(c10::ArrayRef<const char*> names, const std::string& wanted) {
  const auto found = std::find(names.begin(), names.end(), wanted);
  TORCH_CHECK_VALUE(found != names.end(), "tier must be '",
                    c10::Join("', '", names.slice(0, names.size() - 1)), "' or '", names.back(),
                    "', but is '", wanted, "'");
  return static_cast<int>(found - names.begin());
}

}  // namespace fused_norm::ops
