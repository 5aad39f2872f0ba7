// The plain tier's kernels.
#include <algorithm>
#include <climits>

#include "core/attention/plain.cuh"
#include "core/attention/plan.h"
#include "core/common/launch.cuh"
#include "core/common/sizes.h"

namespace fused_norm {
namespace plain {
namespace {

// Softmax of a tile's rows: `max` and `sum` are brought forward, and the tile's probabilities
// (times their dropout) replace the scores. Returns by how much what came before is scaled.
template <typename A>
__device__ __forceinline__ A advance_softmax(A (&row)[4], int i, const Kept<A>& kept, A& max,
                                             A& sum) {
  A tile_max = row[0];
#pragma unroll
  for (int j = 1; j < 4; ++j) tile_max = fmax(tile_max, row[j]);
  tile_max = reduce_row(tile_max, [](A a, A b) { return fmax(a, b); });
  const A new_max = fmax(max, tile_max), rescale = exp_difference(max, new_max);
  A tile_sum = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    // A NaN score must show even in a row whose other keys are hidden.
    const A p = new_max == kLowest<A> && row[j] == kLowest<A> ? A(0) : exp_of(row[j] - new_max);
    tile_sum += p;
    row[j] = p * kept.at(i, j);
  }
  sum = sum * rescale + sum_row(tile_sum);
  max = new_max;
  return rescale;
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

template <typename A>
__device__ __forceinline__ void forward_tile(const AttentionParams& params, Shared<A>& shared,
                                             const Sequence& s, int head, int query, int col) {
  const int kv_head = head / (params.heads / params.kv_heads);
  const Band band = band_of(params, s);
  const ScoreRules<A> rules(params, s, head);
  const int query_end = min(query + kTile, s.queries);
  const Range range = band.keys_of(query, query_end, s.keys);
  const Rows queries = rows_of(params.query, params.dtype, s.batch, head, s.query_begin,
                               {query, query_end}, params.head_dim);
  const Rows keys =
      rows_of(params.key, params.dtype, s.batch, kv_head, s.key_begin, range, params.head_dim);
  Rows values =
      rows_of(params.value, params.dtype, s.batch, kv_head, s.key_begin, range, params.value_dim);
  if (params.mask.data != nullptr) values.seen = shared.key_is_seen;
  A max[4], sum[4];
  Fragment<A> acc[kTilesOfChunk] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) max[i] = kLowest<A>, sum[i] = 0;

  for (int key = range.begin / kTile * kTile; key < range.end; key += kTile) {
    Fragment<A> scores;
    multiply_rows(scores, shared, params.dtype, queries, query, keys, key);
    const Kept<A> kept = kept_of(rules, query, key);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[i][j] =
            score_at(scores[i][j], i, j, rules, band, query, query_end, key, range.end).value;
      }
      const A rescale = advance_softmax(scores[i], i, kept, max[i], sum[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < kTilesOfChunk; ++c) acc[c][i][j] *= rescale;
      }
    }
    store_scores(shared, scores);
    if (values.seen != nullptr) find_seen_keys(shared);
    multiply_scores<A, false>(acc, shared, params.dtype, values, key, col);
  }

  const A sink = read_sink<A>(params, head);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const A last_max = fmax(max[i], sink), rescale = exp_difference(max[i], last_max);
    const A total = sum[i] * rescale + exp_difference(sink, last_max);
    const A factor = total == 0 ? A(0) : rescale / total;
#pragma unroll
    for (int c = 0; c < kTilesOfChunk; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[c][i][j] *= factor;
    }
    const int row = query + tile_row() + i;
    if (col == 0 && tile_col() == 0 && row < query_end) {
      static_cast<A*>(params.lse)[first_lse(params, s, head) + row] =
          total == 0 ? kLowest<A> : last_max + log(total);
    }
  }
  const Rows out = rows_of(params.out, params.dtype, s.batch, head, s.query_begin, {0, 0}, 0);
  store_chunk(acc, params.dtype, data_at(out, params.dtype, query), out.stride, query_end - query,
              col, params.value_dim);
}

// A block has 64 queries and 128 columns of the output; blocks of other columns make the same
// scores again.
template <typename A>
__global__ void __launch_bounds__(kThreads, kBlocks<A>)
    attention_plain_forward(const __grid_constant__ AttentionParams params, int tiles, int chunks) {
  extern __shared__ char memory[];
  const Place place = place_of(tiles, chunks, params.heads);
  const Sequence s = sequence_of(params, place.batch);
  for (int tile = place.tile; tile < (s.queries + kTile - 1) / kTile; tile += tiles) {
    forward_tile(params, *reinterpret_cast<Shared<A>*>(memory), s, place.head, tile * kTile,
                 place.chunk * kChunk);
  }
}

// A head's tensors, as the backward kernels read them.
struct HeadRows {
  Rows queries, keys, values, douts;

  __device__ __forceinline__ HeadRows(const AttentionBackwardParams& b, const Sequence& s, int head,
                                      Range query_range, Range key_range) {
    const AttentionParams& params = b.forward;
    const int kv_head = head / (params.heads / params.kv_heads);
    queries = rows_of(params.query, params.dtype, s.batch, head, s.query_begin, query_range,
                      params.head_dim);
    keys = rows_of(params.key, params.dtype, s.batch, kv_head, s.key_begin, key_range,
                   params.head_dim);
    values = rows_of(params.value, params.dtype, s.batch, kv_head, s.key_begin, key_range,
                     params.value_dim);
    douts =
        rows_of(b.dout, params.dtype, s.batch, head, s.query_begin, query_range, params.value_dim);
  }
};

// A tile's probabilities, times their dropout, and the derivative by query . key * scale
// (kBySoftcapped: by the score that the mask is added to).
template <typename A, bool kBySoftcapped = false>
__device__ __forceinline__ void differentiate(Fragment<A>& probability, Fragment<A>& gradient,
                                              Shared<A>& shared, const AttentionGradient& g,
                                              const ScoreRules<A>& rules, const Band& band,
                                              const HeadRows& rows, const Sequence& s, int head,
                                              int query, int key) {
  const AttentionParams& params = g.params.forward;
  multiply_rows(gradient, shared, params.dtype, rows.douts, query, rows.values, key);
  multiply_rows(probability, shared, params.dtype, rows.queries, query, rows.keys, key);
  const Kept<A> kept = kept_of(rules, query, key);
  const int64_t first = first_lse(params, s, head);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = query + tile_row() + i;
    const bool inside = row < s.queries;
    const A lse = inside ? static_cast<const A*>(params.lse)[first + row] : kLowest<A>;
    const A delta = inside ? static_cast<const A*>(g.delta)[first + row] : A(0);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Score<A> score = score_at(probability[i][j], i, j, rules, band, query, rows.queries.end,
                                      key, rows.keys.end);
      const A p = score.value == kLowest<A> ? A(0) : exp_difference(score.value, lse);
      const A by_score = p == 0 ? A(0) : p * (gradient[i][j] * kept.at(i, j) - delta);
      gradient[i][j] = kBySoftcapped ? by_score : by_score * score.slope;
      probability[i][j] = p * kept.at(i, j);
    }
  }
}

template <typename A>
__device__ __forceinline__ void scale_chunk(Fragment<A> (&acc)[kTilesOfChunk], double scale) {
#pragma unroll
  for (int c = 0; c < kTilesOfChunk; ++c) {
    for_fragment([&](int i, int j) { acc[c][i][j] *= static_cast<A>(scale); });
  }
}

// Part of a row of products: kDepth columns from `col` on, in the order of multiply_staged.
template <typename A, typename T>
__device__ __forceinline__ A multiply_part(const T* a, const T* b, int col, int cols,
                                           bool aligned) {
  constexpr int kPack = 16 / sizeof(T);
  A sum = 0;
#pragma unroll
  for (int at = col; at < col + kDepth; at += kPack) {
    alignas(16) T left[kPack] = {}, right[kPack] = {};
    if (aligned && at + kPack <= cols) {
      *reinterpret_cast<uint4*>(left) = *reinterpret_cast<const uint4*>(a + at);
      *reinterpret_cast<uint4*>(right) = *reinterpret_cast<const uint4*>(b + at);
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if (at + i < cols) left[i] = a[at + i], right[i] = b[at + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      sum = fma(static_cast<A>(left[i]), static_cast<A>(right[i]), sum);
  }
  return sum;
}

// AttentionGradient's delta and exponents. A lane has kDepth columns of a row and `lanes` of them,
// a power of 2, the row. The order of the sum is that of this tier's dout . value, so that the
// gradient of a query with one key is zero to the bit.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    attention_delta(const __grid_constant__ AttentionGradient g, int tiles, int lanes,
                    bool aligned) {
  const AttentionParams& params = g.params.forward;
  const Place place = place_of(tiles, 1, params.heads);
  const Sequence s = sequence_of(params, place.batch);
  const int64_t first = first_lse(params, s, place.head);
  const A* dlse = static_cast<const A*>(g.params.dlse);
  const int lane = threadIdx.x % lanes, cols = params.value_dim;
  for (int tile = place.tile; tile < (s.queries + kTile - 1) / kTile; tile += tiles) {
    for (int i = threadIdx.x / lanes; i < kTile; i += kThreads / lanes) {
      const int row = tile * kTile + i;
      A part = 0, sum = 0;
      if (row < s.queries) {
        with_storage<A>(params.dtype, [&](auto t) {
          using T = decltype(t);
          const int at = s.query_begin + row;
          part = multiply_part<A>(row_of<const T>(g.params.dout, s.batch, place.head, at),
                                  row_of<const T>(params.out, s.batch, place.head, at),
                                  lane * kDepth, cols, aligned);
        });
      }
      __syncwarp();
      for (int c = 0; c < (cols + kDepth - 1) / kDepth; ++c) {
        sum += __shfl_sync(0xffffffffu, part, c, lanes);
      }
      if (lane != 0 || row >= s.queries) continue;
      if (dlse != nullptr) sum -= dlse[first + row];
      static_cast<A*>(g.delta)[first + row] = sum;
      const A lse = static_cast<const A*>(params.lse)[first + row];
      static_cast<A*>(g.exponents)[first + row] =
          lse == kLowest<A> ? -kLowest<A> : lse * static_cast<A>(1.4426950408889634);
    }
  }
}

// dsink = -sum over queries of exp(sink - lse) * delta; a block a head.
template <typename A>
__global__ void __launch_bounds__(kThreads, kBlocks<A>)
    attention_sinks(const __grid_constant__ AttentionGradient g) {
  const AttentionParams& params = g.params.forward;
  const int head = blockIdx.x;
  const A sink = read_sink<A>(params, head);
  const bool packed = params.query_offsets != nullptr;
  const int64_t rows = packed ? params.total_queries : int64_t{params.batch} * params.queries;
  A sum = 0;
#pragma unroll 4
  for (int64_t row = threadIdx.x; row < rows; row += kThreads) {
    const int64_t batch = packed ? 0 : row / params.queries;
    const int64_t at = packed ? int64_t{head} * params.total_queries + row
                              : row + (batch * (params.heads - 1) + head) * params.queries;
    const A lse = static_cast<const A*>(params.lse)[at];
    // A query outside every sequence has no delta.
    if (lse != kLowest<A> && sink != kLowest<A>) {
      sum -= exp_of(sink - lse) * static_cast<const A*>(g.delta)[at];
    }
  }
  __shared__ A of_thread[kThreads];
  of_thread[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) of_thread[threadIdx.x] += of_thread[threadIdx.x + half];
  }
  if (threadIdx.x == 0) {
    with_option_storage<A>(params.sink_dtype, [&](auto t) {
      using T = decltype(t);
      static_cast<T*>(g.params.dsink)[head] = static_cast<T>(of_thread[0]);
    });
  }
}

template <typename A>
__device__ __forceinline__ void query_gradient_tile(const AttentionGradient& g, Shared<A>& shared,
                                                    const Sequence& s, int head, int query,
                                                    int col) {
  const AttentionParams& params = g.params.forward;
  const Band band = band_of(params, s);
  const ScoreRules<A> rules(params, s, head);
  const int query_end = min(query + kTile, s.queries);
  const Range range = band.keys_of(query, query_end, s.keys);
  const HeadRows rows(g.params, s, head, {query, query_end}, range);
  Rows seen_keys = rows.keys;
  if (params.mask.data != nullptr) seen_keys.seen = shared.key_is_seen;
  Fragment<A> acc[kTilesOfChunk] = {};
  for (int key = range.begin / kTile * kTile; key < range.end; key += kTile) {
    Fragment<A> probability, gradient;
    differentiate(probability, gradient, shared, g, rules, band, rows, s, head, query, key);
    store_scores(shared, gradient);
    if (seen_keys.seen != nullptr) find_seen_keys(shared);
    multiply_scores<A, false>(acc, shared, params.dtype, seen_keys, key, col);
  }
  scale_chunk(acc, params.scale);
  const Rows out = rows_of(g.params.dquery, params.dtype, s.batch, head, s.query_begin, {0, 0}, 0);
  store_chunk(acc, params.dtype, data_at(out, params.dtype, query), out.stride, query_end - query,
              col, params.head_dim);
}

template <typename A>
__global__ void __launch_bounds__(kThreads, kBlocks<A>)
    attention_plain_query_gradient(const __grid_constant__ AttentionGradient g, int tiles,
                                   int chunks) {
  extern __shared__ char memory[];
  const Place place = place_of(tiles, chunks, g.params.forward.heads);
  const Sequence s = sequence_of(g.params.forward, place.batch);
  for (int tile = place.tile; tile < (s.queries + kTile - 1) / kTile; tile += tiles) {
    query_gradient_tile(g, *reinterpret_cast<Shared<A>*>(memory), s, place.head, tile * kTile,
                        place.chunk * kChunk);
  }
}

// The queries of all heads that share the keys, in order of heads and rows.
template <typename A>
__device__ __forceinline__ void key_gradient_tile(const AttentionGradient& g, Shared<A>& shared,
                                                  const Sequence& s, int kv_head, int key,
                                                  int col) {
  const AttentionParams& params = g.params.forward;
  const Band band = band_of(params, s);
  const int key_end = min(key + kTile, s.keys), group = params.heads / params.kv_heads;
  const Range range = band.queries_of(key, key_end, s.queries);
  Fragment<A> dkey[kTilesOfChunk] = {}, dvalue[kTilesOfChunk] = {};
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const ScoreRules<A> rules(params, s, head);
    const HeadRows rows(g.params, s, head, range, {key, key_end});
    for (int query = range.begin / kTile * kTile; query < range.end; query += kTile) {
      Fragment<A> probability, gradient;
      differentiate(probability, gradient, shared, g, rules, band, rows, s, head, query, key);
      store_scores(shared, probability);
      multiply_scores<A, true>(dvalue, shared, params.dtype, rows.douts, query, col);
      store_scores(shared, gradient);
      multiply_scores<A, true>(dkey, shared, params.dtype, rows.queries, query, col);
    }
  }
  scale_chunk(dkey, params.scale);
  if (g.params.dkey.data != nullptr) {
    const Rows out = rows_of(g.params.dkey, params.dtype, s.batch, kv_head, s.key_begin, {0, 0}, 0);
    store_chunk(dkey, params.dtype, data_at(out, params.dtype, key), out.stride, key_end - key, col,
                params.head_dim);
  }
  if (g.params.dvalue.data != nullptr) {
    const Rows out =
        rows_of(g.params.dvalue, params.dtype, s.batch, kv_head, s.key_begin, {0, 0}, 0);
    store_chunk(dvalue, params.dtype, data_at(out, params.dtype, key), out.stride, key_end - key,
                col, params.value_dim);
  }
}

template <typename A>
__global__ void __launch_bounds__(kThreads, kBlocks<A>)
    attention_plain_key_gradient(const __grid_constant__ AttentionGradient g, int tiles,
                                 int chunks) {
  extern __shared__ char memory[];
  const Place place = place_of(tiles, chunks, g.params.forward.kv_heads);
  const Sequence s = sequence_of(g.params.forward, place.batch);
  for (int tile = place.tile; tile < (s.keys + kTile - 1) / kTile; tile += tiles) {
    key_gradient_tile(g, *reinterpret_cast<Shared<A>*>(memory), s, place.head, tile * kTile,
                      place.chunk * kChunk);
  }
}

// Writes a tile of the mask's gradient, summed over its rows and columns where the mask has one.
template <typename A>
__device__ __forceinline__ void store_mask_gradient(const AttentionBackwardParams& params,
                                                    Shared<A>& shared, const Fragment<A>& acc,
                                                    const Place& place, int mask_head,
                                                    int query_tile) {
  store_scores(shared, acc);
  __syncthreads();
  const int rows = params.mask_shape[2], cols = params.mask_shape[3];
  const int sum_rows = rows == 1 ? kTile : 1, sum_cols = cols == 1 ? kTile : 1;
  const int64_t first = (int64_t{place.batch} * params.mask_shape[1] + mask_head) * rows;
  for (int at = threadIdx.x; at < kTile * kTile; at += kThreads) {
    const int i = at / kTile, j = at % kTile;
    const int row = query_tile * kTile + i, col = place.tile * kTile + j;
    if (row >= rows || col >= cols) continue;
    A sum = 0;
    for (int r = 0; r < sum_rows; ++r) {
      for (int c = 0; c < sum_cols; ++c) sum += shared.scores[i + r][j + c];
    }
    with_option_storage<A>(params.forward.mask.dtype, [&](auto t) {
      using T = decltype(t);
      static_cast<T*>(params.dmask)[(first + row) * cols + col] = static_cast<T>(sum);
    });
  }
}

// A block has a tile of the mask and sums what its elements serve, in order. The grid is (key
// tiles, query tiles, mask heads, mask batches), the first fastest; tiles of one element serve all.
template <typename A>
__global__ void __launch_bounds__(kThreads, kBlocks<A>)
    attention_plain_mask_gradient(const __grid_constant__ AttentionGradient g, int key_tiles,
                                  int query_tiles) {
  extern __shared__ char memory[];
  Shared<A>& shared = *reinterpret_cast<Shared<A>*>(memory);
  const AttentionParams& params = g.params.forward;
  const int* shape = g.params.mask_shape;
  const Place place = place_of(key_tiles, query_tiles, shape[1]);
  const Range batches = served(place.batch, shape[0], params.batch);
  const Range heads = served(place.head, shape[1], params.heads);
  Fragment<A> acc = {};
  for (int batch = batches.begin; batch < batches.end; ++batch) {
    const Sequence s = sequence_of(params, batch);
    const Band band = band_of(params, s);
    const Range queries = served(place.chunk, shape[2], (s.queries + kTile - 1) / kTile);
    const Range keys = served(place.tile, shape[3], (s.keys + kTile - 1) / kTile);
    for (int head = heads.begin; head < heads.end; ++head) {
      const ScoreRules<A> rules(params, s, head);
      const HeadRows rows(g.params, s, head, {0, s.queries}, {0, s.keys});
      for (int query = queries.begin * kTile; query < queries.end * kTile; query += kTile) {
        const Range seen = band.keys_of(query, min(query + kTile, s.queries), s.keys);
        for (int key = keys.begin * kTile; key < keys.end * kTile; key += kTile) {
          if (query >= s.queries || key >= seen.end || key + kTile <= seen.begin) continue;
          Fragment<A> probability, gradient;
          differentiate<A, true>(probability, gradient, shared, g, rules, band, rows, s, head,
                                 query, key);
          for_fragment([&](int i, int j) { acc[i][j] += gradient[i][j]; });
        }
      }
    }
  }
  store_mask_gradient(g.params, shared, acc, place, place.head, place.chunk);
}

int tiles_of(int rows) { return std::max<int64_t>(1, ceil_div(rows, kTile)); }
int chunks_of(int cols) { return std::max<int64_t>(1, ceil_div(cols, kChunk)); }

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

}  // namespace
}  // namespace plain

cudaError_t attention_forward_plain(const AttentionParams& params, cudaStream_t stream) {
  using namespace plain;
  const int tiles = tiles_of(params.queries), chunks = chunks_of(params.value_dim);
  return with_arithmetic(params.dtype, [&](auto a) {
    using A = decltype(a);
    return launch_tiles(attention_plain_forward<A>, sizeof(Shared<A>),
                        int64_t{tiles} * chunks * params.heads * params.batch, stream, params,
                        tiles, chunks);
  });
}

cudaError_t attention_backward_plain(const AttentionGradient& g, cudaStream_t stream) {
  using namespace plain;
  const AttentionParams& params = g.params.forward;
  return with_arithmetic(params.dtype, [&](auto a) {
    using A = decltype(a);
    cudaError_t error = cudaSuccess;
    if (g.params.dquery.data != nullptr) {
      const int tiles = tiles_of(params.queries), chunks = chunks_of(params.head_dim);
      error = launch_tiles(attention_plain_query_gradient<A>, sizeof(Shared<A>),
                           int64_t{tiles} * chunks * params.heads * params.batch, stream, g, tiles,
                           chunks);
    }
    if (error != cudaSuccess) return error;
    if (g.params.dkey.data != nullptr || g.params.dvalue.data != nullptr) {
      const int tiles = tiles_of(params.keys);
      const int chunks = chunks_of(std::max(params.head_dim, params.value_dim));
      error = launch_tiles(attention_plain_key_gradient<A>, sizeof(Shared<A>),
                           int64_t{tiles} * chunks * params.kv_heads * params.batch, stream, g,
                           tiles, chunks);
    }
    return error;
  });
}

cudaError_t attention_delta_gradient(const AttentionGradient& g, cudaStream_t stream) {
  using namespace plain;
  const AttentionParams& params = g.params.forward;
  const int tiles = tiles_of(params.queries);
  int lanes = 1;
  while (lanes * kDepth < params.value_dim) lanes *= 2;
  const bool aligned = attention_is_aligned(params.out, params.dtype) &&
                       attention_is_aligned(g.params.dout, params.dtype);
  return with_arithmetic(params.dtype, [&](auto a) {
    return launch_tiles(attention_delta<decltype(a)>, 0,
                        int64_t{tiles} * params.heads * params.batch, stream, g, tiles, lanes,
                        aligned);
  });
}

cudaError_t attention_sink_gradient(const AttentionGradient& g, cudaStream_t stream) {
  using namespace plain;
  return with_arithmetic(g.params.forward.dtype, [&](auto a) {
    return launch_tiles(attention_sinks<decltype(a)>, 0, g.params.forward.heads, stream, g);
  });
}

cudaError_t attention_mask_gradient_plain(const AttentionGradient& g, cudaStream_t stream) {
  using namespace plain;
  const int* shape = g.params.mask_shape;
  const int query_tiles = tiles_of(shape[2]), key_tiles = tiles_of(shape[3]);
  return with_arithmetic(g.params.forward.dtype, [&](auto a) {
    using A = decltype(a);
    return launch_tiles(attention_plain_mask_gradient<A>, sizeof(Shared<A>),
                        int64_t{key_tiles} * query_tiles * shape[1] * shape[0], stream, g,
                        key_tiles, query_tiles);
  });
}

}  // namespace fused_norm
