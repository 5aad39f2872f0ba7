// Forward for rows of one 16-bit dtype that are not whole packs, by warps (warp_rows.cuh).
#pragma once

#include "core/common/tile_ring.cuh"
#include "core/common/warp_rows.cuh"
#include "core/norm/forward.cuh"

namespace fused_norm {

using StatisticsExchange = PartExchange<PartStatistics<float>>;

// Normalizes a warp's columns of rows: one, or one in each kLanes of its lanes. The tree of a row's
// sums depends on its length alone: a lane's columns are two chains, lanes are combined by
// butterflies, parts in their order.
template <bool kRms, int kLanesOfRow, int kColumnsOfLane, int kSure, typename X>
class WarpNorm {
  using Statistics = StatisticsOf<InputLoad<X>, AffineStore<X>>;
  static constexpr int kUnits = kColumnsOfLane;

 public:
  static constexpr bool kMayBeParts = may_be_part({kLanesOfRow, kUnits});
  static constexpr bool kIsRms = kRms;
  static constexpr int kLanes = kLanesOfRow, kColumns = kUnits;
  static constexpr int kRows = kWarpSize / kLanes;  // of a warp, at a time
  using Columns = LaneColumns<kUnits, kSure, kLanes>;
  using Part = RowPart<kMayBeParts>;

  // A barrier of the block follows.
  __device__ __forceinline__ WarpNorm(const FlatRows& flat, const Part& part, const Statistics& out,
                                      StatisticsExchange::Slots& slots)
      : columns_(part.cols),
        out_(out),
        part_(part),
        parts_(kMayBeParts ? flat.parts : 1),
        exchange_(part, slots),
        cols_(static_cast<float>(part.cols)),
        per_cols_(reciprocal(cols_)) {
    if (!kMayBeParts) return;
    const int index = StatisticsExchange::part_of_lane(),
              rest = static_cast<int>(out.cols) - index * flat.part_cols;
    cols_there_ = static_cast<float>(max(0, min(flat.part_cols, rest)));
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
    if (kMayBeParts && parts_ > 1) from_row = merge(of_row);
    const float rstd = out_.rstd_of(of_row.squares);
    const float shift =
        kMayBeParts && parts_ > 1 ? __fmul_rn(from_row, rstd) : -0.0f;  // adds nothing
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const float xhat = kRms ? x[i] * rstd : fmaf(x[i], rstd, shift);
      x[i] = kRms ? xhat * weight_[i] : fmaf(xhat, weight_[i], bias_[i]);
    }
    return {of_row.mean, rstd};
  }

 private:
  // Makes the part's statistics the row's, as merge_parts() does, a part a lane. Returns the
  // difference between their means.
  __device__ __forceinline__ float merge(PartStatistics<float>& own) {
    const PartStatistics<float>* const all = exchange_.all(own, part_, parts_);
    const PartStatistics<float> part = all[StatisticsExchange::part_of_lane()];
    if constexpr (kRms) {
      own.squares = StatisticsExchange::sum(part.squares);
      return 0;
    }
    const float first = all[0].mean, difference = part.mean - first;
    const float offset =
        __fmul_rn(StatisticsExchange::sum(__fmul_rn(cols_there_, difference)), out_.per_cols);
    const float from_mean = difference - offset;
    own.squares =
        StatisticsExchange::sum(fmaf(__fmul_rn(cols_there_, from_mean), from_mean, part.squares));
    const float from_row = (own.mean - first) - offset;
    own.mean -= from_row;
    return from_row;
  }

  const Columns columns_;
  const Statistics& out_;
  const Part& part_;
  const int parts_;
  StatisticsExchange exchange_;
  const float cols_, per_cols_;
  float cols_there_;  // of the part that is the lane's in an exchange
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

// Persistent blocks walk over tiles of rows and normalize them in place.
template <typename Norm, typename X>
__device__ __forceinline__ void norm_forward_tiles(const FlatForward<X>& of,
                                                   StatisticsExchange::Slots& slots,
                                                   CopyBarrier* filled) {
  constexpr int kLanes = Norm::kLanes;
  extern __shared__ __align__(128) char memory[];
  const int cols = of.load.cols;
  const ForwardTiles<X> tensors{of.load, of.store.y};
  TileRing<X, !Norm::kMayBeParts, ForwardTiles<X>, FlatRows> tiles(tensors, of.load.rows, cols,
                                                                   of.flat, filled, memory);
  const typename Norm::Part part(of.flat, cols);
  Norm norm(of.flat, part, of.out, slots);
  meet_previous_kernel();
  tiles.start();
  norm.load_params(of.store);
  __syncthreads();
  const RowsOfTile<kLanes> rows(cols);
  const int step = kFlatThreads / kWarpSize / of.flat.parts,
            turns = of.flat.rows / (step * Norm::kRows);
  const int lane = threadIdx.x % kLanes, own_row = Norm::row_of_lane();
  for (; tiles.any(); tiles.next()) {
    tiles.template wait<false>();
    const int left = part.first == 0 ? tiles.rows() : 0;  // whose statistics the warp writes
    const int64_t first_row = tiles.first_row();
    int begin = static_cast<int>(
        reinterpret_cast<char*>(tiles.part(0) + part.first + norm.columns().first) - memory);
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
                                                    StatisticsExchange::Slots& slots) {
  const typename Norm::Part part(of.flat, of.load.cols);
  Norm norm(of.flat, part, of.out, slots);
  const int groups = static_cast<int>(blockDim.x) / kWarpSize / of.flat.parts;
  const int64_t warp = int64_t{blockIdx.x} * groups + part.group;
  const int64_t row = warp * Norm::kRows + Norm::row_of_lane();
  const bool any = row < of.load.rows;  // else the lane does as others do
  const int64_t there = any ? row : of.load.rows - 1;
  const int col = part.first + norm.columns().first;
  meet_previous_kernel();
  __syncthreads();
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
  const PartStatistics<float> of_row = norm.normalize(x[0]);
  if (!any) return;
  store_rows(of.store.y + row * of.load.cols + col, 0, norm.columns(), x);
  if (col == 0) of.out.template write<Norm::kIsRms>(row, of_row.mean, of_row.squares);
}

template <typename T>
struct NormType {
  using Norm = T;
};
template <bool kRms, int kClass, typename X>
using NormOfClass = WarpNorm<kRms, kForwardClasses[kClass].lanes, kForwardClasses[kClass].units,
                             forward_sure_units(kClass), X>;

// Calls run(norm) with the one of a row class among those from kClass to before kEnd; all forms are
// in one kernel a type for shorter and one for longer rows, which branches once.
template <bool kRms, int kClass, int kEnd, typename X, typename Run>
__device__ __forceinline__ void with_class(int row_class, Run run) {
  if constexpr (kClass + 1 < kEnd) {
    if (row_class != kClass) return with_class<kRms, kClass + 1, kEnd, X>(row_class, run);
  }
  run(NormType<NormOfClass<kRms, kClass, X>>());
}
template <typename X, bool kLonger, typename Run>
__device__ __forceinline__ void with_norm(bool rms, int row_class, Run run) {
  constexpr int kFirst = kLonger ? kShorterForwardClasses : 0;
  constexpr int kEnd = kLonger ? kForwardFlatClasses : kShorterForwardClasses;
  if (rms) {
    with_class<true, kFirst, kEnd, X>(row_class, run);
  } else {
    with_class<false, kFirst, kEnd, X>(row_class, run);
  }
}

template <typename X, bool kLonger>
__global__ void __launch_bounds__(kFlatThreads, flat_forward_blocks(kLonger))
    norm_forward_flat(const __grid_constant__ InputLoad<X> load,
                      const __grid_constant__ AffineStore<X> store,
                      const __grid_constant__ StatisticsOf<InputLoad<X>, AffineStore<X>> out,
                      bool rms, const __grid_constant__ FlatRows flat) {
#if __CUDA_ARCH__ >= 900
  __shared__ CopyBarrier filled[kMaxFlatSlots];
  __shared__ StatisticsExchange::Slots slots;
  with_norm<X, kLonger>(rms, flat.row_class, [&](auto norm) {
    norm_forward_tiles<typename decltype(norm)::Norm>(FlatForward<X>{load, store, out, flat}, slots,
                                                      filled);
  });
#endif
}

template <typename X, bool kLonger>
__global__ void __launch_bounds__(kFlatThreads, flat_forward_blocks(kLonger))
    norm_forward_rows(const __grid_constant__ InputLoad<X> load,
                      const __grid_constant__ AffineStore<X> store,
                      const __grid_constant__ StatisticsOf<InputLoad<X>, AffineStore<X>> out,
                      bool rms, const __grid_constant__ FlatRows flat) {
  __shared__ StatisticsExchange::Slots slots;
  with_norm<X, kLonger>(rms, flat.row_class, [&](auto norm) {
    norm_forward_direct<typename decltype(norm)::Norm>(FlatForward<X>{load, store, out, flat},
                                                       slots);
  });
}

}  // namespace fused_norm
