#include "core/softmax/launch.cuh"

namespace fused_norm {

template cudaError_t softmax_of<__nv_bfloat16>(const SoftmaxForwardParams&, const SoftmaxPlan&,
                                               cudaStream_t);
template cudaError_t softmax_of<__nv_bfloat16>(const SoftmaxBackwardParams&, const SoftmaxPlan&,
                                               cudaStream_t);

}  // namespace fused_norm
