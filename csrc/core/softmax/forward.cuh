// Forward kernels: the sum of a row's exponentials, then the row divided by it.
#pragma once

#include "core/softmax/exp_sum.cuh"
#include "core/softmax/policies.cuh"
#include "core/softmax/row.cuh"

namespace fused_norm {

// The largest element of some packs. 16-bit elements stay in pairs.
template <typename A, typename T, int N, int kPacks>
__device__ __forceinline__ A max_of_packs(const Pack<T, N> (&packs)[kPacks]) {
  if constexpr (sizeof(T) == 2) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair tops[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      tops[i] = bit_copy<Pair>(packs[0].words.at[i]);
#pragma unroll
      for (int p = 1; p < kPacks; ++p) {
        tops[i] = __hmax2(tops[i], bit_copy<Pair>(packs[p].words.at[i]));
      }
    }
#pragma unroll
    for (int i = 1; i < N / 2; ++i) tops[0] = __hmax2(tops[0], tops[i]);
    const float2 pair = to_floats(bit_copy<uint32_t>(tops[0]), T());
    return larger_of(kLowest<A>, larger_of(pair.x, pair.y));
  } else {
    A top = kLowest<A>;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      A x[N];
      unpack(packs[p], x);
      top = larger_of(top, max_of(x));
    }
    return top;
  }
}
template <typename A, int N, int kPacks>
__device__ __forceinline__ A max_of_packs(const Scores<A, N> (&scores)[kPacks]) {
  A top = kLowest<A>;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) top = larger_of(top, max_of(scores[p].at));
  return top;
}

// Of each element of the packs, the sum over the packs of exp(x - shift). Those from the
// kReached-th on are past the row, and have none.
template <int kReached, int N, typename A, typename Kept, int kPacks>
__device__ __forceinline__ void exp_sums(const Kept (&kept)[kPacks], A shift, A (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    A exponentials[kPacks] = {};
#pragma unroll
    for (int p = 0; p < kReached; ++p) exponentials[p] = exp_of(element_of(kept[p], i) - shift);
    sums[i] = sum_of(exponentials);
  }
}

// The outputs of a pack of scores.
template <bool kLog, int N, typename A, typename Kept>
__device__ __forceinline__ void outputs_of(const Kept& kept, A shift, const Finish<kLog, A>& finish,
                                           A (&y)[N]) {
  unpack(kept, y);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    y[i] = kLog ? finish(y[i] - shift, A(0)) : finish(A(0), exp_of(y[i] - shift));
  }
}

// A row that lies in the packs of the threads that share it, kPacks each, from its scores to the
// last store. `cols` are all that the row may have.
template <bool kLog, bool kMayShare, int kPacks, int N, bool kRegular, typename A, typename Kept,
          typename Group, typename Load, typename Out>
__device__ __forceinline__ void softmax_of_row(Kept (&kept)[kPacks], Group& group,
                                               RowCluster& cluster, bool spread,
                                               const RunPlace<N, kRegular>& place, int col,
                                               int cols, const Load& load, const Out& out) {
  // Exponentials are kept where registers allow, else made twice.
  constexpr bool kKeep = !kLog && kPacks * N <= 32;
  const A top = group.reduce_lanes(max_of_packs<A>(kept), LargerOf());
  const A shift = shift_of(top);
  // Packs that no lane of a warp has of the row cost nothing.
  constexpr bool kMayEnd = kRegular && !kMayShare && kPacks > 2;
  auto reached = [&](int p) { return !kMayEnd || p == 0 || p * place.lanes * N < cols; };
  A exponentials[kKeep ? N : 1][kPacks] = {}, sums[N];
  if constexpr (kKeep) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!reached(p)) break;
#pragma unroll
      for (int i = 0; i < N; ++i) exponentials[i][p] = exp_of(element_of(kept[p], i) - shift);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = sum_of(exponentials[i]);
  } else if (reached(kPacks - 1)) {
    exp_sums<kPacks>(kept, shift, sums);
  } else {
    exp_sums<kPacks - 1>(kept, shift, sums);
  }
  ExpSum<A> sum{top, sum_of_run(sums, place, group)};
  if constexpr (kMayShare) {
    __shared__ RowSlots<ExpSum<A>> slots;
    sum = reduce_row(group, cluster, spread, sum, ExpSum<A>::empty(), slots, ExpSum<A>::merge);
  }

  Finish<kLog, A> finish(sum, top);
  if constexpr (Load::kMasked) finish.of_empty(sum, load.masking.of_empty);
  if constexpr (kPacks * N > 32) forget_elements(kept);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    A y[N];
    if constexpr (kKeep) {
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] = finish(A(0), exponentials[i][p]);
    } else {
      outputs_of(kept[p], shift, finish, y);
    }
    out.template store<kPacks>(p, col, y);
  }
}

// Rows held by kPacks packs a thread stay in registers: read once. Groups of up to a warp have a
// row each; with kMayShare, a block or the blocks of a cluster share one.
template <bool kRegular, bool kLog, bool kMayShare, int kPacks, typename Load, typename Store>
__device__ __forceinline__ void softmax_forward_once(const Load& load, const Store& store) {
  using X = typename Load::Input;
  constexpr int N = kPackElements<X, typename Store::Output>;
  using Row = typename Load::template Row<N, kRegular>;

  RowGroup<kMayShare> group;
  RowCluster cluster;
  const RowPosition at(group, cluster, kMayShare);
  const auto place = store.template place<N, kRegular>(at.row, group);
  const int col = at.rank * group.threads() * kPacks * N + run_start<kPacks, N>(group);
  typename Row::Kept kept[kPacks];
  {
    const Row in = load.open(at.row, place);
    Pack<X, N> packs[kPacks];
    in.reader.load(packs, col);
    in.prepare(packs, kept, col);
  }
  if (at.spread) cluster.wait();
  softmax_of_row<kLog, kMayShare, kPacks, N, kRegular, Accumulator<X>>(
      kept, group, cluster, at.spread, place, col, store.cols, load, store.open(at.row, place));
}

// For rows whose packs a thread are any of kPacks: it takes the registers of the most.
template <typename Load, typename Store, int... kPacks>
__global__ void __launch_bounds__(kWarpTierThreads, 8)
    softmax_forward_warp(const __grid_constant__ Load load, const __grid_constant__ Store store,
                         bool regular, bool log, int packs) {
  with_form<!Load::kMasked>(regular, log, [&](auto is_regular, auto is_log) {
    with_packs<kPacks...>(packs, [&](auto count) {
      softmax_forward_once<decltype(is_regular)::value, decltype(is_log)::value, false,
                           decltype(count)::value>(load, store);
    });
  });
}

template <typename Load, typename Store, int kPacks>
__global__ void __launch_bounds__(kBlockTierThreads, 2)
    softmax_forward_block(const __grid_constant__ Load load, const __grid_constant__ Store store,
                          bool regular, bool log) {
  with_form<!Load::kMasked>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_forward_once<decltype(is_regular)::value, decltype(is_log)::value, true, kPacks>(load,
                                                                                             store);
  });
}

}  // namespace fused_norm
