// Backward for rows of one 16-bit dtype by warps (warp_rows.cuh) that read them from shared memory.
#pragma once

#include "core/common/branch.cuh"
#include "core/common/overlap.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/common/tile_ring.cuh"
#include "core/common/warp_rows.cuh"
#include "core/norm/backward_input.cuh"
#include "core/norm/staged_params.cuh"

namespace fused_norm {

// What passes through a ring of tiles: the saved tensor; dy, in whose place comes dx; and the
// residual, if there is one.
template <typename X>
struct BackwardTiles {
  enum { kSavedRows, kGradientRows, kResidualRows };
  static constexpr int kWritten = kGradientRows;
  const BackwardInput<X, X, float>& in;
  const BackwardOutput<X, float>& out;
  bool lie_flat;

  __device__ __forceinline__ int count() const { return out.dresidual != nullptr ? 3 : 2; }
  __device__ __forceinline__ bool flat() const { return lie_flat; }
  __device__ __forceinline__ TileRows<X> rows_of(int tensor) const {
    if (tensor == kSavedRows) return {in.saved, in.saved_layout};
    if (tensor == kGradientRows) return {in.dy, in.dy_layout};
    return {out.dresidual, one_stride(in.cols)};
  }
  __device__ __forceinline__ X* written() const { return out.dx; }
};

// Parameters of columns 0 to `count` - 1 in shared memory, as fp32, by all threads of the block:
// weights, and after them a shift and a scale for each column, where forward kept the output.
template <typename X>
__device__ __noinline__ void stage_columns(const BackwardInput<X, X, float>& in, int count,
                                           float* params) {
  float2* const of_output = reinterpret_cast<float2*>(params + count);
#pragma unroll 2
  for (int col = threadIdx.x; col < count; col += kFlatThreads) {
    const auto of_column = ColumnParams<float, 1>::template load<true, true>(in, col);
    params[col] = of_column.weight[0];
    of_output[col] = {of_column.shift[0], of_column.scale[0]};
  }
}

// Those weights of the lane's columns, and which are listed: a bit each.
template <int kUnits, int kSure>
__device__ __forceinline__ uint32_t take_weights(const LaneColumns<kUnits, kSure>& columns,
                                                 const float* weights, const float2* of_output,
                                                 float (&kept)[kUnits]) {
  uint32_t listed = 0;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    kept[i] = weights[i * kWarpSize];
    if (columns.inside(i)) listed |= uint32_t{of_output[i * kWarpSize].y == 0.0f} << i;
  }
  return listed;
}

// The values of a warp's first lanes, or zeros.
template <bool kAny, int kRows>
__device__ __forceinline__ void from_lanes(float own, float (&values)[kRows]) {
#pragma unroll
  for (int k = 0; k < kRows; ++k) values[k] = kAny ? __shfl_sync(kFullMask, own, k) : 0.0f;
}

// Makes xhat of what was saved.
template <bool kRms, bool kFromOutput, int kRows, int kUnits>
__device__ __forceinline__ void normalize_rows(const float2* of_output, const float (&mean)[kRows],
                                               const float (&rstd)[kRows],
                                               float (&xhat)[kRows][kUnits]) {
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if constexpr (kFromOutput) {
      const auto [shift, scale] = of_output[i * kWarpSize];
#pragma unroll
      for (int k = 0; k < kRows; ++k) xhat[k][i] = (xhat[k][i] - shift) * scale;
    } else {
#pragma unroll
      for (int k = 0; k < kRows; ++k)
        xhat[k][i] = (kRms ? xhat[k][i] : xhat[k][i] - mean[k]) * rstd[k];
    }
  }
}

// Puts the values of listed columns, a bit each, in rows from first_row on.
template <typename In, int kRows, int kUnits>
__device__ __forceinline__ void take_listed(const In& in, const float2* of_output, uint32_t listed,
                                            int64_t first_row, float (&xhat)[kRows][kUnits]) {
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if ((listed >> i & 1) == 0) continue;
    const int place = static_cast<int>(of_output[i * kWarpSize].x);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t row = first_row + k;
      if (row < in.rows) xhat[k][i] = in.list.xhat(row, place);
    }
  }
}

// Adds the residual, of which the lane's columns start at `residual`, to rows of dx from element
// `first` on.
template <int kRows, int kUnits, int kSure, typename X>
__device__ __forceinline__ void add_residual(const X* residual, int first, int cols,
                                             const LaneColumns<kUnits, kSure>& columns,
                                             float (&dx)[kRows][kUnits]) {
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (columns.inside(i))
        dx[k][i] += static_cast<float>(residual[first + k * cols + i * kWarpSize]);
    }
  }
}

// Makes dx of w and xhat, and of what the lane has of the rows' sums.
template <bool kRms, int kRows, int kUnits>
__device__ __forceinline__ void make_dx(const float (&sums)[kRms ? 1 : 2][kRows][2],
                                        const float (&rstd)[kRows], float per_cols,
                                        const float (&xhat)[kRows][kUnits],
                                        float (&w)[kRows][kUnits]) {
  constexpr int kSums = kRms ? kRows : 2 * kRows;
  float of_rows[kSums];
#pragma unroll
  for (int k = 0; k < kSums; ++k)
    of_rows[k] = sums[k / kRows][k % kRows][0] + sums[k / kRows][k % kRows][1];
  reduce_each(of_rows, SumOf());
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const RowGradient<kRms> gradient(rstd[k], per_cols, kRms ? 0.0f : of_rows[kSums - kRows + k],
                                     of_rows[k]);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) w[k][i] = gradient.at(w[k][i], xhat[k][i]);
  }
}

// Adds up rows for the sums of their columns and for their own: two chains of each row's sums, of
// w * xhat and of w, which it makes of dy. weight_of(i): the lane's. No product is made into one
// operation with an addition that follows but where this says so: a row's bits must not depend on
// its place among kRows.
template <bool kRms, int kRows, int kUnits, typename WeightOf>
__device__ __forceinline__ void add_up_rows(WeightOf weight_of, const float (&xhat)[kRows][kUnits],
                                            float (&w)[kRows][kUnits], float (&dweight)[kUnits],
                                            float (&dbias)[kUnits],
                                            float (&sums)[kRms ? 1 : 2][kRows][2]) {
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const float weight = weight_of(i);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const float d = w[k][i];
      dweight[i] = fmaf(d, xhat[k][i], dweight[i]);
      if (!kRms) dbias[i] += d;
      w[k][i] = __fmul_rn(d, weight);
      float& sum_wx = sums[0][k][i % 2];
      sum_wx = i < 2 ? __fmul_rn(w[k][i], xhat[k][i]) : fmaf(w[k][i], xhat[k][i], sum_wx);
      if (kRms) continue;
      float& sum_w = sums[kRms ? 0 : 1][k][i % 2];
      sum_w = i < 2 ? w[k][i] : sum_w + w[k][i];
    }
  }
}

// Writes a block's partial rows: what the warps have of the same columns some of them add up. Which
// these are is found out anew, as it would take registers before.
template <bool kRms, int kUnits, int kSure, typename X>
__device__ __forceinline__ void write_tile_sums(const BackwardOutput<X, float>& out, int cols,
                                                char* memory, const float (&dweight)[kUnits],
                                                const float (&dbias)[kUnits]) {
  constexpr int kCols = kUnits * kWarpSize, kKinds = kRms ? 1 : 2;
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const LaneColumns<kUnits, kSure> columns(cols, thread);
  float* const of_warps = reinterpret_cast<float*>(memory) + columns.first;
  __syncthreads();
  float* const to = of_warps + thread / kWarpSize * (kKinds * kCols);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    to[i * kWarpSize] = dweight[i];
    if (!kRms) to[kCols + i * kWarpSize] = dbias[i];
  }
  __syncthreads();
#pragma unroll 1
  for (int kind = 0; kind < kKinds; ++kind) {
    float* const partials = kind == 0 ? out.dweight_partials : out.dbias_partials;
    if (partials == nullptr || thread / kWarpSize != kind) continue;
    float sums[kUnits] = {};
    for (int warp = 0; warp < kFlatWarps; ++warp) {
      const float* const from = of_warps + (warp * kKinds + kind) * kCols;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) sums[i] += from[i * kWarpSize];
    }
    float* const row = partials + int64_t{blockIdx.x} * cols + columns.first;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (columns.inside(i)) row[i * kWarpSize] = sums[i];
    }
  }
}

// Persistent blocks walk over tiles of rows. A warp takes flat_rows_at_once() of them at a time;
// its lanes keep their columns' weights and sums in registers.
template <bool kRms, bool kFromOutput, int kClass, typename X>
__device__ __forceinline__ void norm_backward_tiles(const BackwardInput<X, X, float>& in,
                                                    const BackwardOutput<X, float>& out,
                                                    bool lie_flat, const FlatRows& flat,
                                                    CopyBarrier* filled) {
  using Tiles = BackwardTiles<X>;
  constexpr int kUnits = kFlatUnits[kClass], kSure = sure_units(kFlatUnits, kClass);
  constexpr int kRows = flat_rows_at_once(kUnits), kCols = kUnits * kWarpSize;
  constexpr bool kReadsMean = !kRms && !kFromOutput;
  extern __shared__ __align__(128) char memory[];
  float* const params = reinterpret_cast<float*>(memory);

  const int lane = threadIdx.x % kWarpSize, cols = in.cols;
  const LaneColumns<kUnits, kSure> columns(cols);
  wait_for_prerequisites();
  out.clear_totals();
  const Tiles tensors{in, out, lie_flat};
  TileRing<X, Tiles> tiles(tensors, in.rows, cols, flat, filled, memory + flat.params_bytes);
  tiles.start();
  if (kFromOutput) stage_columns(in, kCols, params);
  __syncthreads();
  // (shift, scale) of the lane's columns.
  const float2* const of_output = reinterpret_cast<const float2*>(params + kCols) + lane;
  // Where registers are few, weights are read for each row.
  constexpr bool kKeepsWeights = !kFromOutput || kUnits <= 5;
  const float* const weights = params + lane;
  float kept_weights[kUnits];
  uint32_t listed = 0;
  if constexpr (kFromOutput) {
    listed = take_weights(columns, weights, of_output, kept_weights);
  } else {
    load_weights<X>(in.weight, in.weight_offset, columns, kept_weights);
  }

  // Each of a warp's first lanes asks for a row's statistics, one turn ahead.
  float next_mean = 0, next_rstd = 0;
  auto look_ahead = [&](int64_t row) {
    row += lane;
    const bool any = lane < kRows && row < in.rows;
    if (kReadsMean) next_mean = any ? __ldg(in.mean + row) : 0.0f;
    next_rstd = any ? __ldg(in.rstd + row) : 0.0f;
  };
  const int first = static_cast<int>(threadIdx.x) / kWarpSize * kRows;
  look_ahead(tiles.first_row() + first);
  float dweight[kUnits] = {}, dbias[kUnits] = {};
  for (; tiles.any(); tiles.next()) {
    tiles.template wait<true>();
    const X* const saved_tile = tiles.part(Tiles::kSavedRows) + lane;
    X* const dy_tile = tiles.part(Tiles::kGradientRows) + lane;
    const int64_t first_row = tiles.first_row();
#pragma unroll 1
    for (int r = first; r < flat.rows; r += kFlatWarps * kRows) {
      const float own_mean = next_mean, own_rstd = next_rstd;
      const int next = r + kFlatWarps * kRows;
      look_ahead(next < flat.rows ? first_row + next : tiles.next_row() + first);

      float xhat[kRows][kUnits], w[kRows][kUnits];
      load_rows(saved_tile + r * cols, cols, columns, 0.0f, xhat);
      load_rows(dy_tile + r * cols, cols, columns, 0.0f, w);
      float mean[kRows], rstd[kRows];
      from_lanes<kReadsMean>(own_mean, mean);
      from_lanes<true>(own_rstd, rstd);
      normalize_rows<kRms, kFromOutput>(of_output, mean, rstd, xhat);
      if (kFromOutput && listed != 0) take_listed(in, of_output, listed, first_row + r, xhat);
      float sums[kRms ? 1 : 2][kRows][2];
      add_up_rows<kRms>(
          [&](int i) { return kKeepsWeights ? kept_weights[i] : weights[i * kWarpSize]; }, xhat, w,
          dweight, dbias, sums);
      if (out.dx == nullptr) continue;
      make_dx<kRms>(sums, rstd, in.per_cols, xhat, w);
      if (out.dresidual != nullptr)
        add_residual(tiles.part(Tiles::kResidualRows) + lane, r * cols, cols, columns, w);
      store_rows(dy_tile, r, cols, columns, w);
    }
  }
  tiles.finish();
  launch_dependents();
  write_tile_sums<kRms, kUnits, kSure>(out, cols, memory, dweight, dbias);
}

// All forms in one kernel a type, which branches once: for shorter rows, or for longer ones.
template <typename X, bool kLonger>
__global__ void __launch_bounds__(kFlatThreads, flat_backward_blocks(kLonger))
    norm_backward_flat(const __grid_constant__ BackwardInput<X, X, float> in,
                       const __grid_constant__ BackwardOutput<X, float> out, bool lie_flat,
                       const __grid_constant__ FlatRows flat) {
#if __CUDA_ARCH__ >= 900
  __shared__ CopyBarrier filled[kMaxFlatSlots];
  constexpr int kFirst = kLonger ? kShorterFlatClasses : 0;
  constexpr int kEnd = kLonger ? kFlatClasses : kShorterFlatClasses;
  with_number<kFirst, kEnd>(flat.row_class, [&](auto row_class) {
    with_flag(in.from_output, [&](auto from_output) {
      with_flag(in.rms, [&](auto rms) {
        constexpr bool kFromOutput = decltype(from_output)::value;
        norm_backward_tiles<decltype(rms)::value, kFromOutput, decltype(row_class)::value>(
            in, out, lie_flat, flat, filled);
      });
    });
  });
#else
  __trap();  // no plan asks for it
#endif
}

}  // namespace fused_norm
