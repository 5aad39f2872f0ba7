// The plain tier's backward kernels.
#include <algorithm>
#include <type_traits>

#include "core/attention/plain.cuh"

namespace fused_norm {
namespace plain {
namespace {

// A tile's probabilities, times their dropout, and the derivative by query . key * scale
// (kBySoftcapped: by the score that the mask is added to).
template <typename A, bool kBySoftcapped = false>
__device__ __forceinline__ void differentiate(Fragment<A>& probability, Fragment<A>& gradient,
                                              Shared<A>& shared, const AttentionGradient& g,
                                              const Head<A>& h, const Sequence& s, int head,
                                              int query, int key) {
  const AttentionParams& params = g.params.forward;
  shared.multiply_rows(gradient, params.dtype, h.douts, query, h.values, key);
  shared.multiply_rows(probability, params.dtype, h.queries, query, h.keys, key);
  const int64_t first = first_lse(params, s, head);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    A kept[4];
    h.draw(kept, i, query, key);
    const int row = query + tile_row() + i;
    const bool inside = row < s.queries;
    const A lse = inside ? static_cast<const A*>(params.lse)[first + row] : kLowest<A>;
    const A delta = inside ? statistics_of<A>(g, s, head)[row] : A(0);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Score<A> score = h.score(probability[i][j], i, j, query, key);
      const A p = score.value == kLowest<A> ? A(0) : exp_difference(score.value, lse);
      const A by_score = p == 0 ? A(0) : p * (gradient[i][j] * kept[j] - delta);
      gradient[i][j] = kBySoftcapped ? by_score : by_score * score.slope;
      probability[i][j] = p * kept[j];
    }
  }
}

// dquery of a tile of queries, or kOfKeys dkey and dvalue of a tile of keys: these from the queries
// of all heads that share the keys, in order of heads and rows.
template <typename A, bool kOfKeys>
__device__ __forceinline__ void gradient_tile(const AttentionGradient& g, Shared<A>& shared,
                                              const Sequence& s, int own_head, int own, int col) {
  const AttentionParams& params = g.params.forward;
  const Band band = band_of(params, s);
  const int own_end = min(own + kTile, kOfKeys ? s.keys : s.queries);
  const Range others =
      kOfKeys ? band.queries_of(own, own_end, s.queries) : band.keys_of(own, own_end, s.keys);
  Fragment<A> acc[kTilesOfChunk] = {}, dvalue[kTilesOfChunk] = {};
  const auto add_head = [&](int head) {
    const Range mine{own, own_end};
    Head<A> h(params, g.params.dout, s, head, kOfKeys ? others : mine, kOfKeys ? mine : others);
    Rows factor = kOfKeys ? h.queries : h.keys;
    if (!kOfKeys && params.mask.data != nullptr) factor.seen = shared.key_is_seen;
    for (int other = others.begin / kTile * kTile; other < others.end; other += kTile) {
      Fragment<A> probability, gradient;
      differentiate(probability, gradient, shared, g, h, s, head, kOfKeys ? other : own,
                    kOfKeys ? own : other);
      if (kOfKeys) {
        shared.store_scores(probability);
        shared.template multiply_scores<true>(dvalue, params.dtype, h.douts, other, col);
      }
      shared.store_scores(gradient);
      if (factor.seen != nullptr) shared.find_seen_keys();
      shared.template multiply_scores<kOfKeys>(acc, params.dtype, factor, other, col);
    }
  };
  const int group = params.heads / params.kv_heads;
  if (!kOfKeys) add_head(own_head);
  for (int i = 0; kOfKeys && i < group; ++i) add_head(own_head * group + i);
#pragma unroll
  for (int c = 0; c < kTilesOfChunk; ++c) {
    for_fragment([&](int i, int j) { acc[c][i][j] *= static_cast<A>(params.scale); });
  }
  const int first = (kOfKeys ? s.key_begin : s.query_begin) + own;
  store_chunk(acc, params.dtype, kOfKeys ? g.params.dkey : g.params.dquery, s.batch, own_head,
              first, own_end - own, col, params.head_dim);
  if (kOfKeys) {
    store_chunk(dvalue, params.dtype, g.params.dvalue, s.batch, own_head, first, own_end - own, col,
                params.value_dim);
  }
}

// A block has a tile of the mask and sums what its elements serve, in order.
template <typename A>
__device__ __forceinline__ void mask_gradient(const AttentionGradient& g, Shared<A>& shared,
                                              const Place& place) {
  Fragment<A> acc = {};
  for_served<kTile, kTile>(
      g, place, [&](const Sequence& s, int head, int query, const Range& keys) {
        const Head<A> h(g.params.forward, g.params.dout, s, head, {0, s.queries}, {0, s.keys});
        for (int key = keys.begin / kTile * kTile; key < keys.end; key += kTile) {
          Fragment<A> probability, gradient;
          differentiate<A, true>(probability, gradient, shared, g, h, s, head, query, key);
          for_fragment([&](int i, int j) { acc[i][j] += gradient[i][j]; });
        }
      });
  shared.store_scores(acc);
  __syncthreads();
  store_mask_tile<kTile, kTile>(g, place, shared.scores[0], kTile + 1);
}

// `parts`: chunks of columns, or of a mask tiles of its queries.
enum class Of { kQueries, kKeys, kMask };
template <typename A>
__global__ void __launch_bounds__(kThreads, kBlocks<A>)
    attention_plain_gradient(const __grid_constant__ AttentionGradient g, int tiles, int parts,
                             Of of) {
  extern __shared__ char memory[];
  Shared<A>& shared = *reinterpret_cast<Shared<A>*>(memory);
  const auto run = [&](auto of_keys) {
    for_tiles<kTile, of_keys.value>(
        g.params.forward, tiles, parts, [&](const Sequence& s, int head, int row, int part) {
          gradient_tile<A, of_keys.value>(g, shared, s, head, row, part * kChunk);
        });
  };
  if (of == Of::kMask)
    return mask_gradient(g, shared, place_of(tiles, parts, g.params.mask_shape[1]));
  of == Of::kKeys ? run(std::true_type()) : run(std::false_type());
}

}  // namespace
}  // namespace plain

cudaError_t attention_backward_plain(const AttentionGradient& g, cudaStream_t stream) {
  using namespace plain;
  const AttentionParams& params = g.params.forward;
  const int* mask = g.params.mask_shape;
  return with_accumulator(params.dtype, [&](auto a) {
    using A = decltype(a);
    const auto launch = [&](Of of, int tiles, int parts, int heads, int batch) {
      return launch_tiles(attention_plain_gradient<A>, g, tiles, parts, heads, batch, kThreads,
                          sizeof(Shared<A>), stream, of);
    };
    cudaError_t error = cudaSuccess;
    if (g.params.dquery.data != nullptr) {
      error = launch(Of::kQueries, tiles_of(params.queries, kTile),
                     tiles_of(params.head_dim, kChunk), params.heads, sequences_of(params));
    }
    if (error == cudaSuccess && (g.params.dkey.data || g.params.dvalue.data)) {
      error = launch(Of::kKeys, tiles_of(params.keys, kTile),
                     tiles_of(std::max(params.head_dim, params.value_dim), kChunk), params.kv_heads,
                     sequences_of(params));
    }
    if (error == cudaSuccess && g.params.dmask != nullptr) {
      error = launch(Of::kMask, tiles_of(mask[3], kTile), tiles_of(mask[2], kTile), mask[1],
                     mask[0] * g.share.parts);
    }
    return error;
  });
}

}  // namespace fused_norm
