#include "core/softmax/launch.cuh"

namespace fused_norm {

template cudaError_t softmax_of<double>(const SoftmaxForwardParams&, const SoftmaxPlan&,
                                        cudaStream_t);
template cudaError_t softmax_of<double>(const SoftmaxBackwardParams&, const SoftmaxPlan&,
                                        cudaStream_t);
template cudaError_t softmax_of<double>(const SoftmaxColumnsForwardParams&,
                                        const SoftmaxColumnsPlan&, cudaStream_t);
template cudaError_t softmax_of<double>(const SoftmaxColumnsBackwardParams&,
                                        const SoftmaxColumnsPlan&, cudaStream_t);

}  // namespace fused_norm
