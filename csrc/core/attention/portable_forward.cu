// The portable tier's forward kernel (Dao, 2023): a block has a tile of queries and walks the keys
// that they see, from the first to the last, with an online softmax.
#include "core/attention/portable.cuh"

namespace fused_norm {
namespace portable {

template <int kN>
__device__ __forceinline__ void multiply_rows(float (&values)[kN][4], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) values[n][e] *= factor[e / 2];
  }
}

// The online softmax of a tile; `unit`: scores times it are exponents of 2.
template <typename S>
__device__ __forceinline__ void advance_softmax(typename S::Scores& scores, RowState (&rows)[S::kM],
                                                typename S::Out& out, float unit) {
#pragma unroll
  for (int m = 0; m < S::kM; ++m) {
    float rescale[2];
    auto& of_rows = reinterpret_cast<float(&)[4 * S::kN]>(scores[m]);
    if (softmax_step<Moves::kByFloats>(of_rows, rows[m], unit, rescale))
      multiply_rows(out[m], rescale);
  }
}

// Divides by the sums, sink included, multiplies by dropout's scale, and writes the log-sum-exp.
template <typename S>
__device__ __forceinline__ void finish_rows(const AttentionParams& params, const Sequence& s,
                                            int head, int query, RowState (&rows)[S::kM],
                                            typename S::Out& out) {
  const int lane = threadIdx.x % 32, first = query + lane / 4;
  const auto sink = [&](int row) { return read_sink<float>(params, s, head, row); };
#pragma unroll
  for (int m = 0; m < S::kM; ++m) {
    float factor[2], lse[2];
    const int of_m = first + 16 * m;
    softmax_end(rows[m], {sink(of_m), sink(of_m + 8)}, factor, lse);
    if (S::kGeneral) {
      for (float& of_row : factor) of_row *= static_cast<float>(params.dropout_scale);
    }
    multiply_rows(out[m], factor);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = of_m + 8 * r;
      if (lane % 4 == 0 && row < s.queries)
        static_cast<float*>(params.lse)[first_lse(params, s, head) + row] = lse[r];
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
  float unit = static_cast<float>(params.scale * 1.4426950408889634);  // as that of one tile

  const uint32_t query_tile = shared_address(shared);
  const uint32_t key_tile = query_tile + S::kOwnBytes, value_tile = key_tile + S::kOtherBytes;
  const auto query_rows = mma::left_rows<kDim>(query_tile, warp_row);
  const auto key_rows = mma::right_rows<kDim>(key_tile);
  const auto value_rows = mma::left_rows<kDim>(value_tile, 0);
  const auto copy = [&](const AttentionTensor& tensor, uint32_t tile, int key, int cols) {
    copy_rows<S, kKeys>(tile, row_of<const T>(tensor, s.batch, kv_head, s.key_begin),
                        tensor.row_stride, key, range, cols);
    commit_copies();
  };

  typename S::Out out;
  RowState rows[S::kM];
  mma::clear(out);
  int key = range.begin / kKeys * kKeys;
  copy_rows<S, S::kOwn>(query_tile, row_of<const T>(params.query, s.batch, head, s.query_begin),
                        params.query.row_stride, query, {query, query_end}, params.head_dim);
  copy(params.key, key_tile, key, params.head_dim);
  for (; key < range.end; key += kKeys) {
    wait_for_copies<0>();
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
      kept.apply(scores, 1);
    }
    if (is_last) {
      wait_for_copies<0>();
    } else {
      wait_for_copies<1>();
    }
    __syncthreads();
    if (S::kGeneral && clean) {
      clear_unseen_rows<S>(shared + (value_tile - query_tile), scores);
    }
    mma::multiply_weights<T>(out, scores, value_rows);
  }
  wait_for_copies<0>();
  finish_rows<S>(params, s, head, query + warp_row, rows, out);
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

cudaError_t attention_forward_portable(const AttentionParams& params, cudaStream_t stream) {
  using namespace portable;
  return with_shape<Kernel::kForward>(params, [&](auto shape) {
    return launch_shape(shape, attention_portable_forward<decltype(shape)>, params, params, stream);
  });
}

}  // namespace fused_norm
