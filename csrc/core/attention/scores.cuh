// Where a sequence's rows lie, which keys a query sees, and what a score is: shared by all tiers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "core/attention/attention.h"
#include "core/attention/dropout.h"

namespace fused_norm {

// One sequence of a call. Packed tensors have their sequences one after the other; the rows before
// them are like a sequence -1, those behind like one more.
struct Sequence {
  int batch;
  int query_begin, queries;
  int key_begin, keys;
};

__device__ __forceinline__ int clamp_offset(int offset, int low, int high) {
  return min(max(offset, low), high);
}

__device__ __forceinline__ Sequence sequence_of(const AttentionParams& params, int batch) {
  Sequence s{batch, 0, params.queries, 0, params.keys};
  const auto set = [&](const int32_t* offsets, int total, int& begin, int& rows) {
    begin = batch < 0 ? 0 : clamp_offset(offsets[batch], 0, total);
    rows = (batch < params.batch ? clamp_offset(offsets[batch + 1], begin, total) : total) - begin;
  };
  if (!params.packed()) return s;
  set(params.query_offsets, params.total_queries, s.query_begin, s.queries);
  set(params.key_offsets, params.total_keys, s.key_begin, s.keys);
  return s;
}
__device__ __forceinline__ bool is_outside(const AttentionParams& params, const Sequence& s) {
  return s.batch < 0 || s.batch >= params.batch;
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
  return params.packed() ? int64_t{head} * params.total_queries + s.query_begin
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
// Of masks and sinks; a mask may be fp32 beside fp64.
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

// with(read) for the mask's type; read(at) is what its element `at` adds to a score; -inf where it
// hides the key.
template <typename With>
__device__ __forceinline__ void with_mask_reader(const AttentionMask& mask, With with) {
  const auto added = [](float value) { return value <= kHidingMask ? -INFINITY : value; };
  const void* data = mask.data;
  if (mask.boolean) {
    with([=](int64_t at) { return static_cast<const uint8_t*>(data)[at] ? 0.f : -INFINITY; });
  } else if (mask.dtype == DType::kFloat32) {
    with([=](int64_t at) { return added(static_cast<const float*>(data)[at]); });
  } else if (mask.dtype == DType::kFloat16) {
    with([=](int64_t at) { return added(__half2float(static_cast<const __half*>(data)[at])); });
  } else {
    with([=](int64_t at) {
      return added(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]));
    });
  }
}

// The sink of a row, -inf without one or outside every sequence.
template <typename A>
__device__ __forceinline__ A read_sink(const AttentionParams& params, const Sequence& s, int head,
                                       int row) {
  const AttentionSinks& sink = params.sink;
  return sink.data == nullptr || is_outside(params, s)
             ? -static_cast<A>(INFINITY)
             : read_option<A>(sink.data, sink.dtype, sink.place(head, row));
}

struct Range {
  int begin, end;  // empty: end <= begin
};

// Query i sees key j when lowest <= j - i <= highest: causal masks and windows.
struct Band {
  int lowest, highest;

  __device__ __forceinline__ bool sees(int query, int key) const {
    return key - query >= lowest && key - query <= highest;
  }
  // Keys that any query of [begin, end) sees.
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

__device__ __forceinline__ Band band_of(const AttentionParams& params, const Sequence& s) {
  const int64_t shift = params.top_left ? 0 : int64_t{s.keys} - s.queries;
  constexpr int64_t kFar = 1 << 30;  // more than any length, and its sums with lengths fit
  const int64_t low = params.window_left < 0 ? -kFar : shift - params.window_left;
  const int64_t high = params.window_right < 0 ? kFar : shift + params.window_right;
  const auto clamp = [](int64_t at) { return static_cast<int>(max(-kFar, min(kFar, at))); };
  return {clamp(low), clamp(high)};
}

__device__ __forceinline__ Dropout dropout_of(const AttentionParams& params, uint32_t row) {
  return {static_cast<uint64_t>(params.rng[0]), static_cast<uint64_t>(params.rng[1]), row,
          params.dropout_threshold};
}

// A score, and its derivative by query . key * scale.
template <typename A>
struct Score {
  A value, slope;
};

// The options of one head of one sequence, each a uniform branch. Most is read from `params` where
// it is used: registers are few.
template <typename A>
struct ScoreRules {
  const AttentionParams& params;
  A scale = static_cast<A>(params.scale), softcap = static_cast<A>(params.softcap);
  A alibi_slope = 0;
  int alibi_shift;
  uint32_t dropout_row;
  const char* mask = static_cast<const char*>(params.mask.data);  // of this sequence and head

  __device__ __forceinline__ ScoreRules(const AttentionParams& params, const Sequence& s, int head)
      : params(params),
        alibi_shift(s.keys - s.queries),
        dropout_row(static_cast<uint32_t>(s.batch * params.heads + head)) {
    if (params.alibi_slopes != nullptr && !is_outside(params, s)) {
      alibi_slope = params.alibi_slopes[s.batch * params.alibi_batch_stride + head];
    }
    if (mask != nullptr) {
      mask += (s.batch * params.mask.batch_stride + head * params.mask.head_stride) * mask_bytes();
    }
  }

  __device__ __forceinline__ int mask_bytes() const {
    if (params.mask.boolean) return 1;
    return params.mask.dtype == DType::kFloat64 ? 8 : params.mask.dtype == DType::kFloat32 ? 4 : 2;
  }

  // What the mask adds.
  __device__ __forceinline__ A mask_at(int query, int key) const {
    const int64_t at = query * params.mask.row_stride + key * params.mask.key_stride;
    if (params.mask.boolean) return mask[at] ? A(0) : -static_cast<A>(INFINITY);
    return read_option<A>(mask, params.mask.dtype, at);
  }

  // Of a key that the band shows; -inf and 0 where the mask hides it, whatever the key holds.
  __device__ __forceinline__ Score<A> score(A dot, int query, int key) const {
    Score<A> s{dot * scale, A(1)};
    if (softcap > 0) {
      const A t = tanh(s.value / softcap);
      s = {t * softcap, 1 - t * t};
    }
    if (alibi_slope != 0) {
      s.value -= alibi_slope * abs(static_cast<A>(query + alibi_shift - key));
    }
    if (mask != nullptr) {
      const A added = mask_at(query, key);
      if (added <= A(kHidingMask)) return {-static_cast<A>(INFINITY), A(0)};
      s.value += added;
    }
    return s;
  }

  __device__ __forceinline__ bool drops() const { return params.dropout_threshold > 0; }
  __device__ __forceinline__ Dropout dropout() const { return dropout_of(params, dropout_row); }
};

}  // namespace fused_norm
