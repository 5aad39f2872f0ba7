// Backward kernels: one sum of a row, then its gradient. They read the output, not the input.
//   softmax      dx = scale * (dy - sum(y * dy)) * y
//   log_softmax  dx = scale * (dy - exp(y) * sum(dy))
#pragma once

#include "core/common/statistics.cuh"
#include "core/softmax/exp_sum.cuh"
#include "core/softmax/policies.cuh"
#include "core/softmax/row.cuh"

namespace fused_norm {

template <typename Y>
struct GradientLoad {
  Rows<Y> dy, y;
  Accumulator<Y> scale;
};

// What the columns of a pack add to the row's sum. Columns past the row are zero in both.
template <bool kLog, typename Y, int N>
__device__ __forceinline__ Accumulator<Y> gradient_sum(const Pack<Y, N>& dy_pack,
                                                       const Pack<Y, N>& y_pack) {
  using A = Accumulator<Y>;
  A dy[N], y[N];
  unpack(dy_pack, dy);
  if constexpr (kLog) return sum_of(dy);
  unpack(y_pack, y);
  A sum = dy[0] * y[0];
#pragma unroll
  for (int i = 1; i < N; ++i) sum = fma(dy[i], y[i], sum);
  return sum;
}

template <bool kLog, typename Y, int N, typename A>
__device__ __forceinline__ void gradient(const Pack<Y, N>& dy_pack, const Pack<Y, N>& y_pack, A sum,
                                         A scale, A (&dx)[N]) {
  A y[N];
  unpack(dy_pack, dx);
  unpack(y_pack, y);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    dx[i] = (kLog ? fma(-exp_of(y[i]), sum, dx[i]) : (dx[i] - sum) * y[i]) * scale;
  }
}

// A row that lies in the packs of the threads that share it, kPacks of each tensor, to its
// gradient. A lane's packs start at columns col, col + step, ...
template <bool kLog, bool kMayShare, int kPacks, typename Y, int N, typename Group, typename Out>
__device__ __forceinline__ void gradient_of_row(Pack<Y, N> (&dy)[kPacks], Pack<Y, N> (&y)[kPacks],
                                                Accumulator<Y> scale, Group& group,
                                                RowCluster& cluster, bool spread, int col, int step,
                                                Out out) {
  using A = Accumulator<Y>;
  A sums[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) sums[p] = gradient_sum<kLog>(dy[p], y[p]);
  A sum = group.reduce_lanes(sum_of(sums), SumOf());
  if constexpr (kMayShare) {
    __shared__ RowSlots<A> slots;
    sum = reduce_row(group, cluster, spread, sum, A(0), slots, SumOf());
  }
  forget_elements(dy);
  forget_elements(y);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    A dx[N];
    gradient<kLog>(dy[p], y[p], sum, scale, dx);
    out.store(p, kPacks, col + p * step, dx);
  }
}

// Rows held by kPacks packs a thread of each tensor stay in registers: read once.
template <bool kRegular, bool kLog, bool kMayShare, int kPacks, typename Y, typename Store>
__device__ __forceinline__ void softmax_backward_once(const GradientLoad<Y>& load,
                                                      const Store& store) {
  constexpr int N = kPackElements<Y, typename Store::Output>;
  RowGroup<Barrier::kBlock> group;
  RowCluster cluster;
  const RowPosition at(group, cluster, kMayShare);
  const int step = group.lanes() * N;
  const int col = at.rank * group.threads() * kPacks * N + run_start<kPacks, N>(group);
  Pack<Y, N> dy[kPacks], y[kPacks];
  {
    const auto dy_row = load.dy.template open<N, kRegular>(at.row, group);
    const auto y_row = load.y.template open<N, kRegular>(at.row, group);
    typename RowReader<Y, N, kRegular>::template FetchedRun<kPacks> dy_fetched, y_fetched;
    dy_row.fetch_run(dy_fetched, col);
    y_row.fetch_run(y_fetched, col);
    dy_row.extract_run(dy_fetched, dy, col);
    y_row.extract_run(y_fetched, y, col);
  }
  if (at.spread) cluster.wait();
  gradient_of_row<kLog, kMayShare>(dy, y, load.scale, group, cluster, at.spread, col, step,
                                   store.template open<N, kRegular>(at.row, group));
}

// Any length: each block of a cluster takes a slice of the columns, which it reads for the sum and
// again for the gradient, the second time from shared memory where the launch gave enough of it
// (cached). Each thread reads back what it wrote itself.
template <bool kRegular, bool kLog, typename Y, typename Store>
__device__ __forceinline__ void softmax_backward_twice(const GradientLoad<Y>& load,
                                                       const Store& store, int slice, bool cached) {
  using A = Accumulator<Y>;
  constexpr int N = kPackElements<Y, typename Store::Output>;
  constexpr int kPacks = 2;
  using Fetched = typename RowReader<Y, N, kRegular>::template FetchedRun<kPacks>;
  extern __shared__ __align__(16) char cache_bytes[];
  using CachedPack = AlignedPack<Y, N>;
  CachedPack* const dy_cache = reinterpret_cast<CachedPack*>(cache_bytes) + threadIdx.x;
  CachedPack* const y_cache = dy_cache + slice / N;

  RowGroup<Barrier::kBlock> group;
  RowCluster cluster;
  const RowPosition at(group, cluster, true);
  const int step = group.lanes() * N, stride = group.threads() * kPacks * N;
  const int begin = at.rank * slice, end = min(begin + slice, load.y.cols);
  const auto dy_row = load.dy.template open<N, kRegular>(at.row, group);
  const auto y_row = load.y.template open<N, kRegular>(at.row, group);

  A sum = 0;
  Fetched dy_fetched, y_fetched;
  auto fetch = [&](int col) {
    dy_row.fetch_run(dy_fetched, col);
    if (!kLog || cached) y_row.fetch_run(y_fetched, col);
  };
  if (begin < end) fetch(begin + run_start<kPacks, N>(group));
  for (int base = begin; base < end; base += stride) {
    const int col = base + run_start<kPacks, N>(group);
    Pack<Y, N> dy[kPacks], y[kPacks];
    dy_row.extract_run(dy_fetched, dy, col);
    if (!kLog || cached) y_row.extract_run(y_fetched, y, col);
    if (base + stride < end) fetch(col + stride);
    A sums[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      sums[p] = gradient_sum<kLog>(dy[p], y[p]);
      if (cached) {
        const int slot = (base - begin) / N + p * group.threads();
        dy_cache[slot] = {dy[p]};
        y_cache[slot] = {y[p]};
      }
    }
    sum += sum_of(sums);
  }
  __shared__ RowSlots<A> slots;
  if (at.spread) cluster.wait();
  sum =
      reduce_row(group, cluster, at.spread, group.reduce_lanes(sum, SumOf()), A(0), slots, SumOf());

  auto out = store.template open<N, kRegular>(at.row, group);
  // Backwards: what was read last is the likeliest to be in the L2 cache yet.
  for (int base = last_chunk(begin, end, stride); base >= begin; base -= stride) {
    const int col = base + run_start<kPacks, N>(group);
    Pack<Y, N> dy[kPacks], y[kPacks];
    if (!cached) {
      dy_row.load_run(dy, col);
      y_row.load_run(y, col);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (cached) {
        const int slot = (base - begin) / N + p * group.threads();
        dy[p] = dy_cache[slot].pack;
        y[p] = y_cache[slot].pack;
      }
      A dx[N];
      gradient<kLog>(dy[p], y[p], sum, load.scale, dx);
      out.store(p, kPacks, col + p * step, dx);
    }
  }
}

template <typename Y, typename Store, int kPacks>
__global__ void __launch_bounds__(kWarpTierThreads, 8)
    softmax_backward_warp(const __grid_constant__ GradientLoad<Y> load,
                          const __grid_constant__ Store store, bool regular, bool log) {
  with_form<true>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_backward_once<decltype(is_regular)::value, decltype(is_log)::value, false, kPacks>(
        load, store);
  });
}

template <typename Y, typename Store, int kPacks>
__global__ void __launch_bounds__(kBlockTierThreads, kPacks <= 4 ? 2 : 1)
    softmax_backward_block(const __grid_constant__ GradientLoad<Y> load,
                           const __grid_constant__ Store store, bool regular, bool log) {
  with_form<true>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_backward_once<decltype(is_regular)::value, decltype(is_log)::value, true, kPacks>(
        load, store);
  });
}

template <typename Y, typename Store>
__global__ void __launch_bounds__(kBlockTierThreads, sizeof(Y) == 8 ? 1 : 2)
    softmax_backward_stream(const __grid_constant__ GradientLoad<Y> load,
                            const __grid_constant__ Store store, bool regular, bool log, int slice,
                            bool cached) {
  with_form<true>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_backward_twice<decltype(is_regular)::value, decltype(is_log)::value>(load, store, slice,
                                                                                 cached);
  });
}

}  // namespace fused_norm
