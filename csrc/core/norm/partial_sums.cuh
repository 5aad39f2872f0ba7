// Partial sums of dweight and dbias: a block's, written as a row, and stage 2, which adds the rows.
#pragma once

#include "core/common/overlap.cuh"
#include "core/common/row_slice.cuh"
#include "core/norm/columns.cuh"

namespace fused_norm {

// Leaves the column sums of a group in shared memory.
template <RowsLie kLie, int kPacks, int N, typename Group>
__device__ void stage_sums(const Group& group, const float (&sums)[kPacks][N], float* staged) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    float* const at = staged + slice_column<N, kPacks, kLie>(group) + p * slice_step<N>(group);
    if constexpr (!dealt_out(kLie)) {
#pragma unroll
      for (int q = 0; q < N; q += 4)
        memcpy(reinterpret_cast<float4*>(at + q), sums[p] + q, sizeof(float4));
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) at[column_in_pack(kLie, N, i, group.lanes())] = sums[p][i];
    }
  }
}

// Adds the sums of groups that share a warp: lanes that hold the same columns are `lanes` apart.
template <int kPacks, int N, typename Group>
__device__ void add_within_warp(const Group& group, float (&sums)[kPacks][N]) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    if (offset < group.lanes()) break;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[p][i] += __shfl_xor_sync(kFullMask, sums[p][i], offset);
    }
  }
}

// Writes a block's partial rows. `staged` is shared memory for 2 * kPacks * N values of each of the
// block's threads, which may still be in use; null partials are left out.
template <RowsLie kLie, bool kBias, int kPacks, int N, typename Group>
__device__ void write_partials(const Group& group, float (&dweight)[kPacks][N],
                               float (&dbias)[kPacks][N], float* staged, int cols,
                               float* dweight_partial, float* dbias_partial) {
  add_within_warp(group, dweight);
  if (kBias) add_within_warp(group, dbias);
  // The groups that share a warp now hold the same.
  const int groups_a_warp = max(1, kWarpSize / group.threads());
  const int parts = group.groups() / groups_a_warp;
  const int part_cols = group.threads() * kPacks * N;
  float* const staged_bias = staged + parts * part_cols;
  __syncthreads();
  if (group.index() % groups_a_warp == 0) {
    const int part = group.index() / groups_a_warp * part_cols;
    stage_sums<kLie>(group, dweight, staged + part);
    if (kBias) stage_sums<kLie>(group, dbias, staged_bias + part);
  }
  __syncthreads();
  const int threads = group.threads() * group.groups();
  for (int col = group.index() * group.threads() + group.thread(); col < cols; col += threads) {
    float of_weight = 0, of_bias = 0;
    for (int part = 0; part < parts; ++part) {
      of_weight += staged[part * part_cols + col];
      if (kBias) of_bias += staged_bias[part * part_cols + col];
    }
    if (dweight_partial) dweight_partial[col] = of_weight;
    if (kBias && dbias_partial) dbias_partial[col] = of_bias;
  }
}

// Stage 2: out[c] = sum over p of partials[p][c], rounded once. blockIdx.y chooses dweight or
// dbias; a block takes 32 columns, eight threads a partial row, and each thread every
// (kThreads / 8)th row. The first `look_blocks` blocks in x look at the parameters meanwhile, each
// thread at a column's. A column that is not recoverable and not listed gets NaN, its dbias too.
template <typename A>
struct PartialSums {
  const A* partials[2];
  void* out[2];
  DType dtype[2];
};

template <typename A>
__device__ __forceinline__ void store_as(DType dtype, void* out, int col, A value) {
  with_param_type<A>(dtype, [&](auto type) {
    static_cast<decltype(type)*>(out)[col] = static_cast<decltype(type)>(value);
  });
}

template <typename A, int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    sum_partials(const __grid_constant__ PartialSums<A> sums,
                 const __grid_constant__ ColumnLook<A> look, int look_blocks, int rows) {
  constexpr int kCols = 4, kRowThreads = kWarpSize / kCols, kStep = kThreads / kRowThreads;
  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ A of_warp[kWarps][kWarpSize + kCols];
  const int cols = look.cols;
  // The parameters may be read before stage 1 is done, which waited for all before it.
  if (static_cast<int>(blockIdx.x) < look_blocks) {
    if (blockIdx.y > 0) return;
    look_at_columns(look, blockIdx.x, look_blocks);
    meet_previous_kernel();
    return;
  }
  const int thread = threadIdx.x, warp = thread / kWarpSize;
  const int first_col = (blockIdx.x - look_blocks) * kWarpSize;
  // Threads read the columns from read_col on, and in the end half a warp adds up column col.
  const int read_col = first_col + thread % kRowThreads * kCols, col = first_col + thread / kWarps;
  const bool writes = thread % kWarps == 0 && col < cols;
  const A* const partials = sums.partials[blockIdx.y] + read_col;
  A sum[kCols] = {};
  const bool spoiled = writes && look.spoils(col, {look, col});
  meet_previous_kernel();
  auto add_up = [&](auto read) {
#pragma unroll 8
    for (int row = thread / kRowThreads; row < rows; row += kStep) {
      const auto values = read(partials + int64_t{row} * cols);
#pragma unroll
      for (int i = 0; i < kCols; ++i) sum[i] += values.at[i];
    }
  };
  struct alignas(16) Values {
    A at[kCols];
  };
  if (cols % kCols == 0) {
    if (read_col < cols)
      add_up([](const A* from) { return *reinterpret_cast<const Values*>(from); });
  } else {
    add_up([&](const A* from) {
      Values values;
#pragma unroll
      for (int i = 0; i < kCols; ++i) values.at[i] = read_col + i < cols ? from[i] : A(0);
      return values;
    });
  }
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
#pragma unroll
    for (int offset = kRowThreads; offset < kWarpSize; offset *= 2)
      sum[i] += __shfl_xor_sync(kFullMask, sum[i], offset);
    if (thread % kWarpSize < kRowThreads) of_warp[warp][read_col - first_col + i] = sum[i];
  }
  __syncthreads();
  const A of_col = lane_sum<kWarps>(of_warp[thread % kWarps][thread / kWarps]);
  if (!writes) return;
  store_as(sums.dtype[blockIdx.y], sums.out[blockIdx.y], col,
           spoiled ? static_cast<A>(NAN) : of_col);
}

}  // namespace fused_norm
