#include "core/common/launch.cuh"
#include "core/norm/launch.cuh"
#include "core/norm/partial_sums.cuh"

namespace fused_norm {

template <typename A>
cudaError_t norm_second_stage(const NormBackwardParams& params, const NormBackwardPlan& plan,
                              const BackwardWorkspace<A>& workspace, const ColumnLook<A>& look,
                              cudaStream_t stream) {
  if (!params.dweight && !params.dbias)
    return params.watch.report ? launch_column_look(look, stream) : cudaSuccess;
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
      params.watch.report ? (params.cols + plan.sum_threads - 1) / plan.sum_threads : 0;
  const dim3 grid(look_blocks + (params.cols + kWarpSize - 1) / kWarpSize, count);
  return detail::launch(plan.sum_threads == kSumThreads ? sum_partials<A, kSumThreads>
                                                        : sum_partials<A, kFewSumThreads>,
                        grid, plan.sum_threads, {0, 1, plan.overlaps}, stream, sums, look,
                        look_blocks, plan.partials);
}
template cudaError_t norm_second_stage(const NormBackwardParams&, const NormBackwardPlan&,
                                       const BackwardWorkspace<float>&, const ColumnLook<float>&,
                                       cudaStream_t);
template cudaError_t norm_second_stage(const NormBackwardParams&, const NormBackwardPlan&,
                                       const BackwardWorkspace<double>&, const ColumnLook<double>&,
                                       cudaStream_t);

}  // namespace fused_norm
