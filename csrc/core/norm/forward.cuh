// Forward kernels: statistics of a row, then the normalized row.
#pragma once

#include "core/common/row_group.cuh"
#include "core/common/statistics.cuh"
#include "core/norm/policies.cuh"

namespace fused_norm {

// Where the statistics go; mean may be null.
template <typename A>
struct StatisticsOut {
  A* mean;
  A* rstd;
  Epsilon<A> eps;
};

// Whether rows of this many packs a thread may be spread over a cluster: only those that fill a
// block are.
constexpr bool may_spread(int packs) { return packs == 4; }

// A row's mean and rstd from its statistics; one thread writes them down.
template <bool kRms, typename A>
__device__ __forceinline__ void finish_statistics(const RowStatistics<A, kRms>& of_row,
                                                  const StatisticsOut<A>& out, int64_t row,
                                                  bool writes, A cols, A& mean, A& rstd) {
  mean = of_row.row_mean();
  rstd = reciprocal_root_mean(of_row.sum_of_squares(), of_row.sum_of_squares_rest(), cols, out.eps);
  if (writes) {
    if (!kRms) out.mean[row] = mean;
    out.rstd[row] = rstd;
  }
}

// xhat of one pack.
template <bool kRms, typename T, int N, typename A>
__device__ __forceinline__ void normalize(const Pack<T, N>& pack, A mean, A rstd, A (&xhat)[N]) {
  unpack(pack, xhat);
#pragma unroll
  for (int i = 0; i < N; ++i) xhat[i] = kRms ? xhat[i] * rstd : (xhat[i] - mean) * rstd;
}

template <typename Load, typename Store>
constexpr int kPackElements = 16 / (sizeof(typename Load::Input) > sizeof(typename Store::Output)
                                        ? sizeof(typename Load::Input)
                                        : sizeof(typename Store::Output));

// Rows held by kPacks * blockDim.x packs, or that of each block of a cluster, stay in registers:
// read once. A group of threads makes one row.
template <typename Form, bool kRms, int kPacks, typename Load, typename Store>
__device__ __forceinline__ void norm_forward_once(
    const Load& load, const Store& store,
    const StatisticsOut<Accumulator<typename Load::Input>>& out) {
  constexpr bool kRegular = Form::kRegular;
  using X = typename Load::Input;
  using A = Accumulator<X>;
  using Statistics = RowStatistics<A, kRms>;
  constexpr int N = kPackElements<Load, Store>;
  __shared__ __align__(16) char slot_bytes[2 * kMaxWarps * sizeof(Statistics)];
  auto& slots = reinterpret_cast<Statistics(&)[2][kMaxWarps]>(slot_bytes);

  __shared__ __align__(16) char cluster_slot_bytes[2 * kMaxClusterBlocks * sizeof(Statistics)];
  auto& cluster_slots = reinterpret_cast<Statistics(&)[2][kMaxClusterBlocks]>(cluster_slot_bytes);

  RowGroup<Barrier::kBlock> group;
  RowCluster cluster;
  const bool spread = may_spread(kPacks) && cluster.blocks() > 1;
  if (spread) cluster.arrive();
  const int step = group.threads() * N;
  const int col = group.thread() * N + (spread ? cluster.rank() * kPacks * step : 0);
  const int64_t row = spread ? int64_t{blockIdx.x / cluster.blocks()}
                             : int64_t{blockIdx.x} * group.groups() + group.index();
  Pack<X, N> packs[kPacks];
  load.template open<N, kRegular>(row, group).load(packs, col, step);

  Statistics statistics = Statistics::template of<kRegular>(group, packs, col, step, load.cols);
  A mean, rstd;
  auto finish = [&](bool writes) {
    finish_statistics<kRms>(statistics, out, row, writes && group.thread() == 0 && row < load.rows,
                            static_cast<A>(load.cols), mean, rstd);
  };
  if (group.warps() <= 1) {
    finish(true);
  } else {
    // The first warp merges for all; the others wait for two numbers.
    __shared__ A row_mean, row_rstd;
    statistics = group.gather_warps(statistics, Statistics(), slots[0], Statistics::merge);
    if (spread) {
      cluster.wait();
      statistics = cluster.reduce(statistics, cluster_slots, Statistics::merge, false);
    }
    if (group.thread() < kWarpSize) {
      finish(!spread || cluster.rank() == 0);
      if (group.thread() == 0) {
        row_mean = mean;
        row_rstd = rstd;
      }
    }
    __syncthreads();
    mean = row_mean;
    rstd = row_rstd;
  }

  const auto writer = store.template open<N, kRegular>(row, group);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    A xhat[N];
    normalize<kRms>(packs[p], mean, rstd, xhat);
    store.template store<typename Form::Param, !kRms>(writer, col + p * step, xhat);
  }
}

// Any length: the row is read for its statistics and again to normalize it, the second time from
// shared memory where the launch gave enough of it (cached). Each thread reads back what it wrote,
// so that nobody waits.
template <typename Form, bool kRms, typename Load, typename Store>
__device__ __forceinline__ void norm_forward_twice(
    const Load& load, const Store& store,
    const StatisticsOut<Accumulator<typename Load::Input>>& out, bool cached) {
  constexpr bool kRegular = Form::kRegular;
  using X = typename Load::Input;
  using A = Accumulator<X>;
  using Statistics = RowStatistics<A, kRms>;
  constexpr int N = kPackElements<Load, Store>;
  constexpr int kPacks = 4;
  __shared__ __align__(16) char slot_bytes[2 * kMaxWarps * sizeof(Statistics)];
  auto& slots = reinterpret_cast<Statistics(&)[2][kMaxWarps]>(slot_bytes);
  extern __shared__ __align__(16) char cache_bytes[];
  using CachedPack = std::conditional_t<sizeof(Pack<X, N>) == 16, uint4, uint2>;
  CachedPack* const cache = reinterpret_cast<CachedPack*>(cache_bytes) + threadIdx.x;

  RowGroup<Barrier::kBlock> group;
  const int step = group.threads() * N;
  const int64_t row = int64_t{blockIdx.x} * group.groups() + group.index();
  const auto reader = load.template open<N, kRegular>(row, group);
  Pack<X, N> packs[kPacks];
  Statistics of_warp;
  for (int base = 0; base < load.cols; base += kPacks * step) {
    const int col = base + group.thread() * N;
    reader.load(packs, col, step);
    if (cached) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (col + p * step < load.cols) {
          cache[base / N + p * group.threads()] = detail::bit_copy<CachedPack>(packs[p]);
        }
      }
    }
    of_warp = Statistics::merge(
        of_warp, Statistics::template of<kRegular>(group, packs, col, step, load.cols));
  }
  const Statistics of_row = group.reduce_warps(of_warp, Statistics(), slots, Statistics::merge);
  A mean, rstd;
  finish_statistics<kRms>(of_row, out, row, group.thread() == 0 && row < load.rows,
                          static_cast<A>(load.cols), mean, rstd);

  const auto writer = store.template open<N, kRegular>(row, group);
  for (int base = 0; base < load.cols; base += kPacks * step) {
    const int col = base + group.thread() * N;
    if (cached) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (col + p * step < load.cols) {
          packs[p] = detail::bit_copy<Pack<X, N>>(cache[base / N + p * group.threads()]);
        }
      }
    } else {
      reader.load(packs, col, step);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      A xhat[N];
      normalize<kRms>(packs[p], mean, rstd, xhat);
      store.template store<typename Form::Param, !kRms>(writer, col + p * step, xhat);
    }
  }
}

template <typename Load, typename Store, bool kRms, int kPacks>
__global__ void __launch_bounds__(512, kPacks <= 4 ? 2 : 1)
    norm_forward_registers(const __grid_constant__ Load load, const __grid_constant__ Store store,
                           const StatisticsOut<Accumulator<typename Load::Input>> out,
                           bool regular) {
  store.template with_form<typename Load::Input, !kRms>(regular, [&](auto form) {
    norm_forward_once<decltype(form), kRms, kPacks>(load, store, out);
  });
}

template <typename Load, typename Store, bool kRms>
__global__ void __launch_bounds__(512)
    norm_forward_streaming(const __grid_constant__ Load load, const __grid_constant__ Store store,
                           const StatisticsOut<Accumulator<typename Load::Input>> out, bool regular,
                           bool cached) {
  store.template with_form<typename Load::Input, !kRms>(regular, [&](auto form) {
    norm_forward_twice<decltype(form), kRms>(load, store, out, cached);
  });
}

}  // namespace fused_norm
