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
  float scale;
};

// a * b, never made into one operation with an addition that follows unless it is exact: a sum of
// products would depend on their order.
template <typename Y>
__device__ __forceinline__ float product_of(float a, float b) {
  return sizeof(Y) == 2 ? a * b : __fmul_rn(a, b);
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

// Rows held by kPacks packs a thread of each tensor stay in registers: read once.
template <bool kRegular, bool kLog, bool kMayShare, int kPacks, typename Y, typename Store>
__device__ __forceinline__ void softmax_backward_once(const GradientLoad<Y>& load,
                                                      const Store& store,
                                                      RowSlots<float>* slots = nullptr) {
  constexpr int N = kPackElements<Y, typename Store::Output>;
  RowGroup<kMayShare> group;
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

  float sums[N];
  gradient_sums<kLog>(dy, y, sums);
  float sum = sum_of_run(sums, place, group);
  if constexpr (kMayShare) sum = reduce_row(group, cluster, at.spread, sum, 0.0f, *slots, SumOf());
  forget_elements(dy);
  forget_elements(y);
  const auto out = store.open(at.row, place);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    float dx[N];
    gradient<kLog>(dy[p], y[p], sum, load.scale, dx);
    out.template store<kPacks>(p, col, dx);
  }
}

// For rows whose packs a thread are any of kPacks: it takes the registers of the most.
template <typename Y, typename Store, int... kPacks>
__global__ void __launch_bounds__(kWarpTierThreads, 8)
    softmax_backward_warp(const __grid_constant__ GradientLoad<Y> load,
                          const __grid_constant__ Store store, bool regular, bool log, int packs) {
  with_form<true>(regular, log, [&](auto is_regular, auto is_log) {
    with_packs<kPacks...>(packs, [&](auto count) {
      softmax_backward_once<decltype(is_regular)::value, decltype(is_log)::value, false,
                            decltype(count)::value>(load, store);
    });
  });
}

template <typename Y, typename Store, int kPacks>
__global__ void __launch_bounds__(kBlockTierThreads, kPacks <= 4 ? 2 : 1)
    softmax_backward_block(const __grid_constant__ GradientLoad<Y> load,
                           const __grid_constant__ Store store, bool regular, bool log) {
  __shared__ RowSlots<float> slots;
  with_form<true>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_backward_once<decltype(is_regular)::value, decltype(is_log)::value, true, kPacks>(
        load, store, &slots);
  });
}

}  // namespace fused_norm
