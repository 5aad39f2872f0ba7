// Which tile a block has, and how kernels are launched over tiles: shared by the plain and the
// portable tier.
#pragma once

#include <algorithm>
#include <climits>

#include "core/attention/scores.cuh"
#include "core/attention/tiers.h"
#include "core/common/launch.cuh"
#include "core/common/types.h"

namespace fused_norm {

// The statistics of a sequence's first query.
template <typename A>
__device__ __forceinline__ A* statistics_of(const AttentionGradient& g, const Sequence& s,
                                            int head) {
  return static_cast<A*>(g.statistics) +
         first_statistic(g.of_statistics, s.batch, head, s.query_begin);
}

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

inline int tiles_of(int rows, int tile) { return std::max<int64_t>(1, ceil_div(rows, tile)); }

// A block for each place; nothing is launched for none. Kernels take the counts of tiles and parts.
template <typename Params, typename... Args>
cudaError_t launch_tiles(void (*kernel)(Params, int, int, Args...), const Params& params, int tiles,
                         int parts, int heads, int batch, int threads, int shared_bytes,
                         cudaStream_t stream, Args... args) {
  const int64_t blocks = int64_t{tiles} * parts * heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), {shared_bytes}, stream,
                params, tiles, parts, args...);
}

// The batch indices of a launch over tiles: one for each sequence; in packed calls also the first,
// for the rows before all sequences, and the last, for those behind.
inline int sequences_of(const AttentionParams& params) {
  return params.batch + (params.packed() ? 2 : 0);
}

// Calls run(sequence, head, first row, part) for a block's tiles of kRows queries, the last first:
// under a causal mask they see the most. kOfKeys: for tiles of keys, the first first. Rows outside
// every sequence see nothing.
template <int kRows, bool kOfKeys, typename Run>
__device__ __forceinline__ void for_tiles(const AttentionParams& params, int tiles, int parts,
                                          Run run) {
  // Sequences that share a head's mask follow each other, while it is cached.
  const bool batch_first = params.mask.data != nullptr && params.mask.batch_stride == 0;
  const int heads = kOfKeys ? params.kv_heads : params.heads;
  const Place place = place_of(tiles, parts, batch_first ? params.batch : heads);
  const int head = batch_first ? place.batch : place.head;
  const int batch = batch_first ? place.head : place.batch;
  Sequence s = sequence_of(params, batch - (params.packed() ? 1 : 0));
  if (is_outside(params, s)) (kOfKeys ? s.queries : s.keys) = 0;
  const int all = ((kOfKeys ? s.keys : s.queries) + kRows - 1) / kRows;
  for (int tile = kOfKeys ? place.tile : tiles - 1 - place.tile; tile < all; tile += tiles) {
    run(s, head, tile * kRows, place.part);
  }
}

// Indices that one element (or, in tiles, one tile) of the mask serves: all where the mask has one
// for all.
__device__ __forceinline__ Range served(int index, int mask_size, int all) {
  return mask_size == 1 ? Range{0, all} : Range{index, index + 1};
}

// What a block's tile of the mask, kQueries by kKeys, serves: place.tile counts along keys,
// place.part along queries, heads and batches are the mask's, each batch as often as the pairs that
// share it have parts. Calls use(sequence, head, query, keys) with a tile of queries and the keys
// that it sees, in one order.
template <int kQueries, int kKeys, typename Use>
__device__ __forceinline__ void for_served(const AttentionGradient& g, const Place& place,
                                           Use use) {
  const AttentionParams& params = g.params.forward;
  const MaskShare& share = g.share;
  const int* shape = g.params.mask_shape;
  const int part = place.batch % share.parts;
  const int end = min((part + 1) * share.pairs, share.served);
  for (int pair = part * share.pairs; pair < end; ++pair) {
    int batch = place.batch / share.parts, head = place.head;
    share.set_pair(pair, params.heads, &batch, &head);
    const Sequence s = sequence_of(params, batch);
    const Band band = band_of(params, s);
    const Range queries = served(place.part, shape[2], (s.queries + kQueries - 1) / kQueries);
    const Range keys = served(place.tile, shape[3], (s.keys + kKeys - 1) / kKeys);
    for (int i = queries.begin; i < queries.end; ++i) {
      const int query = i * kQueries;
      const Range seen = band.keys_of(query, min(query + kQueries, s.queries), s.keys);
      const Range range{max(keys.begin * kKeys, seen.begin), min(keys.end * kKeys, seen.end)};
      if (query < s.queries && range.begin < range.end) use(s, head, query, range);
    }
  }
}

// Writes a tile of the mask's gradient, or of the sums of a part of it. The tile lies in shared
// memory with `pitch` elements a row, and is summed over its rows and columns where the mask has
// one for all.
template <int kQueries, int kKeys, typename A>
__device__ __forceinline__ void store_mask_tile(const AttentionGradient& g, const Place& place,
                                                const A* tile, int pitch) {
  const int* shape = g.params.mask_shape;
  const int rows = shape[2], cols = shape[3], parts = g.share.parts;
  const int sum_rows = rows == 1 ? kQueries : 1, sum_cols = cols == 1 ? kKeys : 1;
  const int64_t mask = int64_t{place.batch % parts} * shape[0] + place.batch / parts;
  const int64_t first = (mask * shape[1] + place.head) * rows;
  const DType dtype = parts > 1 ? DType::kFloat32 : g.params.forward.mask.dtype;
  void* const to = parts > 1 ? g.mask_sums : g.params.dmask;
  for (int at = threadIdx.x; at < kQueries * kKeys; at += blockDim.x) {
    const int i = at / kKeys, j = at % kKeys;
    const int row = place.part * kQueries + i, col = place.tile * kKeys + j;
    if (row >= rows || col >= cols) continue;
    A sum = 0;
    for (int r = 0; r < sum_rows; ++r) {
      for (int c = 0; c < sum_cols; ++c) sum += tile[(i + r) * pitch + j + c];
    }
    with_option_storage<A>(dtype, [&](auto t) {
      using T = decltype(t);
      static_cast<T*>(to)[(first + row) * cols + col] = static_cast<T>(sum);
    });
  }
}

}  // namespace fused_norm
