#include "core/norm/launch.cuh"

namespace fused_norm {

cudaError_t norm_add_forward(const NormForwardParams& params, const NormForwardPlan& plan,
                             cudaStream_t stream) {
  if (params.x_dtype == DType::kFloat32) {
    return with_dtype<__half, __nv_bfloat16, float>(params.y_dtype, [&](auto y) {
      return norm_add_forward_as<float, decltype(y)>(params, plan, stream);
    });
  }
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto x) {
    return norm_add_forward_as<decltype(x), decltype(x)>(params, plan, stream);
  });
}

}  // namespace fused_norm
