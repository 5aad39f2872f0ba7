// The plain tier: CUDA cores, fp32 or fp64 arithmetic, every dtype, head dimension, stride and
// option. Tiles of 64 queries by 64 keys; all products go through one function. What is right here
// is the reference of the faster tiers.
#pragma once

#include "core/attention/tiles.cuh"

namespace fused_norm::plain {

constexpr int kTile = 64;      // queries, keys, and columns of a product
constexpr int kDepth = 16;     // of a product, staged at a time
constexpr int kThreads = 256;  // 16 x 16, each with 4 x 4 elements of a tile
constexpr int kChunk = 128;    // columns of the outputs that a block holds in registers
constexpr int kTilesOfChunk = kChunk / kTile;
// Of a multiprocessor; fp64 needs the registers.
template <typename A>
constexpr int kBlocks = sizeof(A) == 4 ? 2 : 1;

template <typename A>
using Fragment = A[4][4];

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

// Stages a 64 x kDepth part of a factor: load(depth, place). Neighbouring threads load along depth,
// or along places.
template <bool kAlongDepth, typename A, typename Load>
__device__ __forceinline__ void stage(A (&to)[kDepth][kTile + 4], Load load) {
#pragma unroll
  for (int i = 0; i < kDepth * kTile / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x;
    const int depth = kAlongDepth ? at % kDepth : at / kTile;
    const int place = kAlongDepth ? at / kDepth : at % kTile;
    to[depth][place] = load(depth, place);
  }
}

// A block's shared memory, and products of what lies there.
template <typename A>
struct Shared {
  // Depth-major, padded to spread banks and keep 16-byte rows.
  A left[kDepth][kTile + 4], right[kDepth][kTile + 4];
  A scores[kTile][kTile + 1];
  bool key_is_seen[kTile];

  // Sums of kDepth products come first: one running sum over all would round several times as much.
  __device__ __forceinline__ void multiply_staged(Fragment<A>& acc) const {
    Fragment<A> part = {};
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      A of_left[4], of_right[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of_left[i] = left[k][tile_row() + i];
        of_right[i] = right[k][tile_col() + i];
      }
      for_fragment([&](int i, int j) { part[i][j] = fma(of_left[i], of_right[j], part[i][j]); });
    }
    for_fragment([&](int i, int j) { acc[i][j] += part[i][j]; });
  }

  // acc[i][j] = row `row` + i of `rows` . row `other_row` + j of `others`.
  __device__ __forceinline__ void multiply_rows(Fragment<A>& acc, DType dtype, const Rows& rows,
                                                int row, const Rows& others, int other_row) {
    for_fragment([&](int i, int j) { acc[i][j] = 0; });
    for (int d = 0; d < rows.cols; d += kDepth) {
      __syncthreads();
      with_storage<A>(dtype, [&](auto t) {
        using T = decltype(t);
        stage<true>(left, [&](int k, int i) -> A { return rows.at<T>(row + i, d + k); });
        stage<true>(right, [&](int k, int j) -> A { return others.at<T>(other_row + j, d + k); });
      });
      __syncthreads();
      multiply_staged(acc);
    }
    __syncthreads();
  }

  // acc[c] += scores (or scores^T) x 64 columns from `col` + 64 c of the rows from `row`.
  template <bool kTransposed>
  __device__ __forceinline__ void multiply_scores(Fragment<A> (&acc)[kTilesOfChunk], DType dtype,
                                                  const Rows& rows, int row, int col) {
#pragma unroll
    for (int c = 0; c < kTilesOfChunk; ++c) {
      const int first = col + c * kTile;
      if (first >= rows.cols) break;
      for (int d = 0; d < kTile; d += kDepth) {
        __syncthreads();
        with_storage<A>(dtype, [&](auto t) {
          using T = decltype(t);
          stage<false>(right,
                       [&](int k, int j) -> A { return rows.at<T>(row + d + k, first + j); });
        });
        stage<!kTransposed>(
            left, [&](int k, int i) { return kTransposed ? scores[d + k][i] : scores[i][d + k]; });
        __syncthreads();
        multiply_staged(acc[c]);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void store_scores(const Fragment<A>& values) {
    __syncthreads();
    for_fragment([&](int i, int j) { scores[tile_row() + i][tile_col() + j] = values[i][j]; });
  }

  // After store_scores and a barrier: which keys any query gives weight to. What the others hold
  // must not reach a product, as 0 * NaN is NaN.
  __device__ __forceinline__ void find_seen_keys() {
    __syncthreads();
    if (threadIdx.x < kTile) {
      bool seen = false;
      for (int i = 0; i < kTile; ++i) seen |= !(scores[i][threadIdx.x] == 0);
      key_is_seen[threadIdx.x] = seen;
    }
    __syncthreads();
  }
};

// Writes rows [0, rows) of a chunk's accumulators, from row `first` and column `col` on.
template <typename A>
__device__ __forceinline__ void store_chunk(const Fragment<A> (&acc)[kTilesOfChunk], DType dtype,
                                            const AttentionTensor& tensor, int batch, int head,
                                            int first, int rows, int col, int cols) {
  if (tensor.data == nullptr) return;
  with_storage<A>(dtype, [&](auto t) {
    using T = decltype(t);
    T* data = row_of<T>(tensor, batch, head, first);
#pragma unroll
    for (int c = 0; c < kTilesOfChunk; ++c) {
      for_fragment([&](int i, int j) {
        const int row = tile_row() + i, column = col + c * kTile + tile_col() + j;
        if (row < rows && column < cols) {
          data[row * tensor.row_stride + column] = static_cast<T>(acc[c][i][j]);
        }
      });
    }
  });
}

template <typename A>
constexpr A kLowest = -static_cast<A>(INFINITY);

// exp(a - b), where b is -inf only if nothing was seen.
template <typename A>
__device__ __forceinline__ A exp_difference(A a, A b) {
  return b == kLowest<A> ? A(0) : exp(a - b);
}

// A head of a sequence: its rows in `query_range` and `key_range`, and what their scores are.
template <typename A>
struct Head {
  Rows queries, keys, values, douts;
  Band band;
  ScoreRules<A> rules;

  __device__ __forceinline__ Head(const AttentionParams& params, const AttentionTensor& dout,
                                  const Sequence& s, int head, Range query_range, Range key_range)
      : band(band_of(params, s)), rules(params, s, head) {
    const auto rows = [&](const AttentionTensor& tensor, int head, int first, Range range,
                          int cols) -> Rows {
      const int64_t at =
          s.batch * tensor.batch_stride + head * tensor.head_stride + first * tensor.row_stride;
      const char* row = static_cast<const char*>(tensor.data) + at * size_of(params.dtype);
      return {row, tensor.row_stride, range.begin, range.end, cols, nullptr};
    };
    const int kv_head = head / (params.heads / params.kv_heads);
    queries = rows(params.query, head, s.query_begin, query_range, params.head_dim);
    keys = rows(params.key, kv_head, s.key_begin, key_range, params.head_dim);
    values = rows(params.value, kv_head, s.key_begin, key_range, params.value_dim);
    douts = rows(dout, head, s.query_begin, query_range, params.value_dim);
  }

  // The score of a thread's element (i, j), given query . key; -inf where it is hidden.
  __device__ __forceinline__ Score<A> score(A dot, int i, int j, int query, int key) const {
    const int row = query + tile_row() + i, col = key + tile_col() + j;
    if (row < queries.end && col < keys.end && band.sees(row, col)) {
      return rules.score(dot, row, col);
    }
    return {kLowest<A>, A(0)};
  }

  // What dropout multiplies the probabilities of a thread's row i by.
  __device__ __forceinline__ void draw(A (&kept)[4], int i, int query, int key) const {
    const int first = key + tile_col();
    uint32_t bits = ~0u;
    if (rules.drops()) bits = rules.dropout().kept(query + tile_row() + i, first);
    const A scale = rules.drops() ? static_cast<A>(rules.params.dropout_scale) : A(1);
#pragma unroll
    for (int j = 0; j < 4; ++j) kept[j] = Dropout::keeps(bits, first + j) ? scale : A(0);
  }
};

}  // namespace fused_norm::plain
