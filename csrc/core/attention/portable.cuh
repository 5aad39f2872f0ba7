// What the portable tier's kernels share: bf16 or fp16 on mma.sync (compute capability 8.0 on). A
// block has a tile of queries (or keys) and walks the tiles of the other side that it sees.
#pragma once

#include <cmath>

#include "core/attention/mma.cuh"
#include "core/attention/plan.h"
#include "core/attention/scores.cuh"
#include "core/attention/workspace.h"

namespace fused_norm {
namespace portable {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Starts to copy rows [row, row + kRows) of a head into a tile; zeros for rows outside `valid` and
// in columns from `cols` on.
template <typename T, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void copy_rows(uint32_t to, const T* data, int64_t stride, int row,
                                          Range valid, int cols) {
  constexpr int kChunks = mma::Tile<kDim>::kChunks, kRowsAtOnce = kThreads / kChunks;
  static_assert(kRows % kRowsAtOnce == 0);
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const int begin = chunk * 8 < cols ? valid.begin - row : kRows, end = valid.end - row;
  const T* from = data + (row + first) * stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const int at = first + i * kRowsAtOnce;
    mma::copy_async(mma::Tile<kDim>::at(to, at, chunk), from, at >= begin && at < end);
    from += kRowsAtOnce * stride;
    // Keeps the compiler from holding every row's address in registers of its own.
    asm volatile("" : "+l"(from));
  }
}

// Writes the rows of a tile, from `row` on and below `end`, 16 bytes at a time.
template <typename T, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void store_rows(const char* tile, T* data, int64_t stride, int row,
                                           int end, int cols) {
  constexpr int kChunks = mma::Tile<kDim>::kChunks, kRowsAtOnce = kThreads / kChunks;
  const int chunk = threadIdx.x % kChunks;
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const int at = threadIdx.x / kChunks + i * kRowsAtOnce;
    if (row + at >= end || chunk * 8 >= cols) continue;
    *reinterpret_cast<uint4*>(data + (row + at) * stride + chunk * 8) =
        *reinterpret_cast<const uint4*>(tile + mma::Tile<kDim>::at(0, at, chunk));
  }
}

// Puts a warp's accumulators, rounded, into a tile; its first row is `first_row`.
template <typename T, int kDim, int kM, int kN>
__device__ __forceinline__ void round_to_tile(char* tile, const float (&acc)[kM][kN][4],
                                              int first_row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + m * 16 + half * 8 + lane / 4;
        *reinterpret_cast<uint32_t*>(tile + mma::Tile<kDim>::at(0, row, n) + lane % 4 * 4) =
            detail::round_pair(acc[m][n][half * 2], acc[m][n][half * 2 + 1], T());
      }
    }
  }
}

// Which (tile, head, batch) a block has. Tiles vary fastest, so that blocks that run together read
// the same keys; the heads of a group follow each other.
struct Place {
  int tile, head, batch;
};

__device__ __forceinline__ Place place_of(int tiles, int heads) {
  const unsigned block = blockIdx.x, row = block / tiles;
  return {static_cast<int>(block - row * tiles), static_cast<int>(row % heads),
          static_cast<int>(row / heads)};
}

template <typename T>
__device__ __forceinline__ const T* head_of(const AttentionTensor& tensor, const Sequence& s,
                                            int head, int first_row) {
  return row_of<const T>(tensor, s.batch, head, first_row);
}

// Sets the rows of a tile to zero that have no weight in any of the block's `weights`, whose
// columns they are. A rare path: it serves hidden keys that hold a NaN.
template <int kDim, int kRows, int kThreads, int kM>
__device__ __forceinline__ void clear_unseen_rows(char* tile,
                                                  const float (&weights)[kM][kRows / 8][4]) {
  __shared__ int seen[kRows];
  for (int row = threadIdx.x; row < kRows; row += kThreads) seen[row] = 0;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      bool any = false;
#pragma unroll
      for (int m = 0; m < kM; ++m) any |= !(weights[m][n][e] == 0) || !(weights[m][n][e + 2] == 0);
      if (any) atomicOr(&seen[n * 8 + threadIdx.x % 4 * 2 + e], 1);
    }
  }
  __syncthreads();
  constexpr int kChunks = mma::Tile<kDim>::kChunks;
  for (int at = threadIdx.x; at < kRows * kChunks; at += kThreads) {
    if (!seen[at / kChunks]) reinterpret_cast<uint4*>(tile)[at] = uint4{};
  }
  __syncthreads();
}

// Calls run(sequence, head, query, clean) for the block's tiles of kRows queries, the last first:
// under a causal mask they see the most. Where it returns that a thread met a NaN, once more with
// `clean`: a key that the mask hides may hold one, and 0 * NaN is NaN.
template <int kRows, bool kGeneral, typename Run>
__device__ __forceinline__ void run_query_tiles(const AttentionParams& params, int tiles, Run run) {
  const Place place = place_of(tiles, params.heads);
  const Sequence s = sequence_of(params, place.batch);
  const int all = (s.queries + kRows - 1) / kRows;
  for (int tile = tiles - 1 - place.tile; tile < all; tile += tiles) {
    bool clean = false;
    while (true) {
      const bool has_nan = run(s, place.head, tile * kRows, clean);
      const bool again = kGeneral && !clean && params.mask.data != nullptr;
      if (!__syncthreads_or(again && has_nan)) break;
      clean = true;
    }
  }
}

}  // namespace portable
}  // namespace fused_norm
