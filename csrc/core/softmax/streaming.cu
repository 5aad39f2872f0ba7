#include "core/common/launch.cuh"
#include "core/softmax/launch.h"
#include "core/softmax/streaming.cuh"

namespace fused_norm {
namespace {

template <typename A>
cudaError_t stream_of(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                      cudaStream_t stream) {
  const StreamedForward<A> in{params.rows,
                              params.cols,
                              plan.slice,
                              {params.x, params.x_dtype, params.x_layout},
                              {params.y, params.y_dtype},
                              params.log,
                              plan.pass == SoftmaxPass::kMaskedForward,
                              static_cast<A>(params.scale),
                              score_mask_of(params)};
  return detail::launch_plan(softmax_forward_streaming<A>, plan, stream, in);
}

template <typename A>
cudaError_t stream_of(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                      cudaStream_t stream) {
  const StreamedBackward<A> in{params.rows,
                               params.cols,
                               plan.slice,
                               {params.dy, params.y_dtype, params.dy_layout},
                               {params.y, params.y_dtype, params.y_layout},
                               {params.dx, params.x_dtype},
                               params.log,
                               static_cast<A>(params.scale)};
  return detail::launch_plan(softmax_backward_streaming<A>, plan, stream, in);
}

}  // namespace

cudaError_t softmax_streaming(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                              cudaStream_t stream) {
  return params.x_dtype == DType::kFloat64 ? stream_of<double>(params, plan, stream)
                                           : stream_of<float>(params, plan, stream);
}

cudaError_t softmax_streaming(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                              cudaStream_t stream) {
  return params.x_dtype == DType::kFloat64 ? stream_of<double>(params, plan, stream)
                                           : stream_of<float>(params, plan, stream);
}

}  // namespace fused_norm
