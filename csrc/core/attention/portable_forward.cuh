// The portable tier's forward kernel (Dao, 2023): a block has a tile of queries and walks the keys
// that they see, from the first to the last, with an online softmax.
#pragma once

#include "core/attention/portable_options.cuh"

namespace fused_norm {
namespace portable {

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
    for (int n = 0; n < S::kN; ++n) {
      max = fmaxf(max, fmaxf(scores[r / 2][n][r % 2 * 2], scores[r / 2][n][r % 2 * 2 + 1]));
    }
    max = quad_max(max);
    rescale[r] = 1;
    if (max > rows.max[r] + slack) {
      rescale[r] = exp2_fast((rows.max[r] - max) * unit);
      rows.max[r] = max;
      moves = true;
    }
    const float shift = rows.max[r] == -INFINITY ? 0 : rows.max[r] * unit;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < S::kN; ++n) {
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
  mma::for_elements<S::kM, S::kDim / 8>(
      [&](int m, int n, int e, int, int) { out[m][n][e] *= rescale[m * 2 + e / 2]; });
}

// Divides by the sums, sink included, and writes the log-sum-exp.
template <typename S>
__device__ __forceinline__ void finish_rows(const AttentionParams& params, const Sequence& s,
                                            int head, int query, RowStatistics<S::kM>& rows,
                                            typename S::Out& out, float unit) {
  const float sink = read_sink<float>(params, s, head) * kLog2E;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2 * S::kM; ++r) {
    float sum = quad_sum(rows.sum[r]);
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
  constexpr int kDim = S::kDim, kKeys = S::kOthers;
  const int kv_head = head / (params.heads / params.kv_heads);
  const int warp_row = threadIdx.x / 32 * S::kM * 16;
  const Band band = band_of(params, s);
  const int query_end = min(query + S::kOwn, s.queries);
  const Range range = band.keys_of(query, query_end, s.keys);
  const ScoreRules<float> rules(params, s, head);
  float unit = static_cast<float>(params.scale) * kLog2E;

  const uint32_t query_tile = shared_address(shared);
  const uint32_t key_tile = query_tile + S::kOwnBytes, value_tile = key_tile + S::kOtherBytes;
  const auto query_rows = mma::left_rows<kDim>(query_tile, warp_row);
  const auto key_rows = mma::right_rows<kDim>(key_tile);
  const auto value_rows = mma::left_rows<kDim>(value_tile, 0);
  const auto copy = [&](const AttentionTensor& tensor, uint32_t tile, int key, int cols) {
    copy_rows<S, kKeys>(tile, row_of<const T>(tensor, s.batch, kv_head, s.key_begin),
                        tensor.row_stride, key, range, cols);
    detail::commit_copies();
  };

  typename S::Out out;
  RowStatistics<S::kM> rows;
  mma::clear(out);
#pragma unroll
  for (int r = 0; r < 2 * S::kM; ++r) rows.max[r] = -INFINITY, rows.sum[r] = 0;
  int key = range.begin / kKeys * kKeys;
  copy_rows<S, S::kOwn>(query_tile, row_of<const T>(params.query, s.batch, head, s.query_begin),
                        params.query.row_stride, query, {query, query_end}, params.head_dim);
  copy(params.key, key_tile, key, params.head_dim);
  for (; key < range.end; key += kKeys) {
    detail::wait_for_copies<0>();
    __syncthreads();
    copy(params.value, value_tile, key, params.value_dim);
    typename S::Scores scores;
    mma::multiply_rows<T>(scores, query_rows, key_rows);
    __syncthreads();
    const bool is_last = key + kKeys >= range.end;
    if (!is_last) copy(params.key, key_tile, key + kKeys, params.head_dim);
    const TilePlace<false> place(s, query, key, warp_row);
    if constexpr (S::kGeneral) {
      prefetch_mask<S::kOwn>(rules, query, s.queries, key + kKeys, s.keys);
      unit = apply_options<T, false, S::kM, S::kN>(scores, nullptr, rules, place);
    }
    if (key + kKeys > s.keys || !band.sees_all(query, query_end, key, key + kKeys)) {
      hide_outside(scores, band, place);
    }
    advance_softmax<S>(scores, rows, out, unit);
    if constexpr (S::kGeneral) {
      DroppedTile<false, S::kM, S::kN> kept;
      kept.draw(rules, place);
      kept.apply(scores);
    }
    if (is_last) {
      detail::wait_for_copies<0>();
    } else {
      detail::wait_for_copies<1>();
    }
    __syncthreads();
    if (S::kGeneral && clean) {
      clear_unseen_rows<S>(shared + (value_tile - query_tile), scores);
    }
    mma::multiply_weights<T>(out, scores, value_rows);
  }
  detail::wait_for_copies<0>();
  finish_rows<S>(params, s, head, query + warp_row, rows, out, unit);
  const bool has_nan = S::kGeneral && mma::has_nan(out);
  // The output takes the queries' place.
  store_tile<S>(params.out, s, head, s.query_begin, shared, out, query, query_end,
                params.value_dim);
  return has_nan;
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    attention_portable_forward(const __grid_constant__ AttentionParams params, int tiles,
                               int parts) {
  extern __shared__ __align__(1024) char shared[];
  run_tiles<S>(params, tiles, parts, [&](const Sequence& s, int head, int query, int, bool clean) {
    return forward_tile<S>(params, shared, s, head, query, clean);
  });
}

}  // namespace portable

template <typename T>
cudaError_t attention_forward_portable(const AttentionParams& params, cudaStream_t stream) {
  using namespace portable;
  return with_shape<T, Kernel::kForward>(params, [&](auto shape) {
    return launch_shape(shape, attention_portable_forward<decltype(shape)>, params, params, stream);
  });
}

}  // namespace fused_norm
