#include "core/common/launch.cuh"
#include "core/norm/launch.cuh"
#include "core/norm/partial_sums.cuh"

namespace fused_norm {

template <typename A>
cudaError_t norm_second_stage(const NormBackwardParams& params, const NormBackwardPlan& plan,
                              const A* dweight_partials, const A* dbias_partials,
                              const ColumnLook<A>& look, cudaStream_t stream) {
  PartialSums<A> sums{};
  int count = 0;
  auto add = [&](void* gradient, const A* from, DType dtype) {
    if (!gradient) return;
    sums.partials[count] = from;
    sums.out[count] = gradient;
    sums.dtype[count++] = dtype;
  };
  add(params.dweight, dweight_partials, params.weight.dtype);
  add(params.dbias, dbias_partials, params.bias.dtype);
  const int look_blocks =
      params.watch.report ? (params.cols + plan.sum_threads - 1) / plan.sum_threads : 0;
  const dim3 grid(look_blocks + (params.cols + kWarpSize - 1) / kWarpSize, count);
  return detail::launch(plan.sum_threads == kSumThreads ? sum_partials<A, kSumThreads>
                                                        : sum_partials<A, kFewSumThreads>,
                        grid, plan.sum_threads, {0, 1, plan.overlaps}, stream, sums, look,
                        look_blocks, plan.partials);
}
template cudaError_t norm_second_stage(const NormBackwardParams&, const NormBackwardPlan&,
                                       const float*, const float*, const ColumnLook<float>&,
                                       cudaStream_t);
template cudaError_t norm_second_stage(const NormBackwardParams&, const NormBackwardPlan&,
                                       const double*, const double*, const ColumnLook<double>&,
                                       cudaStream_t);

}  // namespace fused_norm
