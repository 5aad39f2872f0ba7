#include "core/norm/launch.cuh"

namespace fused_norm {

template <>
cudaError_t norm_forward_of<float>(const NormForwardParams& params, const NormForwardPlan& plan,
                                   cudaStream_t stream) {
  return norm_forward_as<float>(params, plan, stream);
}

template <>
cudaError_t norm_backward_of<float>(const NormBackwardParams& params, const NormBackwardPlan& plan,
                                    cudaStream_t stream) {
  return dispatch_backward<float, __half, __nv_bfloat16>(params, plan, stream);
}

}  // namespace fused_norm
