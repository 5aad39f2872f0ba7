// The portable tier's backward kernels. A block has a tile of queries, for dquery, or of keys, for
// dkey and dvalue, and walks what the tile sees in a fixed order: no block adds to another's
// result. Both make the scores again, and the weights of the second product of a pair never leave
// registers: the accumulators of the first have the layout of its left factor.
#pragma once

#include "core/attention/portable_options.cuh"

namespace fused_norm {
namespace portable {

// A warp has 16 kM rows of the block's own tile, against kOthers rows of the other side at a time,
// in kStages tiles of shared memory: with two, the next is copied while one is worked on.
template <typename T_, int kDim_, int kWarps_, int kM_, int kOthers_, int kStages_, bool kGeneral_>
struct BackwardShape {
  using T = T_;
  static constexpr int kDim = kDim_, kWarps = kWarps_, kM = kM_, kOthers = kOthers_;
  static constexpr int kStages = kStages_;
  static constexpr AttentionTiles kTiles{kDim, kWarps, kM, kOthers, kStages};
  static constexpr int kThreads = kTiles.threads(), kOwn = kTiles.own();
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kOwnBytes = kOwn * kDim * 2, kOtherBytes = kOthers * kDim * 2;
  static constexpr int kSharedBytes = backward_shared_bytes(kTiles);

  using Scores = mma::Accumulators<kM, kOthers / 8>;
  using Gradient = mma::Accumulators<kM, kDim / 8>;
};

// Exponents and delta of a warp's rows.
template <int kM>
struct RowStatistic {
  float of_row[2 * kM];
  __device__ __forceinline__ float at(int m, int, int e) const { return of_row[m * 2 + e / 2]; }
};
template <int kM>
class RowsStatistics {
 public:
  // Of the warp's queries from `query` on.
  __device__ __forceinline__ RowsStatistics(const AttentionGradient& g, const Sequence& s, int head,
                                            int query) {
    const int64_t first = first_lse(g.params.forward, s, head);
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int row = query + r * 8 + threadIdx.x % 32 / 4;
      const bool inside = row < s.queries;
      exponents_.of_row[r] =
          inside ? static_cast<const float*>(g.exponents)[first + row] : INFINITY;
      delta_.of_row[r] = inside ? static_cast<const float*>(g.delta)[first + row] : 0;
    }
  }
  __device__ __forceinline__ const RowStatistic<kM>& exponents() const { return exponents_; }
  __device__ __forceinline__ const RowStatistic<kM>& delta() const { return delta_; }

 private:
  RowStatistic<kM> exponents_, delta_;
};

// Exponents and delta of a tile's columns: kN * 8 of each in shared memory.
template <int kN>
struct ColumnStatistic {
  float2 of_columns[kN];
  __device__ __forceinline__ float at(int, int n, int e) const {
    return e % 2 ? of_columns[n].y : of_columns[n].x;
  }
};
template <int kN>
struct ColumnsStatistics {
  const float* first;  // of this thread's columns

  __device__ __forceinline__ ColumnStatistic<kN> load(int from) const {
    ColumnStatistic<kN> to;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      to.of_columns[n] = *reinterpret_cast<const float2*>(first + from + n * 8);
    }
    return to;
  }
  __device__ __forceinline__ ColumnStatistic<kN> exponents() const { return load(0); }
  __device__ __forceinline__ ColumnStatistic<kN> delta() const { return load(kN * 8); }
};

// Turns query . key into probabilities, and the product of dout and value, which `multiply_values`
// makes, into the derivative by query . key * scale (kBySoftcapped: by the score that the mask is
// added to). Probabilities have their dropout on return. `unit`: scores times it are exponents.
template <typename S, bool kTransposed, bool kBySoftcapped = false, typename Statistics,
          typename MultiplyValues>
__device__ __forceinline__ void differentiate(typename S::Scores& scores,
                                              typename S::Scores& gradient,
                                              const ScoreRules<float>& rules, const Band& band,
                                              const TilePlace<kTransposed>& place, bool all_is_seen,
                                              float unit, const Statistics& statistics,
                                              MultiplyValues multiply_values) {
  constexpr int kM = S::kM, kN = S::kOthers / 8;
  const auto exponentiate = [&] {
    if (!all_is_seen) hide_outside<kTransposed, kM, kN>(scores, band, place);
    const auto exponents = statistics.exponents();
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
      scores[m][n][e] = exp2_fast(fmaf(scores[m][n][e], unit, -exponents.at(m, n, e)));
    });
  };
  const auto subtract_delta = [&] {
    const auto delta = statistics.delta();
    mma::for_elements<kM, kN>(
        [&](int m, int n, int e, int, int) { gradient[m][n][e] -= delta.at(m, n, e); });
  };
  if constexpr (!S::kGeneral) {
    // The exponentials can run beside the products.
    exponentiate();
    multiply_values();
    subtract_delta();
    mma::for_elements<kM, kN>(
        [&](int m, int n, int e, int, int) { gradient[m][n][e] *= scores[m][n][e]; });
  } else {
    multiply_values();
    KeptElements<kTransposed, kM, kN> kept;
    if (rules.drops()) {
      kept.draw(rules.dropout(), place);
      kept.apply(gradient);
    }
    subtract_delta();
    unit = apply_options<typename S::T, kTransposed, kM, kN>(
        scores, kBySoftcapped ? nullptr : gradient, rules, place);
    exponentiate();
    // Hidden keys may hold a NaN.
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
      const float p = scores[m][n][e];
      gradient[m][n][e] = p == 0 ? 0 : p * gradient[m][n][e];
    });
    if (rules.drops()) kept.apply(scores);
  }
}

// Multiplies by the scale and writes a tile's rows through shared memory that is free.
template <typename S>
__device__ __forceinline__ void store_gradient(const AttentionTensor& tensor, const Sequence& s,
                                               int head, int first, char* tile,
                                               typename S::Gradient& acc, float scale, int row,
                                               int end, int cols) {
  using T = typename S::T;
  constexpr int kDim = S::kDim;
  mma::for_elements<S::kM, kDim / 8>([&](int m, int n, int e, int, int) { acc[m][n][e] *= scale; });
  __syncthreads();
  round_to_tile<T, kDim, S::kM, kDim / 8>(tile, acc, threadIdx.x / 32 * S::kM * 16);
  __syncthreads();
  store_rows<T, kDim, S::kOwn, S::kThreads>(tile, row_of<T>(tensor, s.batch, head, first),
                                            tensor.row_stride, row, end, cols);
}

// A block's own tile: rows [row, row + kOwn) of two tensors, those outside `valid` zeros.
template <typename S>
__device__ __forceinline__ void copy_own(const AttentionGradient& g, char* shared,
                                         const Sequence& s, const AttentionTensor& first,
                                         const AttentionTensor& second, int head, int begin,
                                         int row, const Range& valid) {
  using T = typename S::T;
  const uint32_t to = mma::shared_address(shared);
  copy_rows<T, S::kDim, S::kOwn, S::kThreads>(to, head_of<T>(first, s, head, begin),
                                              first.row_stride, row, valid,
                                              g.params.forward.head_dim);
  copy_rows<T, S::kDim, S::kOwn, S::kThreads>(to + S::kOwnBytes, head_of<T>(second, s, head, begin),
                                              second.row_stride, row, valid,
                                              g.params.forward.value_dim);
  mma::commit_copies();
}

// Walks the tiles of the other side in `range` against the own one: queries against keys, or
// kTransposed keys against the queries of one head. use(probabilities, gradient, tile, address)
// gets each tile's scores differentiated, and where the other side's rows are, two tensors one
// behind the other. `statistics(stage)` are the queries'. Without `of_scores` there is no gradient.
template <typename S, bool kTransposed, bool kBySoftcapped, typename Statistics, typename Use>
__device__ __forceinline__ void walk(const AttentionGradient& g, char* shared, const Sequence& s,
                                     int head, int own, const Range& range, bool of_scores,
                                     Statistics statistics, Use use) {
  using T = typename S::T;
  constexpr int kDim = S::kDim, kOthers = S::kOthers, kThreads = S::kThreads, kM = S::kM;
  const AttentionParams& params = g.params.forward;
  const int other_head = kTransposed ? head : head / (params.heads / params.kv_heads);
  const int begin = kTransposed ? s.query_begin : s.key_begin;
  const int warp_row = threadIdx.x / 32 * kM * 16;
  const Band band = band_of(params, s);
  const ScoreRules<float> rules(params, s, head);
  const float unit = static_cast<float>(params.scale) * kLog2E;
  const AttentionTensor& first_tensor = kTransposed ? params.query : params.key;
  const AttentionTensor& second_tensor = kTransposed ? g.params.dout : params.value;
  const T* first = head_of<T>(first_tensor, s, other_head, begin);
  const T* second = head_of<T>(second_tensor, s, other_head, begin);
  const int64_t lse = first_lse(params, s, head);
  const uint32_t own_tile = mma::shared_address(shared);
  const uint32_t other_tiles = own_tile + 2 * S::kOwnBytes;
  const auto own_rows = mma::left_rows<kDim>(own_tile, warp_row);
  const auto copy_pair = [&](int row, int stage) {
    const uint32_t to = other_tiles + stage * 2 * S::kOtherBytes;
    copy_rows<T, kDim, kOthers, kThreads>(to, first, first_tensor.row_stride, row, range,
                                          params.head_dim);
    copy_rows<T, kDim, kOthers, kThreads>(to + S::kOtherBytes, second, second_tensor.row_stride,
                                          row, range, params.value_dim);
    if (kTransposed && threadIdx.x < 2 * kOthers) {
      const int query = row + threadIdx.x % kOthers;
      const float* from = static_cast<const float*>(threadIdx.x < kOthers ? g.exponents : g.delta);
      mma::copy_async_word(
          other_tiles + S::kStages * 2 * S::kOtherBytes + (stage * 2 * kOthers + threadIdx.x) * 4,
          from + lse + query, query < s.queries);
    }
    mma::commit_copies();
  };

  int other = range.begin / kOthers * kOthers, stage = 0;
  __syncthreads();  // what was before is done with the tiles
  copy_pair(other, 0);
  for (; other < range.end; other += kOthers) {
    mma::wait_copies<0>();
    __syncthreads();
    if (S::kStages == 2 && other + kOthers < range.end) copy_pair(other + kOthers, stage ^ 1);
    const int query = kTransposed ? other : own, key = kTransposed ? own : other;
    if constexpr (S::kGeneral) {
      prefetch_mask<kTransposed ? kOthers : S::kOwn, kThreads>(
          rules, kTransposed ? query + kOthers : query, s.queries,
          kTransposed ? key : key + kOthers, s.keys);
    }
    const uint32_t tile = other_tiles + stage * 2 * S::kOtherBytes;
    const auto other_rows = mma::right_rows<kDim>(tile);
    typename S::Scores scores, gradient;
    mma::multiply_rows<T, kDim, kM, kOthers / 8>(scores, own_rows, other_rows);
    const int query_end = kTransposed ? query + kOthers : min(query + S::kOwn, s.queries);
    const int key_end = key + (kTransposed ? S::kOwn : kOthers);
    const bool all_is_seen = key_end <= s.keys && query_end <= s.queries &&
                             band.sees_all(query, query_end, key, key_end);
    const TilePlace<kTransposed> place(s, kTransposed ? query : query + warp_row,
                                       kTransposed ? key + warp_row : key);
    differentiate<S, kTransposed, kBySoftcapped>(
        scores, gradient, rules, band, place, all_is_seen, unit, statistics(stage), [&] {
          if (of_scores) {
            mma::multiply_rows<T, kDim, kM, kOthers / 8>(gradient, own_rows.further(S::kOwnBytes),
                                                         other_rows.further(S::kOtherBytes));
          } else {
            mma::clear<kM, kOthers / 8>(gradient);
          }
        });
    use(scores, gradient, shared + (tile - own_tile), tile);
    if constexpr (S::kStages == 2) {
      stage ^= 1;
    } else if (other + kOthers < range.end) {
      __syncthreads();
      copy_pair(other + kOthers, 0);
    }
  }
  mma::wait_copies<0>();
}

// One tile of queries. `clean` is forward_tile's; so is what it returns.
template <typename S>
__device__ __forceinline__ bool query_gradient_tile(const AttentionGradient& g, char* shared,
                                                    const Sequence& s, int head, int query,
                                                    bool clean) {
  using T = typename S::T;
  constexpr int kDim = S::kDim, kM = S::kM, kN = S::kOthers / 8;
  const AttentionParams& params = g.params.forward;
  const int query_end = min(query + S::kOwn, s.queries);
  copy_own<S>(g, shared, s, params.query, g.params.dout, head, s.query_begin, query,
              {query, query_end});
  const RowsStatistics<kM> statistics(g, s, head, query + threadIdx.x / 32 * kM * 16);
  typename S::Gradient acc;
  mma::clear<kM, kDim / 8>(acc);
  walk<S, false, false>(
      g, shared, s, head, query, band_of(params, s).keys_of(query, query_end, s.keys), true,
      [&](int) -> const RowsStatistics<kM>& { return statistics; },
      [&](const auto&, const auto& gradient, char* keys, uint32_t tile) {
        if (S::kGeneral && clean) {
          __syncthreads();
          clear_unseen_rows<kDim, S::kOthers, S::kThreads, kM>(keys, gradient);
        }
        mma::multiply_weights<T, kDim, kM, kN, kDim / 8>(acc, gradient,
                                                         mma::left_rows<kDim>(tile, 0));
      });
  const bool has_nan = S::kGeneral && mma::has_nan<kM, kDim / 8>(acc);
  store_gradient<S>(g.params.dquery, s, head, s.query_begin, shared, acc,
                    static_cast<float>(params.scale), query, query_end, params.head_dim);
  return has_nan;
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kThreads == 128 ? 2 : 1)
    attention_portable_query_gradient(const __grid_constant__ AttentionGradient g, int tiles) {
  extern __shared__ __align__(1024) char shared[];
  run_query_tiles<S::kOwn, S::kGeneral>(
      g.params.forward, tiles, [&](const Sequence& s, int head, int query, bool clean) {
        return query_gradient_tile<S>(g, shared, s, head, query, clean);
      });
}

// One tile of keys, for the heads of its group in order. Not kBoth: `of_key` says which gradient.
template <typename S, bool kBoth>
__device__ __forceinline__ void key_gradient_tile(const AttentionGradient& g, char* shared,
                                                  const Sequence& s, int kv_head, int key,
                                                  bool of_key) {
  using T = typename S::T;
  constexpr int kDim = S::kDim, kM = S::kM, kN = S::kOthers / 8;
  const AttentionParams& params = g.params.forward;
  const Band band = band_of(params, s);
  const int key_end = min(key + S::kOwn, s.keys), group = params.heads / params.kv_heads;
  const Range range = band.queries_of(key, key_end, s.queries);
  // Keys that no query of the call sees are zeros: they may hold a NaN.
  const Range seen = band.keys_of(0, s.queries, s.keys);
  copy_own<S>(g, shared, s, params.key, params.value, kv_head, s.key_begin, key,
              {max(key, seen.begin), min(key_end, seen.end)});
  const float* of_queries =
      reinterpret_cast<const float*>(shared + 2 * S::kOwnBytes + S::kStages * 2 * S::kOtherBytes) +
      threadIdx.x % 4 * 2;
  typename S::Gradient dkey, dvalue;
  mma::clear<kM, kDim / 8>(dkey);
  mma::clear<kM, kDim / 8>(dvalue);
  for (int head = kv_head * group; head < (kv_head + 1) * group && range.begin < range.end;
       ++head) {
    walk<S, true, false>(
        g, shared, s, head, key, range, kBoth || of_key,
        [&](int stage) { return ColumnsStatistics<kN>{of_queries + stage * 2 * S::kOthers}; },
        [&](const auto& weights, const auto& gradient, char*, uint32_t tile) {
          const auto rows = mma::left_rows<kDim>(tile, 0);
          if (kBoth || !of_key) {
            mma::multiply_weights<T, kDim, kM, kN, kDim / 8>(dvalue, weights,
                                                             rows.further(S::kOtherBytes));
          }
          if (kBoth || of_key) {
            mma::multiply_weights<T, kDim, kM, kN, kDim / 8>(kBoth ? dkey : dvalue, gradient, rows);
          }
        });
  }
  mma::wait_copies<0>();
  const float scale = static_cast<float>(params.scale);
  if ((kBoth || of_key) && g.params.dkey.data != nullptr) {
    store_gradient<S>(g.params.dkey, s, kv_head, s.key_begin, shared, kBoth ? dkey : dvalue, scale,
                      key, key_end, params.head_dim);
  }
  if ((kBoth || !of_key) && g.params.dvalue.data != nullptr) {
    store_gradient<S>(g.params.dvalue, s, kv_head, s.key_begin, shared, dvalue, 1, key, key_end,
                      params.value_dim);
  }
}

// kBoth: a block makes both gradients of its keys; else one, and tiles count twice.
template <typename S, bool kBoth>
__global__ void __launch_bounds__(S::kThreads, S::kThreads == 128 ? 2 : 1)
    attention_portable_key_gradient(const __grid_constant__ AttentionGradient g, int tiles) {
  extern __shared__ __align__(1024) char shared[];
  const AttentionParams& params = g.params.forward;
  const Place place = place_of(tiles, params.kv_heads);
  const Sequence s = sequence_of(params, place.batch);
  constexpr int kParts = kBoth ? 1 : 2;
  const int all = (s.keys + S::kOwn - 1) / S::kOwn * kParts;
  for (int tile = place.tile; tile < all; tile += tiles) {
    key_gradient_tile<S, kBoth>(g, shared, s, place.head, tile / kParts * S::kOwn, tile % kParts);
    __syncthreads();
  }
}

}  // namespace portable
}  // namespace fused_norm
