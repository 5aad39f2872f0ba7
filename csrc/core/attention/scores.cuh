// Where a sequence's rows lie, which keys a query sees, and what a score is: shared by all tiers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "core/attention/attention.h"
#include "core/attention/dropout.h"

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
struct Rows {
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
  const int row;  // batch index * heads + head
  const A scale, softcap, alibi_slope;
  const char* const mask;  // of this batch index and head
  Rows query, key, value, dout;

  // With the rows in `query_range` and `key_range`.
  __device__ __forceinline__ Head(const AttentionParams& params, const AttentionTensor& dout,
                                  const Sequence& s, int head, Range query_range, Range key_range)
      : params(params),
        s(s),
        row(s.batch * params.heads + head),
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
                             int cols) -> Rows {
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
    return Dropout(params.rng[0], params.rng[1], row, params.dropout_p);
  }
};

}  // namespace fused_norm
