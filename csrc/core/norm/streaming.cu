#include "core/common/launch.cuh"
#include "core/norm/launchers.cuh"
#include "core/norm/streaming.cuh"

namespace fused_norm {
namespace {

template <typename A>
cudaError_t stream_forward(const NormForwardParams& params, const NormForwardPlan& plan,
                           cudaStream_t stream) {
  const StreamedForward<A> in{
      params.rows,
      params.cols,
      {params.x, params.x_dtype, params.x_layout},
      {params.y, params.y_dtype},
      params.weight,
      params.bias,
      static_cast<A>(params.weight_offset),
      {static_cast<A*>(params.mean), static_cast<A*>(params.rstd), static_cast<A>(params.eps),
       static_cast<A>(params.cols), A(1) / params.cols}};
  return detail::launch_plan(norm_forward_streaming<A>, plan, stream, in, params.rms);
}

template <typename A>
cudaError_t stream_backward(const NormBackwardParams& params, const NormBackwardPlan& plan,
                            cudaStream_t stream) {
  const BackwardWorkspace<A> workspace(params, plan);
  const ColumnLook<A> look = column_look_of<A>(params, workspace.totals);
  const StreamedBackward<A> in{
      params.rows,
      params.cols,
      params.rms,
      params.from_output,
      {params.dy, params.y_dtype, params.dy_layout},
      {params.saved, params.from_output ? params.y_dtype : params.x_dtype, params.saved_layout},
      {params.dresidual, params.x_dtype, one_stride(params.cols)},
      {params.dx, params.x_dtype},
      static_cast<const A*>(params.mean),
      static_cast<const A*>(params.rstd),
      params.weight,
      params.bias,
      static_cast<A>(params.weight_offset),
      look.listed,
      workspace.rest,
      workspace.dweight,
      workspace.dbias,
      workspace.cleared};
  if (params.dx) {
    const cudaError_t error =
        detail::launch(norm_backward_row_means<A>, plan.blocks,
                       dim3(plan.threads_per_row, plan.rows_per_block), {}, stream, in);
    if (error != cudaSuccess) return error;
  }
  const cudaError_t error = detail::launch(
      norm_backward_columns<A>, dim3(plan.tiles, plan.partials), kTileThreads, {}, stream, in);
  if (error != cudaSuccess) return error;
  return norm_second_stage(params, plan, workspace, look, stream);
}

}  // namespace

cudaError_t norm_stream_forward(const NormForwardParams& params, const NormForwardPlan& plan,
                                cudaStream_t stream) {
  return params.x_dtype == DType::kFloat64 ? stream_forward<double>(params, plan, stream)
                                           : stream_forward<float>(params, plan, stream);
}

cudaError_t norm_stream_backward(const NormBackwardParams& params, const NormBackwardPlan& plan,
                                 cudaStream_t stream) {
  return params.x_dtype == DType::kFloat64 ? stream_backward<double>(params, plan, stream)
                                           : stream_backward<float>(params, plan, stream);
}

}  // namespace fused_norm
