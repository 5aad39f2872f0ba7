#include "core/norm/launch.cuh"

namespace fused_norm {

template <>
cudaError_t norm_forward_of<__nv_bfloat16>(const NormForwardParams& params,
                                           const NormForwardPlan& plan, cudaStream_t stream) {
  return norm_forward_as<__nv_bfloat16>(params, plan, stream);
}

template <>
cudaError_t norm_backward_of<__nv_bfloat16>(const NormBackwardParams& params,
                                            const NormBackwardPlan& plan, cudaStream_t stream) {
  return dispatch_backward<__nv_bfloat16, float>(params, plan, stream);
}

}  // namespace fused_norm
