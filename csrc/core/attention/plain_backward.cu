// The plain tier's backward kernels.
#include <algorithm>

#include "core/attention/plain.cuh"

namespace fused_norm {
namespace plain {
namespace {

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

}  // namespace
}  // namespace plain

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
