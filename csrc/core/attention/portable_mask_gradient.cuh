// The gradient of an additive mask in the portable tier.
#pragma once

#include "core/attention/portable_backward.cuh"

namespace fused_norm {
namespace portable {

__device__ __forceinline__ void store_mask_element(const AttentionBackwardParams& params,
                                                   int64_t at, float value) {
  if (params.forward.mask.dtype == DType::kFloat32) {
    static_cast<float*>(params.dmask)[at] = value;
  } else if (params.forward.mask.dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(params.dmask)[at] = __float2bfloat16(value);
  } else {
    static_cast<__half*>(params.dmask)[at] = __float2half(value);
  }
}

// Writes the sums of a tile, which lies in shared memory with `pitch` floats a row, over its rows
// and columns where the mask has one for all.
template <typename S>
__device__ __forceinline__ void store_mask_tile(const AttentionBackwardParams& params,
                                                const float* tile, int pitch, int batch, int head,
                                                int query, int key) {
  const int rows = params.mask_shape[2], cols = params.mask_shape[3];
  const int sum_rows = rows == 1 ? S::kOwn : 1, sum_cols = cols == 1 ? S::kOthers : 1;
  const int64_t first = (int64_t{batch} * params.mask_shape[1] + head) * rows;
  for (int at = threadIdx.x; at < S::kOwn * S::kOthers; at += S::kThreads) {
    const int i = at / S::kOthers, j = at % S::kOthers;
    if (query + i >= rows || key + j >= cols) continue;
    float sum = 0;
    for (int r = 0; r < sum_rows; ++r) {
      for (int c = 0; c < sum_cols; ++c) sum += tile[(i + r) * pitch + j + c];
    }
    store_mask_element(params, (first + query + i) * cols + key + j, sum);
  }
}

// Adds one tile of one head to the sums.
template <typename S>
__device__ __forceinline__ void add_mask_gradient(const AttentionGradient& g, char* shared,
                                                  const Sequence& s, int head, int query, int key,
                                                  typename S::Scores& sums) {
  using T = typename S::T;
  constexpr int kDim = S::kDim, kKeys = S::kOthers, kThreads = S::kThreads, kM = S::kM;
  const AttentionParams& params = g.params.forward;
  const int kv_head = head / (params.heads / params.kv_heads);
  const int warp_row = threadIdx.x / 32 * kM * 16;
  const Range queries{query, min(query + S::kOwn, s.queries)};
  const Range keys{key, min(key + kKeys, s.keys)};
  const uint32_t query_tile = mma::shared_address(shared), dout_tile = query_tile + S::kOwnBytes;
  const uint32_t key_tile = dout_tile + S::kOwnBytes, value_tile = key_tile + S::kOtherBytes;
  __syncthreads();  // the tiles before are done with
  const auto copy = [&](auto rows, uint32_t to, const AttentionTensor& tensor, int of_head,
                        int first, const Range& range, int cols) {
    copy_rows<T, kDim, decltype(rows)::value, kThreads>(
        to, head_of<T>(tensor, s, of_head, first), tensor.row_stride, range.begin, range, cols);
  };
  using Own = std::integral_constant<int, S::kOwn>;
  using Others = std::integral_constant<int, kKeys>;
  copy(Own(), query_tile, params.query, head, s.query_begin, queries, params.head_dim);
  copy(Others(), key_tile, params.key, kv_head, s.key_begin, keys, params.head_dim);
  mma::commit_copies();
  copy(Own(), dout_tile, g.params.dout, head, s.query_begin, queries, params.value_dim);
  copy(Others(), value_tile, params.value, kv_head, s.key_begin, keys, params.value_dim);
  mma::commit_copies();
  const RowsStatistics<kM> statistics(g, s, head, query + warp_row);

  typename S::Scores scores, gradient;
  mma::wait_copies<1>();
  __syncthreads();
  mma::multiply_rows<T, kDim, kM, kKeys / 8>(scores, mma::left_rows<kDim>(query_tile, warp_row),
                                             mma::right_rows<kDim>(key_tile));
  const Band band = band_of(params, s);
  const bool all_is_seen =
      key + kKeys <= s.keys && band.sees_all(query, queries.end, key, key + kKeys);
  differentiate<S, false, /*kBySoftcapped=*/true>(
      scores, gradient, ScoreRules<float>(params, s, head), band,
      TilePlace<false>(s, query + warp_row, key), all_is_seen, kLog2E, statistics, [&] {
        mma::wait_copies<0>();
        __syncthreads();
        mma::multiply_rows<T, kDim, kM, kKeys / 8>(
            gradient, mma::left_rows<kDim>(dout_tile, warp_row), mma::right_rows<kDim>(value_tile));
      });
  mma::for_elements<kM, kKeys / 8>(
      [&](int m, int n, int e, int, int) { sums[m][n][e] += gradient[m][n][e]; });
}

// A block has a tile of the mask and sums what its elements serve, in order. The grid is (key
// tiles, query tiles, mask heads, mask batches), the first fastest.
template <typename S>
__global__ void __launch_bounds__(S::kThreads)
    attention_portable_mask_gradient(const __grid_constant__ AttentionGradient g, int key_tiles,
                                     int query_tiles) {
  extern __shared__ __align__(1024) char shared[];
  const AttentionParams& params = g.params.forward;
  const int* shape = g.params.mask_shape;
  const int key_tile = blockIdx.x % key_tiles, query_tile = blockIdx.x / key_tiles % query_tiles;
  const int row = blockIdx.x / key_tiles / query_tiles;
  const int mask_head = row % shape[1], mask_batch = row / shape[1];
  const Range batches = served(mask_batch, shape[0], params.batch);
  const Range heads = served(mask_head, shape[1], params.heads);
  typename S::Scores sums;
  mma::clear<S::kM, S::kOthers / 8>(sums);
  for (int batch = batches.begin; batch < batches.end; ++batch) {
    const Sequence s = sequence_of(params, batch);
    const Band band = band_of(params, s);
    const Range queries = served(query_tile, shape[2], (s.queries + S::kOwn - 1) / S::kOwn);
    const Range keys = served(key_tile, shape[3], (s.keys + S::kOthers - 1) / S::kOthers);
    for (int head = heads.begin; head < heads.end; ++head) {
      for (int i = queries.begin; i < queries.end; ++i) {
        const int query = i * S::kOwn;
        const Range seen = band.keys_of(query, min(query + S::kOwn, s.queries), s.keys);
        for (int j = keys.begin; j < keys.end; ++j) {
          const int key = j * S::kOthers;
          if (query >= s.queries || key >= seen.end || key + S::kOthers <= seen.begin) continue;
          add_mask_gradient<S>(g, shared, s, head, query, key, sums);
        }
      }
    }
  }
  constexpr int kPitch = S::kOthers + 1;
  float* tile = reinterpret_cast<float*>(shared);
  __syncthreads();
  mma::for_elements<S::kM, S::kOthers / 8>([&](int m, int n, int e, int row_of, int col) {
    const int lane = threadIdx.x % 32;
    tile[(threadIdx.x / 32 * S::kM * 16 + row_of + lane / 4) * kPitch + col + lane % 4 * 2] =
        sums[m][n][e];
  });
  __syncthreads();
  store_mask_tile<S>(g.params, tile, kPitch, mask_batch, mask_head, query_tile * S::kOwn,
                     key_tile * S::kOthers);
}

}  // namespace portable
}  // namespace fused_norm
