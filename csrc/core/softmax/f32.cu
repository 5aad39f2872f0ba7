#include "core/softmax/launch.cuh"

namespace fused_norm {

template <>
cudaError_t softmax_of<float>(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                              cudaStream_t stream) {
  return dispatch_softmax<float>(params, plan, stream);
}

template <>
cudaError_t softmax_of<float>(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                              cudaStream_t stream) {
  return dispatch_softmax<float>(params, plan, stream);
}

template <>
cudaError_t softmax_of<float>(const SoftmaxColumnsForwardParams& params,
                              const SoftmaxColumnsPlan& plan, cudaStream_t stream) {
  return dispatch_softmax<float>(params, plan, stream);
}

template <>
cudaError_t softmax_of<float>(const SoftmaxColumnsBackwardParams& params,
                              const SoftmaxColumnsPlan& plan, cudaStream_t stream) {
  return dispatch_softmax<float>(params, plan, stream);
}

}  // namespace fused_norm
