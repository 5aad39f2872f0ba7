// Which tile a block has, and how kernels are launched over tiles: shared by the plain and the
// portable tier.
#pragma once

#include <algorithm>
#include <climits>
#include <type_traits>

#include "core/attention/scores.cuh"
#include "core/attention/tiers.h"
#include "core/common/launch.cuh"
#include "core/common/sizes.h"

namespace fused_norm {

enum class Kernel { kForward, kQueryGradient, kKeyGradient, kMaskGradient };

// Which (tile, part of its outputs, head, batch) a block has. Tiles vary fastest, so that blocks
// that run together read the same keys; the heads of a group follow each other.
struct Place {
  int tile, part, head, batch;
};

__device__ __forceinline__ Place place_of(int tiles, int parts, int heads) {
  const unsigned row = blockIdx.x / tiles, pair = row / parts;
  return {static_cast<int>(blockIdx.x - row * tiles), static_cast<int>(row - pair * parts),
          static_cast<int>(pair % heads), static_cast<int>(pair / heads)};
}

// Products of a sum that the plain tier adds up first.
constexpr int kPlainDepth = 16;

// Calls run(A{}) with the type of the arithmetic outside tensor cores.
template <typename Run>
cudaError_t with_arithmetic(DType dtype, Run run) {
  return dtype == DType::kFloat64 ? run(double{}) : run(float{});
}

// A block for each tile of `own` rows of the kernel's own side and each part of the outputs; of the
// mask's gradient for each tile of `own` queries by `others` keys. Nothing is launched for none.
// Kernels take the counts of tiles and parts.
inline cudaError_t launch_tiles(Kernel kind, void (*kernel)(AttentionGradient, int, int),
                                const AttentionGradient& g, int own, int others, int parts,
                                int threads, int shared_bytes, cudaStream_t stream) {
  const auto tiles_of = [](int rows, int tile) {
    return static_cast<int>(std::max<int64_t>(1, ceil_div(rows, tile)));
  };
  const AttentionParams& p = g.params.forward;
  const int* mask = g.params.mask_shape;
  const bool of_keys = kind == Kernel::kKeyGradient;
  int tiles = tiles_of(of_keys ? p.keys : p.queries, own);
  int heads = of_keys ? p.kv_heads : p.heads, batch = p.batch;
  if (kind == Kernel::kMaskGradient) {
    tiles = tiles_of(mask[3], others), parts = tiles_of(mask[2], own);
    heads = mask[1], batch = mask[0];
  }
  const int64_t blocks = int64_t{tiles} * parts * heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  return detail::launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), {shared_bytes},
                        stream, g, tiles, parts);
}

// Calls launch(KernelConstant) for the gradients that are asked for.
template <Kernel kKernel>
using KernelConstant = std::integral_constant<Kernel, kKernel>;
template <typename Launch>
cudaError_t launch_gradients(const AttentionBackwardParams& params, Launch launch) {
  cudaError_t error = cudaSuccess;
  if (params.dquery.data != nullptr) error = launch(KernelConstant<Kernel::kQueryGradient>());
  if (error == cudaSuccess && (params.dkey.data != nullptr || params.dvalue.data != nullptr)) {
    error = launch(KernelConstant<Kernel::kKeyGradient>());
  }
  if (error == cudaSuccess && params.dmask != nullptr) {
    error = launch(KernelConstant<Kernel::kMaskGradient>());
  }
  return error;
}

// Calls run(sequence, head, first row, part) for a block's tiles of kRows queries, the last first:
// under a causal mask they see the most. kOfKeys: for tiles of keys, the first first.
template <int kRows, bool kOfKeys, typename Run>
__device__ __forceinline__ void for_tiles(const AttentionParams& params, int tiles, int parts,
                                          Run run) {
  // Sequences that share a head's mask follow each other, while it is cached.
  const bool batch_first = params.mask.data != nullptr && params.mask.batch_stride == 0;
  const int heads = kOfKeys ? params.kv_heads : params.heads;
  const Place place = place_of(tiles, parts, batch_first ? params.batch : heads);
  const int head = batch_first ? place.batch : place.head;
  const Sequence s = sequence_of(params, batch_first ? place.head : place.batch);
  const int all = ((kOfKeys ? s.keys : s.queries) + kRows - 1) / kRows;
  for (int tile = kOfKeys ? place.tile : tiles - 1 - place.tile; tile < all; tile += tiles) {
    run(s, head, tile * kRows, place.part);
  }
}

// What a block's tile of the mask, kQueries by kKeys, serves: tiles are counted along keys, parts
// along queries, heads and batches are the mask's. Calls use(sequence, head, query, keys) with a
// tile of queries and the keys that it sees, in one order.
template <int kQueries, int kKeys, typename Use>
__device__ __forceinline__ void for_served(const AttentionBackwardParams& params,
                                           const Place& place, Use use) {
  const int* shape = params.mask_shape;
  // Indices that an element, or a tile, serves: all where the mask has one for all.
  const auto served = [](int index, int mask_size, int all) {
    return mask_size == 1 ? Range{0, all} : Range{index, index + 1};
  };
  const Range batches = served(place.batch, shape[0], params.forward.batch);
  const Range heads = served(place.head, shape[1], params.forward.heads);
  for (int batch = batches.begin; batch < batches.end; ++batch) {
    const Sequence s = sequence_of(params.forward, batch);
    const Range queries = served(place.part, shape[2], (s.queries + kQueries - 1) / kQueries);
    const Range keys = served(place.tile, shape[3], (s.keys + kKeys - 1) / kKeys);
    for (int head = heads.begin; head < heads.end; ++head) {
      for (int i = queries.begin; i < queries.end; ++i) {
        const int query = i * kQueries;
        const Range seen = s.band.keys_of(query, min(query + kQueries, s.queries), s.keys);
        const Range range{max(keys.begin * kKeys, seen.begin), min(keys.end * kKeys, seen.end)};
        if (query < s.queries && range.begin < range.end) use(s, head, query, range);
      }
    }
  }
}

// Writes a tile of the mask's gradient, which lies in shared memory with `pitch` elements a row,
// summed over its rows and columns where the mask has one for all.
template <int kQueries, int kKeys, typename A>
__device__ __forceinline__ void store_mask_tile(const AttentionBackwardParams& params,
                                                const Place& place, const A* tile, int pitch) {
  const int rows = params.mask_shape[2], cols = params.mask_shape[3];
  const int sum_rows = rows == 1 ? kQueries : 1, sum_cols = cols == 1 ? kKeys : 1;
  const int64_t first = (int64_t{place.batch} * params.mask_shape[1] + place.head) * rows;
  for (int at = threadIdx.x; at < kQueries * kKeys; at += blockDim.x) {
    const int i = at / kKeys, j = at % kKeys;
    const int row = place.part * kQueries + i, col = place.tile * kKeys + j;
    if (row >= rows || col >= cols) continue;
    A sum = 0;
    for (int r = 0; r < sum_rows; ++r) {
      for (int c = 0; c < sum_cols; ++c) sum += tile[(i + r) * pitch + j + c];
    }
    with_option_storage<A>(params.forward.mask.dtype, [&](auto t) {
      using T = decltype(t);
      static_cast<T*>(params.dmask)[(first + row) * cols + col] = static_cast<T>(sum);
    });
  }
}

}  // namespace fused_norm
