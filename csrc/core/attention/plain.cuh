// The plain tier: CUDA cores, fp32 or fp64 arithmetic, every dtype, head dimension, stride and
// option. Tiles of 64 queries by 64 keys; all products go through one function. What is right here
// is the reference of the faster tiers.
#pragma once

#include <algorithm>
#include <climits>

#include "core/attention/scores.cuh"
#include "core/attention/workspace.h"
#include "core/common/launch.cuh"
#include "core/common/pack.cuh"
#include "core/common/sizes.h"

namespace fused_norm {
namespace plain {

constexpr int kTile = 64;      // queries, keys, and columns of a product
constexpr int kDepth = 16;     // of a product, staged at a time
constexpr int kThreads = 256;  // 16 x 16, each with 4 x 4 elements of a tile
constexpr int kChunk = 128;    // columns of the outputs that a block holds in registers
constexpr int kTilesOfChunk = kChunk / kTile;
// Of a multiprocessor; fp64 needs the registers.
template <typename A>
constexpr int kBlocks = sizeof(A) == 4 ? 2 : 1;

template <typename A>
struct Shared {
  // Depth-major, padded to spread banks and keep 16-byte rows.
  A left[kDepth][kTile + 4], right[kDepth][kTile + 4];
  A scores[kTile][kTile + 1];
  bool key_is_seen[kTile];
};

template <typename A>
using Fragment = A[4][4];

// Calls use(i, j) for the elements of a fragment.
template <typename Use>
__device__ __forceinline__ void for_fragment(Use use) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) use(i, j);
  }
}

__device__ __forceinline__ int tile_row() { return threadIdx.x / 16 * 4; }
__device__ __forceinline__ int tile_col() { return threadIdx.x % 16 * 4; }

// Calls use(T{}) with the type in memory; fp64 arithmetic means fp64 in memory.
template <typename A, typename Use>
__device__ __forceinline__ void with_storage(DType dtype, Use use) {
  if constexpr (sizeof(A) == 8) {
    use(double{});
  } else {
    if (dtype == DType::kFloat32) return use(float{});
    if (dtype == DType::kBFloat16) return use(__nv_bfloat16{});
    use(__half{});
  }
}

// Of masks and sinks, which may be fp32 beside fp64.
template <typename A, typename Use>
__device__ __forceinline__ void with_option_storage(DType dtype, Use use) {
  if (sizeof(A) == 8 && dtype == DType::kFloat32) return use(float{});
  with_storage<A>(dtype, use);
}

// Rows of a tensor as one factor of a product: element (row, col) is zero outside [begin, end) x
// [0, cols), and in rows that `seen`, where given, leaves out; so a NaN there does no harm.
struct Rows {
  const void* data;  // row 0, column 0
  int64_t stride;
  int begin, end, cols;
  const bool* seen;  // of a row's place in its tile

  template <typename T>
  __device__ __forceinline__ T at(int row, int col) const {
    const bool inside =
        row >= begin && row < end && col < cols && (seen == nullptr || seen[row % kTile]);
    return inside ? static_cast<const T*>(data)[row * stride + col] : T(0.f);
  }
};

// Stages a 64 x kDepth part of a factor: rows from `row`, columns from `col`. kAlongDepth: the
// rows' columns are the product's depth; else the rows are.
template <typename A, bool kAlongDepth>
__device__ __forceinline__ void stage(A (&to)[kDepth][kTile + 4], const Rows& rows, DType dtype,
                                      int row, int col) {
  with_storage<A>(dtype, [&](auto t) {
    using T = decltype(t);
#pragma unroll
    for (int i = 0; i < kDepth * kTile / kThreads; ++i) {
      const int at = i * kThreads + threadIdx.x;
      if constexpr (kAlongDepth) {
        to[at % kDepth][at / kDepth] =
            static_cast<A>(rows.at<T>(row + at / kDepth, col + at % kDepth));
      } else {
        to[at / kTile][at % kTile] = static_cast<A>(rows.at<T>(row + at / kTile, col + at % kTile));
      }
    }
  });
}

// Sums of kDepth products come first: one running sum over all would round several times as much.
template <typename A>
__device__ __forceinline__ void multiply_staged(Fragment<A>& acc, const Shared<A>& shared) {
  Fragment<A> part = {};
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    A left[4], right[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      left[i] = shared.left[k][tile_row() + i];
      right[i] = shared.right[k][tile_col() + i];
    }
    for_fragment([&](int i, int j) { part[i][j] = fma(left[i], right[j], part[i][j]); });
  }
  for_fragment([&](int i, int j) { acc[i][j] += part[i][j]; });
}

// acc[i][j] = row (left_row + i) of `left` . row (right_row + j) of `right`.
template <typename A>
__device__ __forceinline__ void multiply_rows(Fragment<A>& acc, Shared<A>& shared, DType dtype,
                                              const Rows& left, int left_row, const Rows& right,
                                              int right_row) {
  for_fragment([&](int i, int j) { acc[i][j] = 0; });
  for (int d = 0; d < left.cols; d += kDepth) {
    __syncthreads();
    stage<A, true>(shared.left, left, dtype, left_row, d);
    stage<A, true>(shared.right, right, dtype, right_row, d);
    __syncthreads();
    multiply_staged(acc, shared);
  }
  __syncthreads();
}

// acc[c] += scores x (64 columns from `col` + 64 c of the rows from `row`); transposed: scores^T x.
template <typename A, bool kTransposed>
__device__ __forceinline__ void multiply_scores(Fragment<A> (&acc)[kTilesOfChunk],
                                                Shared<A>& shared, DType dtype, const Rows& rows,
                                                int row, int col) {
#pragma unroll
  for (int c = 0; c < kTilesOfChunk; ++c) {
    if (col + c * kTile >= rows.cols) break;
    for (int k = 0; k < kTile; k += kDepth) {
      __syncthreads();
      stage<A, false>(shared.right, rows, dtype, row + k, col + c * kTile);
#pragma unroll
      for (int i = 0; i < kDepth * kTile / kThreads; ++i) {
        const int at = i * kThreads + threadIdx.x;
        if constexpr (kTransposed) {
          shared.left[at / kTile][at % kTile] = shared.scores[k + at / kTile][at % kTile];
        } else {
          shared.left[at % kDepth][at / kDepth] = shared.scores[at / kDepth][k + at % kDepth];
        }
      }
      __syncthreads();
      multiply_staged(acc[c], shared);
    }
  }
  __syncthreads();
}

template <typename A>
__device__ __forceinline__ void store_scores(Shared<A>& shared, const Fragment<A>& values) {
  __syncthreads();
  for_fragment([&](int i, int j) { shared.scores[tile_row() + i][tile_col() + j] = values[i][j]; });
}

// Over the 16 threads that hold a row.
template <typename A, typename Op>
__device__ __forceinline__ A reduce_row(A value, Op op) {
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffffu, value, mask));
  }
  return value;
}

template <typename A>
__device__ __forceinline__ A sum_row(A value) {
  return reduce_row(value, [](A a, A b) { return a + b; });
}

// Writes rows [0, rows) of a chunk's accumulators, from column `col` on.
template <typename A>
__device__ __forceinline__ void store_chunk(const Fragment<A> (&acc)[kTilesOfChunk], DType dtype,
                                            void* data, int64_t stride, int rows, int col,
                                            int cols) {
  with_storage<A>(dtype, [&](auto t) {
    using T = decltype(t);
#pragma unroll
    for (int c = 0; c < kTilesOfChunk; ++c) {
      for_fragment([&](int i, int j) {
        const int row = tile_row() + i, column = col + c * kTile + tile_col() + j;
        if (row < rows && column < cols) {
          static_cast<T*>(data)[row * stride + column] = static_cast<T>(acc[c][i][j]);
        }
      });
    }
  });
}

// Which (tile, chunk of columns, head, batch) a block has. Tiles vary fastest.
struct Place {
  int tile, chunk, head, batch;
};

__device__ __forceinline__ Place place_of(int tiles, int chunks, int heads) {
  unsigned block = blockIdx.x;
  Place p;
  p.tile = block % tiles;
  block /= tiles;
  p.chunk = block % chunks;
  block /= chunks;
  p.head = block % heads;
  p.batch = block / heads;
  return p;
}

// Row 0 of a sequence's head, rows [begin, end) of which take part.
__device__ __forceinline__ Rows rows_of(const AttentionTensor& tensor, DType dtype, int batch,
                                        int head, int first, Range range, int cols) {
  const int64_t at =
      batch * tensor.batch_stride + head * tensor.head_stride + first * tensor.row_stride;
  return {static_cast<const char*>(tensor.data) + at * size_of(dtype),
          tensor.row_stride,
          range.begin,
          range.end,
          cols,
          nullptr};
}
__device__ __forceinline__ void* data_at(const Rows& rows, DType dtype, int row) {
  return const_cast<char*>(static_cast<const char*>(rows.data)) +
         row * rows.stride * size_of(dtype);
}

__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
template <typename A>
constexpr A kLowest = -static_cast<A>(INFINITY);

// exp(a - b), where b is -inf only if nothing was seen.
template <typename A>
__device__ __forceinline__ A exp_difference(A a, A b) {
  return b == kLowest<A> ? A(0) : exp_of(a - b);
}

// Which of a thread's 4 x 4 probabilities dropout keeps, and what it multiplies them by.
template <typename A>
struct Kept {
  uint32_t bits;
  A scale;

  __device__ __forceinline__ A at(int i, int j) const {
    return bits >> (i * 4 + j) & 1 ? scale : A(0);
  }
};

template <typename A>
__device__ __forceinline__ Kept<A> kept_of(const ScoreRules<A>& rules, int query, int key) {
  if (!rules.drops()) return {0xffffu, A(1)};
  const Dropout dropout = rules.dropout();
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bits |= dropout.kept(query + tile_row() + i, key + tile_col()) << (i * 4);
  }
  return {bits, static_cast<A>(rules.params.dropout_scale)};
}

// The score of a thread's element (i, j), given query . key; -inf where it is hidden.
template <typename A>
__device__ __forceinline__ Score<A> score_at(A dot, int i, int j, const ScoreRules<A>& rules,
                                             const Band& band, int query, int query_end, int key,
                                             int key_end) {
  const int row = query + tile_row() + i, col = key + tile_col() + j;
  if (row < query_end && col < key_end && band.sees(row, col)) return rules.score(dot, row, col);
  return {kLowest<A>, A(0)};
}

// After store_scores and a barrier: which keys any query gives weight to. What the others hold
// must not reach a product, as 0 * NaN is NaN.
template <typename A>
__device__ __forceinline__ void find_seen_keys(Shared<A>& shared) {
  __syncthreads();
  if (threadIdx.x < kTile) {
    bool seen = false;
    for (int i = 0; i < kTile; ++i) seen |= !(shared.scores[i][threadIdx.x] == 0);
    shared.key_is_seen[threadIdx.x] = seen;
  }
  __syncthreads();
}

inline int tiles_of(int rows) { return std::max<int64_t>(1, ceil_div(rows, kTile)); }
inline int chunks_of(int cols) { return std::max<int64_t>(1, ceil_div(cols, kChunk)); }

// Of 256 threads a block; nothing is launched for no blocks.
template <typename... Params, typename... Args>
cudaError_t launch_tiles(void (*kernel)(Params...), int shared_bytes, int64_t blocks,
                         cudaStream_t stream, const Args&... args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  return detail::launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), {shared_bytes},
                        stream, args...);
}

template <typename Run>
cudaError_t with_arithmetic(DType dtype, Run run) {
  return dtype == DType::kFloat64 ? run(double{}) : run(float{});
}

}  // namespace plain
}  // namespace fused_norm
