#include "core/softmax/launch.cuh"

namespace fused_norm {

template cudaError_t softmax_of<__half>(const SoftmaxForwardParams&, const SoftmaxPlan&,
                                        cudaStream_t);
template cudaError_t softmax_of<__half>(const SoftmaxBackwardParams&, const SoftmaxPlan&,
                                        cudaStream_t);

}  // namespace fused_norm
