#include "core/common/launch.cuh"
#include "core/norm/launchers.cuh"
#include "core/norm/partial_sums.cuh"

namespace fused_norm {

template <typename A>
cudaError_t norm_second_stage(const NormBackwardParams& params, const NormBackwardPlan& plan,
                              const BackwardWorkspace<A>& workspace, const ColumnLook<A>& look,
                              cudaStream_t stream) {
  if (!params.dweight && !params.dbias)
    return params.watch.report ? launch_column_look(params, stream) : cudaSuccess;
  // The blocks of a row's groups wrote one partial row together.
  const int groups = std::max(params.gate.form.groups, 1), cols = params.cols * groups;
  ColumnLook<A> of_row = look;
  of_row.cols = cols;
  PartialSums<A> sums{};
  int count = 0;
  auto add = [&](void* gradient, const A* from, DType dtype) {
    if (!gradient) return;
    sums.partials[count] = from;
    sums.out[count] = gradient;
    sums.dtype[count++] = dtype;
  };
  add(params.dweight, workspace.dweight, params.weight.dtype);
  add(params.dbias, workspace.dbias, params.bias.dtype);
  const int look_blocks =
      params.watch.report ? (cols + plan.sum_threads - 1) / plan.sum_threads : 0;
  const dim3 grid(look_blocks + (cols + kWarpSize - 1) / kWarpSize, count);
  return launch(plan.sum_threads == kSumThreads ? sum_partials<A, kSumThreads>
                                                : sum_partials<A, kFewSumThreads>,
                grid, plan.sum_threads, {0, 1, plan.overlaps}, stream, sums, of_row, look_blocks,
                plan.partials / groups);
}
template cudaError_t norm_second_stage(const NormBackwardParams&, const NormBackwardPlan&,
                                       const BackwardWorkspace<float>&, const ColumnLook<float>&,
                                       cudaStream_t);
template cudaError_t norm_second_stage(const NormBackwardParams&, const NormBackwardPlan&,
                                       const BackwardWorkspace<double>&, const ColumnLook<double>&,
                                       cudaStream_t);

}  // namespace fused_norm
