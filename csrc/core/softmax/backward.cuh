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

// a * b, never made into one operation with an addition that follows unless it is exact: a sum of
// products would depend on their order.
template <typename Y>
__device__ __forceinline__ float product_of(float a, float b) {
  return sizeof(Y) == 2 ? a * b : __fmul_rn(a, b);
}
template <typename Y>
__device__ __forceinline__ double product_of(double a, double b) {
  return __dmul_rn(a, b);
}

// Of each element of the packs, the sum over the packs of what it adds to the row's sum. Columns
// past the row are zero in both.
template <bool kLog, typename Y, int N, int kPacks>
__device__ __forceinline__ void gradient_sums(const Pack<Y, N> (&dy)[kPacks],
                                              const Pack<Y, N> (&y)[kPacks],
                                              Accumulator<Y> (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    Accumulator<Y> terms[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      terms[p] = element_of(dy[p], i);
      if (!kLog) terms[p] = product_of<Y>(terms[p], element_of(y[p], i));
    }
    sums[i] = sum_of(terms);
  }
}

template <bool kLog, typename A>
__device__ __forceinline__ A gradient_of(A dy, A y, A sum, A scale) {
  return (kLog ? fma(-exp_of(y), sum, dy) : (dy - sum) * y) * scale;
}

template <bool kLog, typename Y, int N, typename A>
__device__ __forceinline__ void gradient(const Pack<Y, N>& dy_pack, const Pack<Y, N>& y_pack, A sum,
                                         A scale, A (&dx)[N]) {
  A y[N];
  unpack(dy_pack, dx);
  unpack(y_pack, y);
#pragma unroll
  for (int i = 0; i < N; ++i) dx[i] = gradient_of<kLog>(dx[i], y[i], sum, scale);
}

// A row that lies in the packs of the threads that share it, kPacks of each tensor, to its
// gradient.
template <bool kLog, bool kMayShare, int kPacks, typename Y, int N, bool kRegular, typename Group,
          typename Out>
__device__ __forceinline__ void gradient_of_row(Pack<Y, N> (&dy)[kPacks], Pack<Y, N> (&y)[kPacks],
                                                Accumulator<Y> scale, Group& group,
                                                RowCluster& cluster, bool spread,
                                                const RunPlace<N, kRegular>& place, int col,
                                                const Out& out) {
  using A = Accumulator<Y>;
  A sums[N];
  gradient_sums<kLog>(dy, y, sums);
  A sum = sum_of_run(sums, place, group);
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
    out.template store<kPacks>(p, col, dx);
  }
}

// Rows held by kPacks packs a thread of each tensor stay in registers: read once.
template <bool kRegular, bool kLog, bool kMayShare, int kPacks, typename Y, typename Store>
__device__ __forceinline__ void softmax_backward_once(const GradientLoad<Y>& load,
                                                      const Store& store) {
  constexpr int N = kPackElements<Y>;
  RowGroup<Barrier::kBlock, kMayShare> group;
  RowCluster cluster;
  const RowPosition at(group, cluster, kMayShare);
  const auto place = store.template place<N, kRegular>(at.row, group);
  const int col = at.rank * group.threads() * kPacks * N + run_start<kPacks, N>(group);
  Pack<Y, N> dy[kPacks], y[kPacks];
  {
    const auto dy_row = load.dy.template open<Filler::kZero>(at.row, place);
    const auto y_row = load.y.template open<Filler::kZero>(at.row, place);
    typename decltype(dy_row)::template Fetched<kPacks> dy_fetched, y_fetched;
    dy_row.fetch(dy_fetched, col);
    y_row.fetch(y_fetched, col);
    dy_row.extract(dy_fetched, dy, col);
    y_row.extract(y_fetched, y, col);
  }
  if (at.spread) cluster.wait();
  gradient_of_row<kLog, kMayShare>(dy, y, load.scale, group, cluster, at.spread, place, col,
                                   store.open(at.row, place));
}

// Any length: each block of a cluster takes a slice of the columns, which it reads for the sum and
// again for the gradient.
template <bool kRegular, bool kLog, typename Y, typename Store>
__device__ __forceinline__ void softmax_backward_twice(const GradientLoad<Y>& load,
                                                       const Store& store, int slice) {
  using A = Accumulator<Y>;
  constexpr int N = kPackElements<Y>;
  constexpr int kPacks = 2;
  using Fetched = typename RunReader<Y, N, kRegular, Filler::kZero>::template Fetched<kPacks>;

  RowGroup<Barrier::kBlock> group;
  RowCluster cluster;
  const RowPosition at(group, cluster, true);
  const auto place = store.template place<N, kRegular>(at.row, group);
  const int stride = group.threads() * kPacks * N;
  const int begin = at.rank * slice, end = min(begin + slice, load.y.cols);
  const auto dy_row = load.dy.template open<Filler::kZero>(at.row, place);
  const auto y_row = load.y.template open<Filler::kZero>(at.row, place);

  A sums[N] = {};
  Fetched dy_fetched, y_fetched;
  auto fetch = [&](int col) {
    dy_row.fetch(dy_fetched, col);
    if (!kLog) y_row.fetch(y_fetched, col);
  };
  if (begin < end) fetch(begin + run_start<kPacks, N>(group));
  for (int base = begin; base < end; base += stride) {
    const int col = base + run_start<kPacks, N>(group);
    Pack<Y, N> dy[kPacks], y[kPacks];
    dy_row.extract(dy_fetched, dy, col);
    if (!kLog) y_row.extract(y_fetched, y, col);
    if (base + stride < end) fetch(col + stride);
    A added[N];
    gradient_sums<kLog>(dy, y, added);
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += added[i];
  }
  __shared__ RowSlots<A> slots;
  if (at.spread) cluster.wait();
  const A sum =
      reduce_row(group, cluster, at.spread, sum_of_run(sums, place, group), A(0), slots, SumOf());

  const auto out = store.open(at.row, place);
  // Backwards: what was read last is the likeliest to be in the L2 cache yet.
  for (int base = last_chunk(begin, end, stride); base >= begin; base -= stride) {
    const int col = base + run_start<kPacks, N>(group);
    Pack<Y, N> dy[kPacks], y[kPacks];
    dy_row.load(dy, col);
    y_row.load(y, col);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      A dx[N];
      gradient<kLog>(dy[p], y[p], sum, load.scale, dx);
      out.template store<kPacks>(p, col, dx);
    }
  }
}

template <typename Y>
using BackwardStore = RoundedStore<Y, ResultTypes::kNarrower>;

template <typename Y, int kPacks>
__global__ void __launch_bounds__(kWarpTierThreads, 8)
    softmax_backward_warp(const __grid_constant__ GradientLoad<Y> load,
                          const __grid_constant__ BackwardStore<Y> store, bool regular, bool log) {
  with_form<true>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_backward_once<decltype(is_regular)::value, decltype(is_log)::value, false, kPacks>(
        load, store);
  });
}

template <typename Y, int kPacks>
__global__ void __launch_bounds__(kBlockTierThreads, kPacks <= 4 ? 2 : 1)
    softmax_backward_block(const __grid_constant__ GradientLoad<Y> load,
                           const __grid_constant__ BackwardStore<Y> store, bool regular, bool log) {
  with_form<true>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_backward_once<decltype(is_regular)::value, decltype(is_log)::value, true, kPacks>(
        load, store);
  });
}

template <typename Y>
__global__ void __launch_bounds__(kBlockTierThreads, sizeof(Y) == 8 ? 1 : 2)
    softmax_backward_stream(const __grid_constant__ GradientLoad<Y> load,
                            const __grid_constant__ BackwardStore<Y> store, bool regular, bool log,
                            int slice) {
  with_form<true>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_backward_twice<decltype(is_regular)::value, decltype(is_log)::value>(load, store,
                                                                                 slice);
  });
}

}  // namespace fused_norm
