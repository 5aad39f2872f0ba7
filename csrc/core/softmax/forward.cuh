// Forward kernels: the sum of a row's exponentials, then the row divided by it.
#pragma once

#include "core/softmax/exp_sum.cuh"
#include "core/softmax/policies.cuh"
#include "core/softmax/row.cuh"

namespace fused_norm {

// A row that lies in the packs of the threads that share it, kPacks each, from its scores to the
// last store. A lane's packs start at columns col, col + step, ...
template <bool kLog, bool kMayShare, int kPacks, int N, bool kZeroIfEmpty, typename A,
          typename Kept, typename Group, typename Out>
__device__ __forceinline__ void softmax_of_row(Kept (&kept)[kPacks], Group& group,
                                               RowCluster& cluster, bool spread, int col, int step,
                                               Out out) {
  // Exponentials are kept where registers allow, else made twice.
  constexpr bool kKeep = !kLog && kPacks * N <= 32;
  A top = kLowest<A>;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    A x[N];
    unpack(kept[p], x);
    top = larger_of(top, max_of(x));
  }
  top = group.reduce_lanes(top, LargerOf());
  const A shift = shift_of(top);
  if constexpr (kPacks * N > 32) forget_elements(kept);
  A exponentials[kPacks][N], sums[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    A x[N];
    unpack(kept[p], x);
#pragma unroll
    for (int i = 0; i < N; ++i) exponentials[p][i] = exp_of(x[i] - shift);
    sums[p] = sum_of(exponentials[p]);
  }
  ExpSum<A> sum{top, group.reduce_lanes(sum_of(sums), SumOf())};
  if constexpr (kMayShare) {
    __shared__ RowSlots<ExpSum<A>> slots;
    sum = reduce_row(group, cluster, spread, sum, ExpSum<A>::empty(), slots, ExpSum<A>::merge);
  }

  const Finish<kLog, A> finish(sum, top, kZeroIfEmpty);
  if constexpr (kPacks * N > 32) forget_elements(kept);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    A y[N];
    if constexpr (!kKeep) unpack(kept[p], y);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      y[i] = kKeep  ? finish(A(0), exponentials[p][i])
             : kLog ? finish(y[i] - shift, A(0))
                    : finish(A(0), exp_of(y[i] - shift));
    }
    out.store(p, kPacks, col + p * step, y);
  }
}

// Rows held by kPacks packs a thread stay in registers: read once. Groups of up to a warp have a
// row each; with kMayShare, a block or the blocks of a cluster share one.
template <bool kRegular, bool kLog, bool kMayShare, int kPacks, typename Load, typename Store>
__device__ __forceinline__ void softmax_forward_once(const Load& load, const Store& store) {
  using X = typename Load::Input;
  constexpr int N = kPackElements<X, typename Store::Output>;
  using Row = typename Load::template Row<N, kRegular>;

  RowGroup<Barrier::kBlock> group;
  RowCluster cluster;
  const RowPosition at(group, cluster, kMayShare);
  const int step = group.lanes() * N;
  const int col = at.rank * group.threads() * kPacks * N + run_start<kPacks, N>(group);
  typename Row::Kept kept[kPacks];
  {
    const Row in = load.template open<N, kRegular>(at.row, group);
    Pack<X, N> packs[kPacks];
    in.reader.load_run(packs, col);
    in.prepare(packs, kept, col, step);
  }
  if (at.spread) cluster.wait();
  softmax_of_row<kLog, kMayShare, kPacks, N, Load::kMasked, Accumulator<X>>(
      kept, group, cluster, at.spread, col, step, store.template open<N, kRegular>(at.row, group));
}

// Brings a thread's part of a row up to date with a few packs of scores (Milakov and Gimelshein,
// 2018).
template <typename A, int N, typename Kept, int kPacks>
__device__ __forceinline__ void add_scores(ExpSum<A>& part, Kept (&kept)[kPacks]) {
  A top = part.max, sums[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    A x[N];
    unpack(kept[p], x);
    top = larger_of(top, max_of(x));
  }
  const A shift = shift_of(top);
  forget_elements(kept);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    A x[N];
    unpack(kept[p], x);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = exp_of(x[i] - shift);
    sums[p] = sum_of(x);
  }
  part = {top, fma(part.sum, exp_of(part.max - shift), sum_of(sums))};
}

// The sum of a row from its threads' parts.
template <typename A, typename Group>
__device__ __forceinline__ ExpSum<A> sum_of_parts(ExpSum<A> part, Group& group, RowCluster& cluster,
                                                  bool spread, RowSlots<ExpSum<A>>& slots) {
  const A top = group.reduce_lanes(part.max, LargerOf());
  part.sum *= exp_of(part.max - shift_of(top));
  part = {top, group.reduce_lanes(part.sum, SumOf())};
  return reduce_row(group, cluster, spread, part, ExpSum<A>::empty(), slots, ExpSum<A>::merge);
}

// Stores a few packs of scores as outputs.
template <bool kLog, int N, typename A, typename Kept, int kPacks, typename Out>
__device__ __forceinline__ void store_outputs(const Kept (&kept)[kPacks], A shift,
                                              const Finish<kLog, A>& finish, int col, int step,
                                              Out& out) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    A y[N];
    unpack(kept[p], y);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      y[i] = kLog ? finish(y[i] - shift, A(0)) : finish(A(0), exp_of(y[i] - shift));
    }
    out.store(p, kPacks, col + p * step, y);
  }
}

// Any length: each block of a cluster takes a slice of the row's columns, which it reads for its
// sum and again to divide it, the second time from shared memory where the launch gave enough of it
// (cached). Each thread reads back what it wrote itself.
template <bool kRegular, bool kLog, typename Load, typename Store>
__device__ __forceinline__ void softmax_forward_twice(const Load& load, const Store& store,
                                                      int slice, bool cached) {
  using X = typename Load::Input;
  using A = Accumulator<X>;
  constexpr int N = kPackElements<X, typename Store::Output>;
  constexpr int kPacks = 4;
  using Row = typename Load::template Row<N, kRegular>;
  using Fetched = typename RowReader<X, N, kRegular>::template FetchedRun<kPacks>;
  extern __shared__ __align__(16) char cache_bytes[];
  using CachedPack = AlignedPack<X, N>;
  CachedPack* const cache = reinterpret_cast<CachedPack*>(cache_bytes) + threadIdx.x;

  RowGroup<Barrier::kBlock> group;
  RowCluster cluster;
  const RowPosition at(group, cluster, true);
  const int step = group.lanes() * N, stride = group.threads() * kPacks * N;
  const int begin = at.rank * slice, end = min(begin + slice, load.x.cols);
  const Row in = load.template open<N, kRegular>(at.row, group);

  ExpSum<A> part = ExpSum<A>::empty();
  Fetched fetched;
  if (begin < end) in.reader.fetch_run(fetched, begin + run_start<kPacks, N>(group));
  for (int base = begin; base < end; base += stride) {
    const int col = base + run_start<kPacks, N>(group);
    Pack<X, N> packs[kPacks];
    in.reader.extract_run(fetched, packs, col);
    if (base + stride < end) in.reader.fetch_run(fetched, col + stride);
    if (cached) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        cache[(base - begin) / N + p * group.threads()] = {packs[p]};
      }
    }
    typename Row::Kept kept[kPacks];
    in.prepare(packs, kept, col, step);
    add_scores<A, N>(part, kept);
  }
  if (at.spread) cluster.wait();
  __shared__ RowSlots<ExpSum<A>> slots;
  const ExpSum<A> sum = sum_of_parts(part, group, cluster, at.spread, slots);
  const Finish<kLog, A> finish(sum, sum.max, Load::kMasked);
  const A shift = shift_of(sum.max);
  auto out = store.template open<N, kRegular>(at.row, group);
  // Backwards: what was read last is the likeliest to be in the L2 cache yet.
  for (int base = last_chunk(begin, end, stride); base >= begin; base -= stride) {
    const int col = base + run_start<kPacks, N>(group);
    Pack<X, N> packs[kPacks];
    if (cached) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        packs[p] = cache[(base - begin) / N + p * group.threads()].pack;
      }
    } else {
      in.reader.load_run(packs, col);
    }
    typename Row::Kept kept[kPacks];
    in.prepare(packs, kept, col, step);
    store_outputs<kLog, N>(kept, shift, finish, col, step, out);
  }
}

template <typename Load, typename Store, int kPacks>
__global__ void __launch_bounds__(kWarpTierThreads, 8)
    softmax_forward_warp(const __grid_constant__ Load load, const __grid_constant__ Store store,
                         bool regular, bool log) {
  with_form<!Load::kMasked>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_forward_once<decltype(is_regular)::value, decltype(is_log)::value, false, kPacks>(
        load, store);
  });
}

template <typename Load, typename Store, int kPacks>
__global__ void __launch_bounds__(kBlockTierThreads, kPacks <= 4 || !Load::kMasked ? 2 : 1)
    softmax_forward_block(const __grid_constant__ Load load, const __grid_constant__ Store store,
                          bool regular, bool log) {
  with_form<!Load::kMasked>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_forward_once<decltype(is_regular)::value, decltype(is_log)::value, true, kPacks>(load,
                                                                                             store);
  });
}

template <typename Load, typename Store>
__global__ void __launch_bounds__(kBlockTierThreads,
                                  sizeof(typename Load::Input) == 8 || Load::kMasked ? 1 : 2)
    softmax_forward_stream(const __grid_constant__ Load load, const __grid_constant__ Store store,
                           bool regular, bool log, int slice, bool cached) {
  with_form<!Load::kMasked>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_forward_twice<decltype(is_regular)::value, decltype(is_log)::value>(load, store, slice,
                                                                                cached);
  });
}

}  // namespace fused_norm
