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
      scores[m][n][e] = mma::exp2_of(fmaf(scores[m][n][e], unit, -exponents.at(m, n, e)));
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

// One tile of queries. `clean` is forward_tile's; so is what it returns.
template <typename S>
__device__ __forceinline__ bool query_gradient_tile(const AttentionGradient& g, char* shared,
                                                    const Sequence& s, int head, int query,
                                                    bool clean) {
  using T = typename S::T;
  constexpr int kDim = S::kDim, kKeys = S::kOthers, kThreads = S::kThreads, kM = S::kM;
  const AttentionParams& params = g.params.forward;
  const int kv_head = head / (params.heads / params.kv_heads);
  const int warp_row = threadIdx.x / 32 * kM * 16;
  const Band band = band_of(params, s);
  const int query_end = min(query + S::kOwn, s.queries);
  const Range range = band.keys_of(query, query_end, s.keys);
  const ScoreRules<float> rules(params, s, head);
  const float unit = static_cast<float>(params.scale) * kLog2E;
  const T* keys = head_of<T>(params.key, s, kv_head, s.key_begin);
  const T* values = head_of<T>(params.value, s, kv_head, s.key_begin);

  const uint32_t query_tile = mma::shared_address(shared), dout_tile = query_tile + S::kOwnBytes;
  const uint32_t other_tiles = dout_tile + S::kOwnBytes;
  const auto query_rows = mma::left_rows<kDim>(query_tile, warp_row);
  const auto dout_rows = query_rows.further(S::kOwnBytes);
  const auto copy_pair = [&](int key, int stage) {
    const uint32_t to = other_tiles + stage * 2 * S::kOtherBytes;
    copy_rows<T, kDim, kKeys, kThreads>(to, keys, params.key.row_stride, key, range,
                                        params.head_dim);
    copy_rows<T, kDim, kKeys, kThreads>(to + S::kOtherBytes, values, params.value.row_stride, key,
                                        range, params.value_dim);
    mma::commit_copies();
  };

  const Range own{query, query_end};
  copy_rows<T, kDim, S::kOwn, kThreads>(query_tile,
                                        head_of<T>(params.query, s, head, s.query_begin),
                                        params.query.row_stride, query, own, params.head_dim);
  copy_rows<T, kDim, S::kOwn, kThreads>(dout_tile,
                                        head_of<T>(g.params.dout, s, head, s.query_begin),
                                        g.params.dout.row_stride, query, own, params.value_dim);
  int key = range.begin / kKeys * kKeys, stage = 0;
  copy_pair(key, 0);
  const RowsStatistics<kM> statistics(g, s, head, query + warp_row);

  typename S::Gradient acc;
  mma::clear<kM, kDim / 8>(acc);
  for (; key < range.end; key += kKeys) {
    mma::wait_copies<0>();
    __syncthreads();
    if (S::kStages == 2 && key + kKeys < range.end) copy_pair(key + kKeys, stage ^ 1);
    if constexpr (S::kGeneral) {
      prefetch_mask<S::kOwn, kThreads>(rules, query, s.queries, key + kKeys, s.keys);
    }
    const uint32_t key_tile = other_tiles + stage * 2 * S::kOtherBytes;
    const auto key_rows = mma::right_rows<kDim>(key_tile);
    typename S::Scores scores, gradient;
    mma::multiply_rows<T, kDim, kM, kKeys / 8>(scores, query_rows, key_rows);
    const bool all_is_seen =
        key + kKeys <= s.keys && band.sees_all(query, query_end, key, key + kKeys);
    differentiate<S, false>(scores, gradient, rules, band,
                            TilePlace<false>(s, query + warp_row, key), all_is_seen, unit,
                            statistics, [&] {
                              mma::multiply_rows<T, kDim, kM, kKeys / 8>(
                                  gradient, dout_rows, key_rows.further(S::kOtherBytes));
                            });
    if (S::kGeneral && clean) {
      __syncthreads();
      clear_unseen_rows<kDim, kKeys, kThreads, kM>(shared + (key_tile - query_tile), gradient);
    }
    mma::multiply_weights<T, kDim, kM, kKeys / 8, kDim / 8>(acc, gradient,
                                                            mma::left_rows<kDim>(key_tile, 0));
    if constexpr (S::kStages == 2) {
      stage ^= 1;
    } else if (key + kKeys < range.end) {
      __syncthreads();
      copy_pair(key + kKeys, 0);
    }
  }
  mma::wait_copies<0>();
  bool has_nan = false;
  if constexpr (S::kGeneral) {
    mma::for_elements<kM, kDim / 8>(
        [&](int m, int n, int e, int, int) { has_nan |= acc[m][n][e] != acc[m][n][e]; });
  }
  store_gradient<S>(g.params.dquery, s, head, s.query_begin, shared, acc,
                    static_cast<float>(params.scale), query, query_end, params.head_dim);
  return has_nan;
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kThreads == 128 ? 2 : 1)
    attention_portable_query_gradient(const __grid_constant__ AttentionGradient g, int tiles) {
  extern __shared__ __align__(1024) char shared[];
  const AttentionParams& params = g.params.forward;
  const Place place = place_of(tiles, params.heads);
  const Sequence s = sequence_of(params, place.batch);
  const int all = (s.queries + S::kOwn - 1) / S::kOwn;
  for (int tile = tiles - 1 - place.tile; tile < all; tile += tiles) {
    bool clean = false;
    while (true) {
      const bool has_nan = query_gradient_tile<S>(g, shared, s, place.head, tile * S::kOwn, clean);
      const bool again = S::kGeneral && !clean && params.mask.data != nullptr;
      if (!__syncthreads_or(again && has_nan)) break;
      clean = true;
    }
  }
}

// The queries of one head that see a tile of keys.
template <typename S, bool kBoth>
__device__ __forceinline__ void add_head(const AttentionGradient& g, char* shared,
                                         const Sequence& s, int head, int key, const Range& range,
                                         const Band& band, bool of_key, typename S::Gradient& dkey,
                                         typename S::Gradient& dvalue) {
  using T = typename S::T;
  constexpr int kDim = S::kDim, kQueries = S::kOthers, kThreads = S::kThreads, kM = S::kM;
  constexpr int kRowBytes = kQueries * static_cast<int>(sizeof(float));
  const AttentionParams& params = g.params.forward;
  const int warp_row = threadIdx.x / 32 * kM * 16, column = threadIdx.x % 4 * 2;
  const ScoreRules<float> rules(params, s, head);
  const float unit = static_cast<float>(params.scale) * kLog2E;
  const T* queries = head_of<T>(params.query, s, head, s.query_begin);
  const T* douts = head_of<T>(g.params.dout, s, head, s.query_begin);
  const int64_t first = first_lse(params, s, head);
  const uint32_t key_tile = mma::shared_address(shared);
  const uint32_t other_tiles = key_tile + 2 * S::kOwnBytes;
  const uint32_t statistics = other_tiles + S::kStages * 2 * S::kOtherBytes;
  const auto key_rows = mma::left_rows<kDim>(key_tile, warp_row);
  const auto value_rows = key_rows.further(S::kOwnBytes);
  const auto copy_pair = [&](int query, int stage) {
    const uint32_t to = other_tiles + stage * 2 * S::kOtherBytes;
    copy_rows<T, kDim, kQueries, kThreads>(to, queries, params.query.row_stride, query, range,
                                           params.head_dim);
    copy_rows<T, kDim, kQueries, kThreads>(to + S::kOtherBytes, douts, g.params.dout.row_stride,
                                           query, range, params.value_dim);
    if (threadIdx.x < 2 * kQueries) {
      const int row = query + threadIdx.x % kQueries;
      const float* from = static_cast<const float*>(threadIdx.x < kQueries ? g.exponents : g.delta);
      mma::copy_async_word(statistics + stage * 2 * kRowBytes + threadIdx.x * 4, from + first + row,
                           row < s.queries);
    }
    mma::commit_copies();
  };

  int query = range.begin / kQueries * kQueries, stage = 0;
  __syncthreads();  // the head before is done with the tiles
  copy_pair(query, 0);
  for (; query < range.end; query += kQueries) {
    mma::wait_copies<0>();
    __syncthreads();
    if (S::kStages == 2 && query + kQueries < range.end) copy_pair(query + kQueries, stage ^ 1);
    if constexpr (S::kGeneral) {
      prefetch_mask<kQueries, kThreads>(rules, query + kQueries, s.queries, key, s.keys);
    }
    const uint32_t query_tile = other_tiles + stage * 2 * S::kOtherBytes;
    const float* of_columns =
        reinterpret_cast<const float*>(shared + (statistics - key_tile) + stage * 2 * kRowBytes) +
        column;
    const auto query_rows = mma::right_rows<kDim>(query_tile);
    const auto query_columns = mma::left_rows<kDim>(query_tile, 0);
    typename S::Scores scores, gradient;
    mma::multiply_rows<T, kDim, kM, kQueries / 8>(scores, key_rows, query_rows);
    const bool all_is_seen = key + S::kOwn <= s.keys && query + kQueries <= s.queries &&
                             band.sees_all(query, query + kQueries, key, key + S::kOwn);
    differentiate<S, true>(scores, gradient, rules, band, TilePlace<true>(s, query, key + warp_row),
                           all_is_seen, unit, ColumnsStatistics<kQueries / 8>{of_columns}, [&] {
                             if (kBoth || of_key) {
                               mma::multiply_rows<T, kDim, kM, kQueries / 8>(
                                   gradient, value_rows, query_rows.further(S::kOtherBytes));
                             } else {
                               mma::clear<kM, kQueries / 8>(gradient);
                             }
                           });
    if (kBoth || !of_key) {
      mma::multiply_weights<T, kDim, kM, kQueries / 8, kDim / 8>(
          dvalue, scores, query_columns.further(S::kOtherBytes));
    }
    if (kBoth || of_key) {
      mma::multiply_weights<T, kDim, kM, kQueries / 8, kDim / 8>(kBoth ? dkey : dvalue, gradient,
                                                                 query_columns);
    }
    if constexpr (S::kStages == 2) {
      stage ^= 1;
    } else if (query + kQueries < range.end) {
      __syncthreads();
      copy_pair(query + kQueries, 0);
    }
  }
  mma::wait_copies<0>();
}

// One tile of keys, for the heads of its group in order. Not kBoth: `of_key` says which gradient.
template <typename S, bool kBoth>
__device__ __forceinline__ void key_gradient_tile(const AttentionGradient& g, char* shared,
                                                  const Sequence& s, int kv_head, int key,
                                                  bool of_key) {
  using T = typename S::T;
  constexpr int kDim = S::kDim;
  const AttentionParams& params = g.params.forward;
  const Band band = band_of(params, s);
  const int key_end = min(key + S::kOwn, s.keys), group = params.heads / params.kv_heads;
  const Range range = band.queries_of(key, key_end, s.queries);
  // Keys that no query of the call sees are zeros: they may hold a NaN.
  const Range seen = band.keys_of(0, s.queries, s.keys);
  const Range own{max(key, seen.begin), min(key_end, seen.end)};
  const uint32_t key_tile = mma::shared_address(shared);
  copy_rows<T, kDim, S::kOwn, S::kThreads>(key_tile,
                                           head_of<T>(params.key, s, kv_head, s.key_begin),
                                           params.key.row_stride, key, own, params.head_dim);
  copy_rows<T, kDim, S::kOwn, S::kThreads>(key_tile + S::kOwnBytes,
                                           head_of<T>(params.value, s, kv_head, s.key_begin),
                                           params.value.row_stride, key, own, params.value_dim);
  mma::commit_copies();
  typename S::Gradient dkey, dvalue;
  mma::clear<S::kM, kDim / 8>(dkey);
  mma::clear<S::kM, kDim / 8>(dvalue);
  for (int head = kv_head * group; head < (kv_head + 1) * group && range.begin < range.end;
       ++head) {
    add_head<S, kBoth>(g, shared, s, head, key, range, band, of_key, dkey, dvalue);
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
