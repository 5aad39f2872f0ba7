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
        const int query = i * S::kOwn, query_end = min(query + S::kOwn, s.queries);
        const Range seen = band.keys_of(query, query_end, s.keys);
        const Range range{max(keys.begin * S::kOthers, seen.begin),
                          min(keys.end * S::kOthers, seen.end)};
        if (query >= s.queries || range.begin >= range.end) continue;
        __syncthreads();  // the tiles before are done with
        copy_own<S>(g, shared, s, params.query, g.params.dout, head, s.query_begin, query,
                    {query, query_end});
        const RowsStatistics<S::kM> statistics(g, s, head, query + threadIdx.x / 32 * S::kM * 16);
        walk<S, false, /*kBySoftcapped=*/true>(
            g, shared, s, head, query, range, true,
            [&](int) -> const RowsStatistics<S::kM>& { return statistics; },
            [&](const auto&, const auto& gradient, char*, uint32_t) {
              mma::for_elements<S::kM, S::kOthers / 8>(
                  [&](int m, int n, int e, int, int) { sums[m][n][e] += gradient[m][n][e]; });
            });
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
