// What the plain and the portable tier share: where a sequence's rows lie, which keys a query sees,
// what a score is, which tile a block has, and how kernels are launched over tiles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>
#include <cmath>

#include "core/attention/dropout.h"
#include "core/attention/tiers.h"
#include "core/common/launch.cuh"
#include "core/common/sizes.h"

namespace fused_norm {

struct Range {
  int begin, end;
};

// Query i sees key j when lowest <= j - i <= highest: causal masks and windows.
struct Band {
  int lowest, highest;

  __device__ __forceinline__ bool sees(int query, int key) const {
    return key - query >= lowest && key - query <= highest;
  }
  // Keys that any query of [begin, end) sees; empty ranges have end <= begin.
  __device__ __forceinline__ Range keys_of(int begin, int end, int keys) const {
    return {static_cast<int>(max(int64_t{0}, int64_t{begin} + lowest)),
            static_cast<int>(min(int64_t{keys}, int64_t{end} + highest))};
  }
  // Queries that see any key of [begin, end).
  __device__ __forceinline__ Range queries_of(int begin, int end, int queries) const {
    return {static_cast<int>(max(int64_t{0}, int64_t{begin} - highest)),
            static_cast<int>(min(int64_t{queries}, int64_t{end} - lowest))};
  }
  // Whether every query of [query, query_end) sees every key of [key, key_end).
  __device__ __forceinline__ bool sees_all(int query, int query_end, int key, int key_end) const {
    return key - (query_end - 1) >= lowest && key_end - 1 - query <= highest;
  }
};

// One sequence of a call. Packed tensors have their sequences one after the other.
struct Sequence {
  int batch;
  int query_begin, queries;
  int key_begin, keys;
  Band band;
};

__device__ __forceinline__ Sequence sequence_of(const AttentionParams& params, int batch) {
  Sequence s{batch, 0, params.queries, 0, params.keys};
  const auto set = [&](int& begin, int& rows, const int32_t* offsets, int total) {
    if (offsets == nullptr) return;
    begin = min(max(offsets[batch], 0), total);
    rows = min(max(offsets[batch + 1], begin), total) - begin;
  };
  set(s.query_begin, s.queries, params.query_offsets, params.total_queries);
  set(s.key_begin, s.keys, params.key_offsets, params.total_keys);
  const int64_t shift = params.top_left ? 0 : int64_t{s.keys} - s.queries;
  constexpr int64_t kFar = 1 << 30;  // more than any length, and its sums with lengths fit
  const int64_t low = params.window_left < 0 ? -kFar : shift - params.window_left;
  const int64_t high = params.window_right < 0 ? kFar : shift + params.window_right;
  s.band = {static_cast<int>(max(-kFar, min(kFar, low))),
            static_cast<int>(max(-kFar, min(kFar, high)))};
  return s;
}

// The first element of row `row` of a head, counted in the whole tensor.
template <typename T>
__device__ __forceinline__ T* row_of(const AttentionTensor& tensor, int batch, int head, int row) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride +
         row * tensor.row_stride;
}

// Where the log-sum-exp of a sequence's first query lies.
__device__ __forceinline__ int64_t first_lse(const AttentionParams& params, const Sequence& s,
                                             int head) {
  return params.query_offsets != nullptr
             ? int64_t{head} * params.total_queries + s.query_begin
             : (int64_t{s.batch} * params.heads + head) * params.queries;
}

// Calls use(T{}) with the type in memory; fp64 arithmetic means fp64 in memory.
template <typename A, typename Use>
__device__ __forceinline__ void with_storage(DType dtype, Use use) {
  if constexpr (sizeof(A) == 8) {
    use(double{});
  } else {
    if (dtype == DType::kFloat32) return use(float{});
    if (dtype == DType::kBFloat16) return use(__nv_bfloat16{});
    use(__half{});
  }
}
// Of masks and sinks, which may be fp32 beside fp64.
template <typename A, typename Use>
__device__ __forceinline__ void with_option_storage(DType dtype, Use use) {
  if (sizeof(A) == 8 && dtype == DType::kFloat32) return use(float{});
  with_storage<A>(dtype, use);
}
template <typename A>
__device__ __forceinline__ A read_option(const void* data, DType dtype, int64_t at) {
  A value;
  with_option_storage<A>(
      dtype, [&](auto t) { value = static_cast<A>(static_cast<const decltype(t)*>(data)[at]); });
  return value;
}

// The sink of a head, -inf without one.
template <typename A>
__device__ __forceinline__ A read_sink(const AttentionParams& params, int head) {
  return params.sink == nullptr ? -static_cast<A>(INFINITY)
                                : read_option<A>(params.sink, params.sink_dtype, head);
}

// Rows of one tensor, of a head of a sequence, as factors of a product: what lies outside
// [begin, end) x [0, cols) counts as zeros, as it may hold a NaN.
struct HeadRows {
  const void* data;  // row 0, column 0
  int64_t stride;    // in elements
  int begin, end, cols;
  DType dtype;

  template <typename T>
  __device__ __forceinline__ T at(int row, int col) const {
    const bool inside = row >= begin && row < end && col < cols;
    return inside ? static_cast<const T*>(data)[row * stride + col] : T(0.f);
  }
};

// A score, and its derivative by query . key * scale.
template <typename A>
struct Score {
  A value, slope;
};

// A query head of a sequence, the keys that belong to it, and what their scores are, each option a
// uniform branch. Most is read from `params` where it is used: registers are few.
template <typename A>
struct Head {
  const AttentionParams& params;
  const Sequence& s;
  const int head;
  const A scale, softcap, alibi_slope;
  const char* const mask;  // of this batch index and head
  HeadRows query, key, value, dout;

  // With the rows in `query_range` and `key_range`.
  __device__ __forceinline__ Head(const AttentionParams& params, const AttentionTensor& dout,
                                  const Sequence& s, int head, Range query_range, Range key_range)
      : params(params),
        s(s),
        head(head),
        scale(static_cast<A>(params.scale)),
        softcap(static_cast<A>(params.softcap)),
        alibi_slope(params.alibi_slopes == nullptr
                        ? A(0)
                        : params.alibi_slopes[s.batch * params.alibi_batch_stride + head]),
        mask(params.mask.data == nullptr
                 ? nullptr
                 : static_cast<const char*>(params.mask.data) +
                       (s.batch * params.mask.batch_stride + head * params.mask.head_stride) *
                           mask_bytes()) {
    const auto rows_of = [&](const AttentionTensor& tensor, int head, int first, Range range,
                             int cols) -> HeadRows {
      const int64_t at =
          s.batch * tensor.batch_stride + head * tensor.head_stride + first * tensor.row_stride;
      const char* data = static_cast<const char*>(tensor.data) + at * size_of(params.dtype);
      return {data, tensor.row_stride, range.begin, range.end, cols, params.dtype};
    };
    const int kv_head = head / (params.heads / params.kv_heads);
    query = rows_of(params.query, head, s.query_begin, query_range, params.head_dim);
    key = rows_of(params.key, kv_head, s.key_begin, key_range, params.head_dim);
    value = rows_of(params.value, kv_head, s.key_begin, key_range, params.value_dim);
    this->dout = rows_of(dout, head, s.query_begin, query_range, params.value_dim);
  }

  __device__ __forceinline__ int mask_bytes() const {
    return params.mask.boolean ? 1 : size_of(params.mask.dtype);
  }

  // What the mask adds; -inf hides.
  __device__ __forceinline__ A mask_at(int query, int key) const {
    const int64_t at = query * params.mask.row_stride + key * params.mask.key_stride;
    if (params.mask.boolean) return mask[at] ? A(0) : -static_cast<A>(INFINITY);
    return read_option<A>(mask, params.mask.dtype, at);
  }

  // -inf where a key is hidden, whatever it holds.
  __device__ __forceinline__ Score<A> score(A dot, int query, int key) const {
    constexpr A kHidden = -static_cast<A>(INFINITY);
    if (query >= s.queries || key >= s.keys || !s.band.sees(query, key)) return {kHidden, A(0)};
    Score<A> score{dot * scale, A(1)};
    if (softcap > 0) {
      const A t = tanh(score.value / softcap);
      score = {t * softcap, 1 - t * t};
    }
    if (alibi_slope != 0) {
      score.value -= alibi_slope * abs(static_cast<A>(query + s.keys - s.queries - key));
    }
    if (mask != nullptr) {
      const A added = mask_at(query, key);
      score.value = added == kHidden ? added : score.value + added;
    }
    return score;
  }

  __device__ __forceinline__ bool drops() const { return params.dropout_p > 0; }
  __device__ __forceinline__ Dropout dropout() const {
    return Dropout(params.rng[0], params.rng[1], s.batch * params.heads + head, params.dropout_p);
  }
};

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
// mask's gradient for each tile of `own` queries by `others` keys. Nothing is launched for none, or
// for gradients that are not asked for.
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
  if (kind == Kernel::kQueryGradient && g.params.dquery.data == nullptr) return cudaSuccess;
  if (of_keys && g.params.dkey.data == nullptr && g.params.dvalue.data == nullptr) {
    return cudaSuccess;
  }
  if (kind == Kernel::kMaskGradient && g.params.dmask == nullptr) return cudaSuccess;
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
