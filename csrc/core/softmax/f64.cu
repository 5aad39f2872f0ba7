#include "core/softmax/launch.cuh"

namespace fused_norm {

template <>
cudaError_t softmax_of<double>(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                               cudaStream_t stream) {
  return dispatch_softmax<double>(params, plan, stream);
}

template <>
cudaError_t softmax_of<double>(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                               cudaStream_t stream) {
  return dispatch_softmax<double>(params, plan, stream);
}

template <>
cudaError_t softmax_of<double>(const SoftmaxColumnsForwardParams& params,
                               const SoftmaxColumnsPlan& plan, cudaStream_t stream) {
  return dispatch_softmax<double>(params, plan, stream);
}

template <>
cudaError_t softmax_of<double>(const SoftmaxColumnsBackwardParams& params,
                               const SoftmaxColumnsPlan& plan, cudaStream_t stream) {
  return dispatch_softmax<double>(params, plan, stream);
}

}  // namespace fused_norm
