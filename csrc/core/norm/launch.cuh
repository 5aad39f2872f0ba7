// From parameters to a kernel: the plan, made into an instantiation. Each dtype of x is one
// translation unit.
#pragma once

#include <algorithm>

#include "core/common/launch.cuh"
#include "core/norm/backward.cuh"
#include "core/norm/backward_few.cuh"
#include "core/norm/backward_ring.cuh"
#include "core/norm/forward_ring.cuh"
#include "core/norm/launchers.cuh"

namespace fused_norm {

template <typename Y>
AffineStore<Y> affine_store(const NormForwardParams& params) {
  return {static_cast<Y*>(params.y), params.cols, params.weight, params.bias,
          static_cast<Accumulator<Y>>(params.weight_offset)};
}

template <typename Load, typename Y>
StatisticsOf<Load, AffineStore<Y>> statistics_out(const NormForwardParams& params) {
  using A = Accumulator<typename Load::Input>;
  return {static_cast<A*>(params.mean),
          static_cast<A*>(params.rstd),
          static_cast<A>(params.eps),
          static_cast<A>(params.cols),
          A(1) / params.cols,
          {params.list.room, params.list.columns, static_cast<A*>(params.list.side)}};
}

template <typename Y, typename Load>
cudaError_t norm_forward_from(const Load& load, const NormForwardParams& params,
                              const NormForwardPlan& plan, cudaStream_t stream) {
  using X = typename Load::Input;
  using Store = AffineStore<Y>;
  const Store store = affine_store<Y>(params);
  const auto out = statistics_out<Load, Y>(params);
  const bool typed = store.all_of(kDTypeOf<X>, !params.rms);
  const bool whole_warps = plan.threads_per_row >= kWarpSize;
  const RowsLie lie = rows_lie<X>(params.cols, plan.pack);
  KernelPlan launched = plan;
  if (lie == RowsLie::kRegular && typed) {
    if constexpr (std::is_same_v<Load, InputLoad<Y>>) {
      if (plan.ring.slots > 0) {
        launched.blocks = plan.ring.blocks;
        launched.shared_bytes = plan.ring.shared_bytes;
        return launch_plan(norm_forward_ring<X>, launched, stream, load, store, out,
                           plan.ring.slots);
      }
    }
    const int threads = plan.threads_per_row;
    const int of_row =
        (params_ahead(plan.packs) ? threads * params_bytes(plan.packs, !params.rms) : 0) +
        (params.list.room > 0 ? listed_ahead(plan.packs, threads) * kListedBytes : 0);
    launched.shared_bytes = std::max(plan.shared_bytes, plan.rows_per_block * of_row);
  }
  const bool deals_typed = typed && deals_out_typed(Load::kAdds, std::is_same_v<X, Y>, plan.packs,
                                                    whole_warps, sizeof(X));
  auto run = [&](auto kernel) {
    return launch_plan(kernel, launched, stream, load, store, out, lie, deals_typed);
  };
  if (!whole_warps) return run(norm_forward_registers<Load, Store, 4, false>);
  if (plan.packs == 2) return run(norm_forward_registers<Load, Store, 2, true>);
  if (plan.packs == 4) return run(norm_forward_registers<Load, Store, 4, true>);
  return run(norm_forward_registers<Load, Store, kMostPacks, true>);
}

template <typename X>
InputLoad<X> input_load(const void* x, const RowLayout& layout, const NormForwardParams& params) {
  return {static_cast<const X*>(x), layout, params.rows, params.cols};
}

template <typename X>
cudaError_t norm_backward_few_rows(const BackwardInput<X, X, float>& in,
                                   const BackwardOutput<X, float>& out,
                                   const ColumnLook<float>& look, const NormBackwardParams& params,
                                   const NormBackwardPlan& plan, cudaStream_t stream) {
  const ColumnGradients gradients{{params.dweight, params.dbias},
                                  {params.weight.dtype, params.bias.dtype}};
  const int tiles =
      params.dweight || params.dbias ? (params.cols + kFewColumns - 1) / kFewColumns : 0;
  const int64_t rows = params.dx ? params.rows : 0;
  const int splits = plan.few_splits;
  const int columns = plan.threads_per_row * splits;
  const int looks = look.watch.report ? (params.cols + columns - 1) / columns : 0;  // clusters
  const int64_t clusters = looks + tiles + (rows + splits - 1) / splits;
  if (clusters == 0) return cudaSuccess;
  const int vectors = param_kinds(params.from_output, 1);
  const int shared_bytes = vectors * plan.threads_per_row * plan.packs * plan.pack * 4;
  return launch(params.list.room > 0 ? norm_backward_few<X, true> : norm_backward_few<X, false>,
                static_cast<int>(clusters * splits), plan.threads_per_row,
                {shared_bytes, splits, plan.overlaps}, stream, in, out, gradients, look,
                looks * splits, tiles, splits);
}

template <typename Y, typename S>
BackwardInput<Y, S, float> backward_input(const NormBackwardParams& params,
                                          const ListedColumns<float>& listed) {
  return {params.rows,
          params.cols,
          1.0f / params.cols,
          params.rms,
          params.from_output,
          static_cast<const Y*>(params.dy),
          params.dy_layout,
          static_cast<const S*>(params.saved),
          params.saved_layout,
          static_cast<const float*>(params.mean),
          static_cast<const float*>(params.rstd),
          params.weight,
          params.bias,
          static_cast<float>(params.weight_offset),
          listed};
}

template <typename X, typename Y, bool kFromOutput>
cudaError_t norm_backward_as(const NormBackwardParams& params, const NormBackwardPlan& plan,
                             cudaStream_t stream) {
  using S = std::conditional_t<!kFromOutput, X, Y>;
  const BackwardWorkspace<float> workspace(params, plan);
  const ColumnLook<float> look = column_look_of<float>(params);
  const BackwardInput<Y, S, float> in = backward_input<Y, S>(params, look.listed);
  const BackwardOutput<X, float> out{static_cast<X*>(params.dx), workspace.dweight, workspace.dbias,
                                     static_cast<const X*>(params.dresidual)};
  if constexpr (std::is_same_v<X, Y>) {
    if (plan.few_splits > 0) return norm_backward_few_rows(in, out, look, params, plan, stream);
  }
  cudaError_t error = cudaErrorInvalidValue;
  auto run = [&](auto kernel, auto... how) {
    error = launch_plan(kernel, plan, stream, in, out, how...);
  };
  if (plan.tier == Tier::kRing) {
    constexpr bool kRms = !kForBothNorms<X, Y>;
    run(params.rms ? norm_backward_ring<X, Y, S, kRms, kFromOutput>
                   : norm_backward_ring<X, Y, S, false, kFromOutput>,
        plan.stages, plan.partial_sets, plan.rows_in_sequence);
  } else {
    const RowsLie lie = rows_lie<X>(params.cols, plan.pack, kBackwardInPairs<X, Y>);
    if constexpr (std::is_same_v<X, Y>) {
      if (plan.packs == 3) run(norm_backward_registers<X, Y, S, kFromOutput, 3>, lie);
    }
    if (plan.packs < 3)
      run(plan.packs == 1 ? norm_backward_registers<X, Y, S, kFromOutput, 1>
                          : norm_backward_registers<X, Y, S, kFromOutput, 2>,
          lie);
  }
  if (error != cudaSuccess) return error;
  return norm_second_stage(params, plan, workspace, look, stream);
}

template <typename X>
cudaError_t NormOf<X>::forward(const NormForwardParams& params, const NormForwardPlan& plan,
                               cudaStream_t stream) {
  const auto load = input_load<X>(params.x, params.x_layout, params);
  return with_dtype<X, float>(params.y_dtype, [&](auto y) {
    return norm_forward_from<decltype(y)>(load, params, plan, stream);
  });
}

template <typename X>
cudaError_t NormOf<X>::backward(const NormBackwardParams& params, const NormBackwardPlan& plan,
                                cudaStream_t stream) {
  auto run = [&](auto y) {
    using Y = decltype(y);
    return params.from_output ? norm_backward_as<X, Y, true>(params, plan, stream)
                              : norm_backward_as<X, Y, false>(params, plan, stream);
  };
  if constexpr (std::is_same_v<X, float>) {
    return with_dtype<float, __half, __nv_bfloat16>(params.y_dtype, run);
  } else {
    return with_dtype<X, float>(params.y_dtype, run);
  }
}

}  // namespace fused_norm
