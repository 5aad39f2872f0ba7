#include "core/common/launch.cuh"
#include "core/softmax/launch.h"
#include "core/softmax/streaming.cuh"

namespace fused_norm {
namespace {

template <typename Kernel, typename In>
cudaError_t stream_rows(Kernel kernel, const SoftmaxPlan& plan, cudaStream_t stream, const In& in) {
  return detail::launch(kernel, plan.blocks, dim3(plan.threads_per_row, plan.rows_per_block),
                        {0, plan.cluster_blocks, plan.overlap}, stream, in);
}

template <typename A>
cudaError_t stream_of(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                      cudaStream_t stream) {
  return stream_rows(softmax_forward_streaming<A>, plan, stream,
                     StreamedForward<A>{params.rows,
                                        params.cols,
                                        plan.slice,
                                        {params.x, params.x_dtype, params.x_layout},
                                        {params.y, params.y_dtype},
                                        params.log,
                                        plan.pass == SoftmaxPass::kMaskedForward,
                                        static_cast<A>(params.scale),
                                        score_mask_of(params)});
}

template <typename A>
cudaError_t stream_of(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                      cudaStream_t stream) {
  return stream_rows(softmax_backward_streaming<A>, plan, stream,
                     StreamedBackward<A>{params.rows,
                                         params.cols,
                                         plan.slice,
                                         {params.dy, params.y_dtype, params.dy_layout},
                                         {params.y, params.y_dtype, params.y_layout},
                                         {params.dx, params.x_dtype},
                                         params.log,
                                         static_cast<A>(params.scale)});
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
