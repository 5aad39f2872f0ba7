#include "core/norm/launch.cuh"

namespace fused_norm {

template cudaError_t norm_forward_of<float>(const NormForwardParams&, const NormForwardPlan&,
                                            cudaStream_t);
template cudaError_t norm_backward_of<float>(const NormBackwardParams&, const NormBackwardPlan&,
                                             cudaStream_t);

}  // namespace fused_norm
