#include "core/norm/launch.cuh"

namespace fused_norm {

template cudaError_t norm_forward_of<__half>(const NormForwardParams&, const NormForwardPlan&,
                                             cudaStream_t);
template cudaError_t norm_backward_of<__half>(const NormBackwardParams&, const NormBackwardPlan&,
                                              cudaStream_t);

}  // namespace fused_norm
