#include "core/softmax/launch.cuh"

namespace fused_norm {

template <>
cudaError_t softmax_of<__nv_bfloat16>(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                                      cudaStream_t stream) {
  return dispatch_softmax<__nv_bfloat16, float>(params, plan, stream);
}

template <>
cudaError_t softmax_of<__nv_bfloat16>(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                                      cudaStream_t stream) {
  return dispatch_softmax<__nv_bfloat16, float>(params, plan, stream);
}

template <>
cudaError_t softmax_of<__nv_bfloat16>(const SoftmaxColumnsForwardParams& params,
                                      const SoftmaxColumnsPlan& plan, cudaStream_t stream) {
  return dispatch_softmax<__nv_bfloat16, float>(params, plan, stream);
}

template <>
cudaError_t softmax_of<__nv_bfloat16>(const SoftmaxColumnsBackwardParams& params,
                                      const SoftmaxColumnsPlan& plan, cudaStream_t stream) {
  return dispatch_softmax<__nv_bfloat16, float>(params, plan, stream);
}

}  // namespace fused_norm
