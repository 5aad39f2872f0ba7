// Forward kernels: statistics of a row, then the normalized row.
#pragma once

#include "core/common/overlap.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/norm/policies.cuh"

namespace fused_norm {

// Where the statistics go; mean may be null. kExact: for an fp32 output.
template <typename A, bool kExact>
struct StatisticsOut {
  A* mean;
  A* rstd;
  A eps, cols, per_cols;

  __device__ __forceinline__ A rstd_of(A squares) const {
    return reciprocal_root_mean<kExact>(squares, cols, per_cols, eps);
  }
  template <bool kRms>
  __device__ void write(int64_t row, A row_mean, A row_rstd) const {
    if (!kRms) mean[row] = row_mean;
    rstd[row] = row_rstd;
  }
};

template <typename Load, typename Store>
using StatisticsOf =
    StatisticsOut<Accumulator<typename Load::Input>, std::is_same_v<typename Store::Output, float>>;

// Whether rows of this many packs a thread may be spread over a cluster: only those that fill
// blocks are.
constexpr bool may_spread(int packs) { return packs >= 3; }

// How many values of a row a thread can hold as fp32 next to the packs of the next row. LayerNorm
// needs registers for the bias too, irregular rows for shifting.
constexpr int values_held(int threads, bool rms, bool regular) {
  if (threads <= 512) return regular ? 32 : 16;
  return !regular ? 8 : rms ? 32 : 16;
}

template <typename Load, typename Store>
constexpr int kPackElements = 16 / (sizeof(typename Load::Input) > sizeof(typename Store::Output)
                                        ? sizeof(typename Load::Input)
                                        : sizeof(typename Store::Output));

template <typename A>
struct ForwardShared {
  typename RowSums<A, Barrier::kBlock>::Slots slots;
  PartStatistics<A> cluster_slots[2][kMaxClusterBlocks];
};

// Rows of up to kPacks packs a thread, or such parts of rows in the blocks of a cluster: read once.
// Persistent groups of threads walk over the rows, kRows at a time; the loads of the next regular
// ones are in flight while these are reduced and written.
template <typename Form, bool kRms, int kPacks, int kRows, typename Load, typename Store>
__device__ __forceinline__ void norm_forward_once(
    const Load& load, const Store& store, const StatisticsOf<Load, Store>& out,
    ForwardShared<Accumulator<typename Load::Input>>& shared) {
  constexpr bool kRegular = Form::kRegular;
  using X = typename Load::Input;
  using Param = typename Form::Param;
  using A = Accumulator<X>;
  constexpr int N = kPackElements<Load, Store>;
  constexpr bool kPacked = kPacks * N > values_held(Load::kThreads, kRms, kRegular);
  using Writer = SliceWriter<typename Store::Output, N, kRegular, kPacks>;

  const RowGroup<Barrier::kBlock, (kPacks > 1)> group;
  RowSums<A, Barrier::kBlock> sums(group, shared.slots);
  RowCluster cluster;
  const bool spread = may_spread(kPacks) && cluster.blocks() > 1;
  const int blocks_per_row = spread ? cluster.blocks() : 1;
  const int part_cols = group.threads() * kPacks * N;
  const int part_first = spread ? cluster.rank() * part_cols : 0;
  const int col = part_first + slice_column<N, kPacks>(group);
  const int left = load.cols - col;
  const A own_cols = static_cast<A>(spread ? min(part_cols, load.cols - part_first) : load.cols);
  const A per_own = spread ? reciprocal(own_cols) : out.per_cols;
  const bool writes = group.thread() == 0 && part_first == 0;

  const int64_t stride = int64_t{gridDim.x / blocks_per_row} * (group.groups() * kRows);
  int64_t first = int64_t{blockIdx.x / blocks_per_row} * (group.groups() * kRows);
  int64_t row = first + group.index();
  typename Load::template Slices<N, kRegular, kPacks, kRows> from(load, row, stride, col);
  typename Store::Output* y = store.y + row * store.cols + col;
  if (spread) cluster.arrive();
  meet_previous_kernel();
  if (kRegular) from.fetch(row, group);
  if (spread) cluster.wait();
  for (; first < load.rows; first += stride) {
    SliceValues<X, N, kPacks, kPacked> values[kRows];
    if (!kRegular) from.fetch(row, group);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      from.extract(r, row, group, [&](int p, const auto& pack) { values[r].put(p, pack); });
    }
    const int64_t these = row;
    row += stride;
    if (row < load.rows) {
      from.step(row);
      if (kRegular) from.fetch(row, group);
    }

    PartStatistics<A> statistics[kRows];
    part_statistics<kRms>(group, values, left, own_cols, per_own, sums, statistics);
    if (spread) {
      const A part_mean = statistics[0].mean;
      statistics[0] = merge_parts<kRms>(cluster.gather(statistics[0], shared.cluster_slots),
                                        blocks_per_row, part_cols, load.cols, out.per_cols);
      if (!kRms && !kCorrectsMean<X>) values[0].recentre(statistics[0].mean - part_mean, left);
    }
    A rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!kRms && kCorrectsMean<X>) values[r].centre(statistics[r].mean, left);
      rstd[r] = out.rstd_of(statistics[r].squares);
      const int64_t at = these + r * group.groups();
      if (writes && at < load.rows) out.template write<kRms>(at, statistics[r].mean, rstd[r]);
    }

    Writer writer[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int ahead = r * group.groups();
      writer[r].open(y + int64_t{ahead} * store.cols, these + ahead < load.rows ? left : 0);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int pack_col = col + p * kSliceStep<N>;
      if (kRegular && pack_col >= store.cols) break;
      A g[N], b[N];
      store.template load<Param, !kRms, kRegular>(pack_col, g, b);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        A xhat[N];
        values[r].get(p, left, xhat);
#pragma unroll
        for (int i = 0; i < N; ++i) xhat[i] *= rstd[r];
        writer[r].store(p, store.template apply<Param, !kRms>(xhat, g, b), group);
      }
    }
    y += stride * store.cols;
  }
}

// Any length: the row is read for its statistics and again to normalize it.
template <bool kRms, typename Load, typename Store>
__device__ __forceinline__ void norm_forward_twice(const Load& load, const Store& store,
                                                   const StatisticsOf<Load, Store>& out) {
  using X = typename Load::Input;
  using A = Accumulator<X>;
  using Statistics = RowStatistics<A, kRms>;
  constexpr int N = kPackElements<Load, Store>;
  constexpr int kPacks = 4;
  __shared__ __align__(16) char slot_bytes[2 * kMaxWarps * sizeof(Statistics)];
  auto& slots = reinterpret_cast<Statistics(&)[2][kMaxWarps]>(slot_bytes);

  RowGroup<Barrier::kBlock> group;
  meet_previous_kernel();
  const int step = group.threads() * N;
  const int64_t row = int64_t{blockIdx.x} * group.groups() + group.index();
  const auto reader = load.template open<N, false>(row, group);
  Pack<X, N> packs[kPacks];
  Statistics of_warp;
  for (int base = 0; base < load.cols; base += kPacks * step) {
    const int col = base + group.thread() * N;
    reader.load(packs, col, step);
    of_warp = Statistics::merge(of_warp,
                                Statistics::template of<false>(group, packs, col, step, load.cols));
  }
  const Statistics of_row = group.reduce_warps(of_warp, Statistics(), slots, Statistics::merge);
  const A mean = of_row.row_mean();
  const A rstd = out.rstd_of(of_row.sum_of_squares());
  if (group.thread() == 0 && row < load.rows) out.template write<kRms>(row, mean, rstd);

  const auto writer = store.template open<N, false>(row, group);
  for (int base = 0; base < load.cols; base += kPacks * step) {
    const int col = base + group.thread() * N;
    reader.load(packs, col, step);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      A x[N], g[N], b[N];
      unpack(packs[p], x);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = (x[i] - mean) * rstd;
      store.template load<void, !kRms, false>(col + p * step, g, b);
      writer.store(col + p * step, store.template apply<void, !kRms>(x, g, b));
    }
  }
}

template <typename Load, typename Store, bool kRms, int kPacks>
__global__ void __launch_bounds__(Load::kThreads)
    norm_forward_registers(const __grid_constant__ Load load, const __grid_constant__ Store store,
                           const StatisticsOf<Load, Store> out, bool regular) {
  __shared__ ForwardShared<Accumulator<typename Load::Input>> shared;
  store.template with_form<typename Load::Input, !kRms>(regular, [&](auto form) {
    using Form = decltype(form);
    constexpr int kRows = Form::kRegular && kPacks == 1 ? 2 : 1;
    norm_forward_once<Form, kRms, kPacks, kRows>(load, store, out, shared);
  });
}

template <typename Load, typename Store, bool kRms>
__global__ void __launch_bounds__(512)
    norm_forward_streaming(const __grid_constant__ Load load, const __grid_constant__ Store store,
                           const StatisticsOf<Load, Store> out) {
  norm_forward_twice<kRms>(load, store, out);
}

}  // namespace fused_norm
