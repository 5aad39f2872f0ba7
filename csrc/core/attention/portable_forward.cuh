// The portable tier's forward kernel (Dao, 2023): a block has a tile of queries and walks the keys
// that they see, from the first to the last, with an online softmax.
#pragma once

#include "core/attention/portable_options.cuh"

namespace fused_norm {
namespace portable {

// A warp has 16 kM queries, against kKeys keys at a time.
template <typename T_, int kDim_, int kWarps_, int kM_, int kKeys_, bool kGeneral_>
struct ForwardShape {
  using T = T_;
  static constexpr int kDim = kDim_, kWarps = kWarps_, kM = kM_, kKeys = kKeys_;
  static constexpr AttentionTiles kTiles{kDim, kWarps, kM, kKeys, 1};
  static constexpr int kThreads = kTiles.threads(), kQueries = kTiles.own();
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kSharedBytes = forward_shared_bytes(kTiles);

  using Scores = mma::Accumulators<kM, kKeys / 8>;
  using Out = mma::Accumulators<kM, kDim / 8>;
};

// Of a thread's 2 kM rows: row r is 8 r + lane / 4 of the warp's.
template <int kM>
struct RowStatistics {
  // The exponents' reference, a maximum of scores seen, and this thread's part of the sum.
  float max[2 * kM], sum[2 * kM];
};

// Turns scores into probabilities relative to the rows' references. A reference moves only when
// the maximum has grown by 2^8, so that most tiles leave the output as it is; a row's references
// depend on the row alone. `unit`: scores times it are exponents of 2.
template <typename S>
__device__ __forceinline__ void advance_softmax(typename S::Scores& scores,
                                                RowStatistics<S::kM>& rows, typename S::Out& out,
                                                float unit) {
  const float slack = 8 / unit;
  bool moves = false;
  float rescale[2 * S::kM];
#pragma unroll
  for (int r = 0; r < 2 * S::kM; ++r) {
    float max = -INFINITY;
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
      max = fmaxf(max, fmaxf(scores[r / 2][n][r % 2 * 2], scores[r / 2][n][r % 2 * 2 + 1]));
    }
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
    rescale[r] = 1;
    if (max > rows.max[r] + slack) {
      rescale[r] = exp2_fast((rows.max[r] - max) * unit);
      rows.max[r] = max;
      moves = true;
    }
    const float shift = rows.max[r] == -INFINITY ? 0 : rows.max[r] * unit;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[r / 2][n][r % 2 * 2 + e];
        score = exp2_fast(fmaf(score, unit, -shift));
        sum += score;
      }
    }
    rows.sum[r] = rows.sum[r] * rescale[r] + sum;
  }
  if (!__any_sync(0xffffffffu, moves)) return;
#pragma unroll
  for (int m = 0; m < S::kM; ++m) {
#pragma unroll
    for (int n = 0; n < S::kDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[m][n][e] *= rescale[m * 2 + e / 2];
    }
  }
}

// Divides by the sums, sink included, and writes the log-sum-exp.
template <typename S>
__device__ __forceinline__ void finish_rows(const AttentionParams& params, const Sequence& s,
                                            int head, int query, RowStatistics<S::kM>& rows,
                                            typename S::Out& out, float unit) {
  const float sink = read_sink<float>(params, head) * kLog2E;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2 * S::kM; ++r) {
    float sum = rows.sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float max = rows.max[r] == -INFINITY ? -INFINITY : rows.max[r] * unit;
    const float last_max = fmaxf(max, sink);
    float scale = 1;
    if (sink != -INFINITY) {
      scale = exp2_fast(max - last_max);
      sum = sum * scale + exp2_fast(sink - last_max);
    }
    const float factor = sum == 0 ? 0 : scale / sum;
#pragma unroll
    for (int n = 0; n < S::kDim / 8; ++n) {
      out[r / 2][n][r % 2 * 2] *= factor;
      out[r / 2][n][r % 2 * 2 + 1] *= factor;
    }
    const int row = query + r * 8 + lane / 4;
    if (lane % 4 == 0 && row < s.queries) {
      static_cast<float*>(params.lse)[first_lse(params, s, head) + row] =
          sum == 0 ? -INFINITY : (last_max + log2f(sum)) * kLn2;
    }
  }
}

// One tile of queries. With `clean`, keys that no query of the tile gives weight to have their
// values set to zero before they are multiplied. Returns whether the thread's output has a NaN.
template <typename S>
__device__ __forceinline__ bool forward_tile(const AttentionParams& params, char* shared,
                                             const Sequence& s, int head, int query, bool clean) {
  using T = typename S::T;
  constexpr int kDim = S::kDim, kKeys = S::kKeys, kThreads = S::kThreads;
  const int kv_head = head / (params.heads / params.kv_heads);
  const int warp_row = threadIdx.x / 32 * S::kM * 16;
  const Band band = band_of(params, s);
  const int query_end = min(query + S::kQueries, s.queries);
  const Range range = band.keys_of(query, query_end, s.keys);
  const ScoreRules<float> rules(params, s, head);
  float unit = static_cast<float>(params.scale) * kLog2E;
  const T* keys = head_of<T>(params.key, s, kv_head, s.key_begin);
  const T* values = head_of<T>(params.value, s, kv_head, s.key_begin);

  const uint32_t query_tile = mma::shared_address(shared);
  const uint32_t key_tile = query_tile + S::kQueries * kDim * 2;
  const uint32_t value_tile = key_tile + kKeys * kDim * 2;
  const auto query_rows = mma::left_rows<kDim>(query_tile, warp_row);
  const auto key_rows = mma::right_rows<kDim>(key_tile);
  const auto value_rows = mma::left_rows<kDim>(value_tile, 0);
  const auto copy_keys = [&](int key) {
    copy_rows<T, kDim, kKeys, kThreads>(key_tile, keys, params.key.row_stride, key, range,
                                        params.head_dim);
    mma::commit_copies();
  };

  typename S::Out out;
  RowStatistics<S::kM> rows;
  mma::clear<S::kM, kDim / 8>(out);
#pragma unroll
  for (int r = 0; r < 2 * S::kM; ++r) rows.max[r] = -INFINITY, rows.sum[r] = 0;
  int key = range.begin / kKeys * kKeys;
  copy_rows<T, kDim, S::kQueries, kThreads>(
      query_tile, head_of<T>(params.query, s, head, s.query_begin), params.query.row_stride, query,
      {query, query_end}, params.head_dim);
  copy_keys(key);
  for (; key < range.end; key += kKeys) {
    mma::wait_copies<0>();
    __syncthreads();
    copy_rows<T, kDim, kKeys, kThreads>(value_tile, values, params.value.row_stride, key, range,
                                        params.value_dim);
    mma::commit_copies();
    typename S::Scores scores;
    mma::multiply_rows<T, kDim, S::kM, kKeys / 8>(scores, query_rows, key_rows);
    __syncthreads();
    const bool is_last = key + kKeys >= range.end;
    if (!is_last) copy_keys(key + kKeys);
    if constexpr (S::kGeneral) {
      prefetch_mask<S::kQueries, kThreads>(rules, query, s.queries, key + kKeys, s.keys);
    }

    const TilePlace<false> place(s, query + warp_row, key);
    if constexpr (S::kGeneral) {
      unit = apply_options<T, false, S::kM, kKeys / 8>(scores, nullptr, rules, place);
    }
    if (key + kKeys > s.keys || !band.sees_all(query, query_end, key, key + kKeys)) {
      hide_outside<false, S::kM, kKeys / 8>(scores, band, place);
    }
    advance_softmax<S>(scores, rows, out, unit);
    if constexpr (S::kGeneral) {
      if (rules.drops()) {
        KeptElements<false, S::kM, kKeys / 8> kept;
        kept.draw(rules.dropout(), place);
        kept.apply(scores);
      }
    }
    if (is_last) {
      mma::wait_copies<0>();
    } else {
      mma::wait_copies<1>();
    }
    __syncthreads();
    if (S::kGeneral && clean) {
      clear_unseen_rows<kDim, kKeys, kThreads, S::kM>(shared + (value_tile - query_tile), scores);
    }
    mma::multiply_weights<T, kDim, S::kM, kKeys / 8, kDim / 8>(out, scores, value_rows);
  }
  mma::wait_copies<0>();
  finish_rows<S>(params, s, head, query + warp_row, rows, out, unit);

  const bool has_nan = S::kGeneral && mma::has_nan<S::kM, kDim / 8>(out);
  // All have read the queries; the output takes their place.
  __syncthreads();
  round_to_tile<T, kDim, S::kM, kDim / 8>(shared, out, warp_row);
  __syncthreads();
  store_rows<T, kDim, S::kQueries, kThreads>(
      shared, const_cast<T*>(head_of<T>(params.out, s, head, s.query_begin)), params.out.row_stride,
      query, query_end, params.value_dim);
  return has_nan;
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kThreads == 128 ? 2 : 1)
    attention_portable_forward(const __grid_constant__ AttentionParams params, int tiles) {
  extern __shared__ __align__(1024) char shared[];
  run_query_tiles<S::kQueries, S::kGeneral>(
      params, tiles, [&](const Sequence& s, int head, int query, bool clean) {
        return forward_tile<S>(params, shared, s, head, query, clean);
      });
}

}  // namespace portable
}  // namespace fused_norm
