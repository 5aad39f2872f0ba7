// Forward for rows of one 16-bit dtype that are not whole packs, by warps (warp_rows.cuh).
#pragma once

#include "core/common/tile_ring.cuh"
#include "core/common/warp_rows.cuh"
#include "core/norm/forward.cuh"

namespace fused_norm {

template <Sharing kSharing>
using StatisticsExchange = PartExchange<PartStatistics<float>, kSharing>;

// Normalizes a warp's columns of rows: one, or one in each kLanes of its lanes. The tree of a row's
// sums depends on its length alone: a lane's columns are two chains, lanes and parts are combined
// by butterflies.
template <bool kRms, int kLanesOfRow, int kColumnsOfLane, int kSure, Sharing kSharingOfRow,
          typename X>
class WarpNorm {
  using Statistics = StatisticsOf<InputLoad<X>, AffineStore<X>>;
  static constexpr int kUnits = kColumnsOfLane;

 public:
  static constexpr Sharing kSharing = kSharingOfRow;
  static constexpr bool kMayBeParts = kSharing != Sharing::kWarp, kIsRms = kRms;
  static_assert(!kMayBeParts || may_be_part({kLanesOfRow, kUnits}));
  static constexpr int kLanes = kLanesOfRow, kColumns = kUnits;
  static constexpr int kRows = kWarpSize / kLanes;  // of a warp, at a time
  using Columns = LaneColumns<kUnits, kSure, kLanes>;
  using Part = RowPart<kSharing>;
  using Exchange = StatisticsExchange<kSharing>;

  // A barrier of the block follows, or of the cluster.
  __device__ __forceinline__ WarpNorm(const FlatRows& flat, const Part& part, const Statistics& out,
                                      typename Exchange::Slots& slots)
      : columns_(part.cols),
        out_(out),
        flat_(flat),
        part_(part),
        exchange_(part, slots),
        cols_(static_cast<float>(part.cols)),
        per_cols_(reciprocal(cols_)) {
    keep(per_cols_);
  }

  __device__ __forceinline__ const Columns& columns() const { return columns_; }
  // Which of the warp's rows is the lane's.
  __device__ __forceinline__ static int row_of_lane() { return threadIdx.x % kWarpSize / kLanes; }

  __device__ __forceinline__ void load_params(const AffineStore<X>& store) {
    load_weights<X>(store.weight, store.weight_offset, part_.first, columns_, weight_);
    if constexpr (!kRms) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) bias_[i] = 0;
      if (store.bias.data) load_columns<X>(store.bias, part_.first, columns_, bias_);
    }
  }

  // Mean and rstd, in all of the row's lanes. Zeros come past the part's end.
  __device__ __forceinline__ PartStatistics<float> normalize(float (&x)[kUnits]) {
    PartStatistics<float> of_row{};
    if constexpr (!kRms) {
      float chains[2] = {x[0], x[1]};
#pragma unroll
      for (int i = 2; i < kUnits; ++i) chains[i % 2] += x[i];
      const float sum = lane_sum<kLanes>(chains[0] + chains[1]);
      of_row.mean = quotient(sum + 0.0f, cols_, per_cols_);  // zeros turn -0 to 0
#pragma unroll
      for (int i = 0; i < kUnits; ++i) x[i] = columns_.inside(i) ? x[i] - of_row.mean : 0.0f;
    }
    float chains[2] = {__fmul_rn(x[0], x[0]), __fmul_rn(x[1], x[1])};
#pragma unroll
    for (int i = 2; i < kUnits; ++i) chains[i % 2] = fmaf(x[i], x[i], chains[i % 2]);
    of_row.squares = lane_sum<kLanes>(chains[0] + chains[1]);
    float from_row = 0;  // of the part's mean
    if (may_merge()) from_row = merge(of_row);
    const float rstd = out_.rstd_of(of_row.squares);
    const float shift = may_merge() ? __fmul_rn(from_row, rstd) : -0.0f;  // adds nothing
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const float xhat = kRms ? x[i] * rstd : fmaf(x[i], rstd, shift);
      x[i] = kRms ? xhat * weight_[i] : fmaf(xhat, weight_[i], bias_[i]);
    }
    return {of_row.mean, rstd};
  }

 private:
  __device__ __forceinline__ bool may_merge() const {
    return kSharing == Sharing::kCluster || (kMayBeParts && flat_.parts > 1);
  }
  // Of a part; none after the last.
  __device__ __forceinline__ float cols_of(int part) const {
    const float cols = static_cast<float>(cols_of_part(flat_, part));
    return part < flat_.parts ? cols : 0.0f;
  }
  // Makes the part's statistics the row's, as merge_parts() does, some parts a lane. Returns the
  // difference between their means.
  __device__ __forceinline__ float merge(PartStatistics<float>& own) {
    const PartStatistics<float>* const all = exchange_.all(own, part_, flat_.parts);
    if constexpr (kRms) {
      own.squares = exchange_.sum(flat_.parts, [&](int p) { return all[p].squares; });
      return 0;
    }
    const float first = all[0].mean;
    const float offset =
        __fmul_rn(exchange_.sum(flat_.parts,
                                [&](int p) { return __fmul_rn(cols_of(p), all[p].mean - first); }),
                  out_.per_cols);
    own.squares = exchange_.sum(flat_.parts, [&](int p) {
      const float from_mean = (all[p].mean - first) - offset;
      return fmaf(__fmul_rn(cols_of(p), from_mean), from_mean, all[p].squares);
    });
    const float from_row = (own.mean - first) - offset;
    own.mean -= from_row;
    return from_row;
  }

  const Columns columns_;
  const Statistics& out_;
  const FlatRows& flat_;
  const Part& part_;
  Exchange exchange_;
  const float cols_;
  float per_cols_;
  float weight_[kUnits], bias_[kRms ? 1 : kUnits];
};

// What passes through a ring of tiles: x, in whose place comes y.
template <typename X>
struct ForwardTiles {
  static constexpr int kWritten = 0;
  const InputLoad<X>& load;
  X* y;

  __device__ static constexpr int count() { return 1; }
  __device__ static constexpr bool flat() { return true; }
  __device__ __forceinline__ TileRows<X> rows_of(int) const { return {load.x, load.layout}; }
  __device__ __forceinline__ X* written() const { return y; }
};

// What the kernels read and write.
template <typename X>
struct FlatForward {
  const InputLoad<X>& load;
  const AffineStore<X>& store;
  const StatisticsOf<InputLoad<X>, AffineStore<X>>& out;
  const FlatRows& flat;
};

// Which of a tile's rows are a warp's n-th, and its lanes'. Neighbouring rows are other warps': the
// rows of one are so far apart that they begin in different banks.
template <int kLanes>
class RowsOfTile {
 public:
  __device__ __forceinline__ explicit RowsOfTile(int cols)
      : apart_(kLanes == 1 ? 1 : max(1, 2 * kLanes / (cols & -cols))) {}
  __device__ __forceinline__ int row(int n, int of_warp) const {
    return n + (n & -apart_) * (kWarpSize / kLanes - 1) + of_warp * apart_;
  }

 private:
  int apart_;  // a power of two
};

// Persistent blocks walk over tiles of rows, or clusters over rows, and normalize them in place.
template <typename Norm, typename X>
__device__ __forceinline__ void norm_forward_tiles(const FlatForward<X>& of,
                                                   typename Norm::Exchange::Slots& slots,
                                                   CopyBarrier* filled) {
  constexpr int kLanes = Norm::kLanes;
  constexpr bool kCluster = Norm::kSharing == Sharing::kCluster;
  constexpr TileKind kKind = kCluster            ? TileKind::kSlices
                             : Norm::kMayBeParts ? TileKind::kRows
                                                 : TileKind::kWhole;
  extern __shared__ __align__(128) char memory[];
  const int cols = of.load.cols;
  const ForwardTiles<X> tensors{of.load, of.store.y};
  const typename Norm::Part part(of.flat, cols);
  const RowCluster cluster;
  const BlockColumns<Norm::kSharing> of_block(of.flat, cols);
  TileRing<X, kKind, ForwardTiles<X>> tiles(tensors, of.load.rows, cols, of.flat, filled, memory,
                                            of_block.first, of_block.cols);
  Norm norm(of.flat, part, of.out, slots);
  if (kCluster) cluster.arrive();
  meet_previous_kernel();
  tiles.start();
  norm.load_params(of.store);
  __syncthreads();
  if (kCluster) cluster.wait();
  const RowsOfTile<kLanes> rows(cols);
  const int step = kCluster ? 1 : kBlockParts / of.flat.parts,
            turns = kCluster ? 1 : of.flat.rows / (step * Norm::kRows);
  const int lane = threadIdx.x % kLanes, own_row = Norm::row_of_lane();
  int own_bytes =
      static_cast<int>((part.first - of_block.first + norm.columns().first) * sizeof(X));
  keep(own_bytes);
  for (; tiles.any(); tiles.next()) {
    tiles.template wait<false>();
    const int left = part.first == 0 ? tiles.rows() : 0;  // whose statistics the warp writes
    const int64_t first_row = tiles.first_row();
    int begin = tiles.offset(0) + own_bytes;
    keep(begin);
    // Those of turn n the n-th lane keeps, until they are written together.
    PartStatistics<float> kept{};
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int row = rows.row(turn * step + part.group, own_row);
      X* const own = reinterpret_cast<X*>(memory + begin) + row * cols;
      float x[1][Norm::kColumns];
      load_rows(own, 0, norm.columns(), 0.0f, x);
      const PartStatistics<float> of_row = norm.normalize(x[0]);
      store_rows(own, 0, norm.columns(), x);
      if (kLanes > 1) {
        if (turn == lane) kept = of_row;
      } else if (row < left) {
        of.out.template write<Norm::kIsRms>(first_row + row, of_row.mean, of_row.squares);
      }
    }
    if (kLanes > 1 && lane < turns) {
      const int row = rows.row(lane * step + part.group, own_row);
      if (row < left) of.out.template write<Norm::kIsRms>(first_row + row, kept.mean, kept.squares);
    }
  }
  tiles.finish();
}

// Rows anywhere: warps read and write them where they are, one each or some, and are done.
template <typename Norm, typename X>
__device__ __forceinline__ void norm_forward_direct(const FlatForward<X>& of,
                                                    typename Norm::Exchange::Slots& slots) {
  constexpr bool kCluster = Norm::kSharing == Sharing::kCluster;
  const RowCluster cluster;
  const typename Norm::Part part(of.flat, of.load.cols);
  Norm norm(of.flat, part, of.out, slots);
  if (kCluster) cluster.arrive();
  const int groups = static_cast<int>(blockDim.x) / kWarpSize / of.flat.parts;
  const int64_t warp =
      kCluster ? int64_t{blockIdx.x} / cluster.blocks() : int64_t{blockIdx.x} * groups + part.group;
  const int64_t row = warp * Norm::kRows + Norm::row_of_lane();
  const bool any = row < of.load.rows;  // else the lane does as others do
  const int64_t there = any ? row : of.load.rows - 1;
  const int col = part.first + norm.columns().first;
  meet_previous_kernel();
  if (!kCluster) __syncthreads();
  // The row and its parameters are asked for together.
  const Bits<X>* const from =
      reinterpret_cast<const Bits<X>*>(row_start(of.load.x, of.load.layout, there) + col);
  uint32_t bits[Norm::kColumns];
#pragma unroll
  for (int i = 0; i < Norm::kColumns; ++i) {
    bits[i] = 0;
    if (norm.columns().inside(i)) bits[i] = from[i * Norm::kLanes];
  }
  norm.load_params(of.store);
  float x[1][Norm::kColumns];
#pragma unroll
  for (int i = 0; i < Norm::kColumns; ++i) x[0][i] = value_of<X>(bits[i]);
  if (kCluster) cluster.wait();
  const PartStatistics<float> of_row = norm.normalize(x[0]);
  if (!any) return;
  store_rows(of.store.y + row * of.load.cols + col, 0, norm.columns(), x);
  if (col == 0) of.out.template write<Norm::kIsRms>(row, of_row.mean, of_row.squares);
}

template <typename T>
struct NormType {
  using Norm = T;
};
template <bool kRms, int kClass, Sharing kSharing, typename X>
using NormOfClass = WarpNorm<kRms, kForwardClasses[kClass].lanes, kForwardClasses[kClass].units,
                             forward_sure_units(kClass), kSharing, X>;

// Calls run(norm) with the one of a row class among those from kClass to before kEnd; all forms are
// in one kernel a type for shorter rows, one for longer ones and those in parts, and one for those
// of clusters, which branches once.
template <bool kRms, int kClass, int kEnd, Sharing kSharing, typename X, typename Run>
__device__ __forceinline__ void with_class(int row_class, Run run) {
  if constexpr (kClass + 1 < kEnd) {
    if (row_class != kClass) return with_class<kRms, kClass + 1, kEnd, kSharing, X>(row_class, run);
  }
  run(NormType<NormOfClass<kRms, kClass, kSharing, X>>());
}
template <typename X, Sharing kSharing, typename Run>
__device__ __forceinline__ void with_norm(bool rms, int row_class, Run run) {
  constexpr bool kShorter = kSharing == Sharing::kWarp;
  constexpr int kFirst = kShorter ? 0 : kShorterForwardClasses;
  constexpr int kEnd = kShorter ? kShorterForwardClasses : kForwardFlatClasses;
  if (rms) {
    with_class<true, kFirst, kEnd, kSharing, X>(row_class, run);
  } else {
    with_class<false, kFirst, kEnd, kSharing, X>(row_class, run);
  }
}

template <typename X, Sharing kSharing>
__global__ void __launch_bounds__(kFlatThreads, flat_forward_blocks(kSharing != Sharing::kWarp))
    norm_forward_flat(const __grid_constant__ InputLoad<X> load,
                      const __grid_constant__ AffineStore<X> store,
                      const __grid_constant__ StatisticsOf<InputLoad<X>, AffineStore<X>> out,
                      bool rms, const __grid_constant__ FlatRows flat) {
#if __CUDA_ARCH__ >= 900
  __shared__ CopyBarrier filled[kMaxFlatSlots];
  __shared__ typename StatisticsExchange<kSharing>::Slots slots;
  with_norm<X, kSharing>(rms, flat.row_class, [&](auto norm) {
    norm_forward_tiles<typename decltype(norm)::Norm>(FlatForward<X>{load, store, out, flat}, slots,
                                                      filled);
  });
#else
  __trap();  // no plan asks for it
#endif
}

template <typename X, Sharing kSharing>
__global__ void __launch_bounds__(kFlatThreads, flat_forward_blocks(kSharing != Sharing::kWarp))
    norm_forward_rows(const __grid_constant__ InputLoad<X> load,
                      const __grid_constant__ AffineStore<X> store,
                      const __grid_constant__ StatisticsOf<InputLoad<X>, AffineStore<X>> out,
                      bool rms, const __grid_constant__ FlatRows flat) {
  __shared__ typename StatisticsExchange<kSharing>::Slots slots;
  with_norm<X, kSharing>(rms, flat.row_class, [&](auto norm) {
    norm_forward_direct<typename decltype(norm)::Norm>(FlatForward<X>{load, store, out, flat},
                                                       slots);
  });
}

}  // namespace fused_norm
