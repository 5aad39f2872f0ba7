#include "core/norm/launch.cuh"

namespace fused_norm {

template <>
cudaError_t norm_forward_of<double>(const NormForwardParams& params, const NormForwardPlan& plan,
                                    cudaStream_t stream) {
  return dispatch_forward<double>(params, plan, stream);
}

template <>
cudaError_t norm_backward_of<double>(const NormBackwardParams& params, const NormBackwardPlan& plan,
                                     cudaStream_t stream) {
  return dispatch_backward<double>(params, plan, stream);
}

}  // namespace fused_norm
