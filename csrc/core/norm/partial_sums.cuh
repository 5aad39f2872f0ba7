// Partial sums of dweight and dbias: a block's, written as a row, and stage 2, which adds the rows.
#pragma once

#include "core/common/overlap.cuh"
#include "core/common/row_slice.cuh"
#include "core/norm/columns.cuh"

namespace fused_norm {

// Adds the column sums of a group into `staged`, the block's in shared memory, from which the
// caller's barriers keep the other groups away.
template <RowsLie kLie, int kPacks, int N, typename Group>
__device__ void stage_sums(const Group& group, const float (&sums)[kPacks][N], bool first,
                           float* staged) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    float* at = staged + slice_column<N, kPacks, kLie>(group) + p * kSliceStep<N>;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float& sum = at[i * columns_apart(kLie)];
      sum = first ? sums[p][i] : sum + sums[p][i];
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

// Writes a block's partial rows. `staged` is shared memory for 2 * blockDim.x * kPacks * N values
// that may still be in use; null partials are left out.
template <RowsLie kLie, bool kBias, int kPacks, int N, typename Group>
__device__ void write_partials(const Group& group, float (&dweight)[kPacks][N],
                               float (&dbias)[kPacks][N], float* staged, int cols,
                               float* dweight_partial, float* dbias_partial) {
  float* const staged_bias = staged + group.threads() * kPacks * N;
  add_within_warp(group, dweight);
  if (kBias) add_within_warp(group, dbias);
  // One warp, or group of warps, after the other.
  const int groups_a_turn = max(1, kWarpSize / group.threads());
  const int turns = (group.groups() + groups_a_turn - 1) / groups_a_turn;
  for (int turn = 0; turn < turns; ++turn) {
    __syncthreads();
    if (group.index() != turn * groups_a_turn) continue;
    stage_sums<kLie>(group, dweight, turn == 0, staged);
    if (kBias) stage_sums<kLie>(group, dbias, turn == 0, staged_bias);
  }
  __syncthreads();
  const int threads = group.threads() * group.groups();
  for (int col = group.index() * group.threads() + group.thread(); col < cols; col += threads) {
    if (dweight_partial) dweight_partial[col] = staged[col];
    if (kBias && dbias_partial) dbias_partial[col] = staged_bias[col];
  }
}

// Stage 2: out[c] = sum over p of partials[p][c], rounded once. blockIdx.y chooses dweight or
// dbias; a block takes 32 columns, and each of its warps every kSumWarps-th partial row. The first
// `look_blocks` blocks in x look at the parameters meanwhile, a thread at one. A column that is not recoverable and not listed
// gets NaN, its dbias too.
constexpr int kSumWarps = 32;

template <typename A>
struct PartialSums {
  const A* partials[2];
  void* out[2];
  DType dtype[2];
};

template <typename A>
__global__ void __launch_bounds__(kWarpSize* kSumWarps)
    sum_partials(const __grid_constant__ PartialSums<A> sums,
                 const __grid_constant__ ColumnLook<A> look, int look_blocks, int rows) {
  __shared__ A of_warp[kSumWarps][kWarpSize + 1];
  const int cols = look.cols;
  // The parameters may be read before stage 1 is done, which waited for all before it.
  if (blockIdx.x < look_blocks) {
    if (blockIdx.y > 0) return;
    typename ColumnLook<A>::Found found;
    const int col = blockIdx.x * blockDim.x + threadIdx.x;
    if (col < cols) look.look_at(col, found);
    meet_previous_kernel();
    if (look.add_up(look_blocks * kSumWarps, found)) look.report(found);
    return;
  }
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int first_col = (blockIdx.x - look_blocks) * kWarpSize;
  // A warp reads all of the block's columns of its rows, and in the end adds up one of them.
  const int read_col = first_col + lane, col = first_col + warp;
  const A* partials = sums.partials[blockIdx.y];
  A sum = 0;
  const bool spoiled = lane == 0 && col < cols && look.spoils(col);
  meet_previous_kernel();
  if (read_col < cols) {
#pragma unroll 8
    for (int row = warp; row < rows; row += kSumWarps)
      sum += partials[int64_t{row} * cols + read_col];
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  sum = of_warp[lane][warp];
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kFullMask, sum, offset);
  if (lane != 0 || col >= cols) return;
  if (spoiled) sum = static_cast<A>(NAN);
  void* out = sums.out[blockIdx.y];
  switch (sums.dtype[blockIdx.y]) {
    case DType::kFloat16:
      static_cast<__half*>(out)[col] = __float2half_rn(static_cast<float>(sum));
      return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(out)[col] = __float2bfloat16_rn(static_cast<float>(sum));
      return;
    case DType::kFloat32:
      static_cast<float*>(out)[col] = static_cast<float>(sum);
      return;
    case DType::kFloat64:
      static_cast<double*>(out)[col] = static_cast<double>(sum);
      return;
  }
}

}  // namespace fused_norm
