#include "core/softmax/launch.cuh"

namespace fused_norm {

template <>
cudaError_t softmax_of<__half>(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                               cudaStream_t stream) {
  return dispatch_softmax<__half, float>(params, plan, stream);
}

template <>
cudaError_t softmax_of<__half>(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                               cudaStream_t stream) {
  return dispatch_softmax<__half, float>(params, plan, stream);
}

template <>
cudaError_t softmax_of<__half>(const SoftmaxColumnsForwardParams& params,
                               const SoftmaxColumnsPlan& plan, cudaStream_t stream) {
  return dispatch_softmax<__half, float>(params, plan, stream);
}

template <>
cudaError_t softmax_of<__half>(const SoftmaxColumnsBackwardParams& params,
                               const SoftmaxColumnsPlan& plan, cudaStream_t stream) {
  return dispatch_softmax<__half, float>(params, plan, stream);
}

}  // namespace fused_norm
