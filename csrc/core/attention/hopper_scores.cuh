// Scores of a tile in a warpgroup's registers: its options, what it hides, and its softmax.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/attention/hopper_ptx.cuh"
#include "core/attention/hopper_work.cuh"

namespace fused_norm::hopper {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// What becomes of query . key.
struct ScoreArgs {
  float scale;     // of scores, before all else; of general scores only
  float exponent;  // of scores in the softmax: exp2(exponent * score); positive
  float softcap;
  AttentionMask mask;
  const float* alibi_slopes;
  int64_t alibi_batch_stride;
  const void* sink;
  DType sink_dtype;
};

// Two rows of a thread: largest score so far, and the sum over the thread's own columns.
struct RowState {
  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Scores become exp2(exponent (score - largest)); what was summed so far is to be multiplied by
// `rescale`. Columns of -inf alone give zeros.
template <int kCount>
__device__ __forceinline__ void softmax_step(float (&scores)[kCount], RowState& rows,
                                             float exponent, float (&rescale)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float a = rows.largest[row], b = scores[2 * row];
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      a = fmaxf(a, scores[i + 2 * row]);
      b = fmaxf(b, scores[i + 2 * row + 1]);
    }
    const float largest = quad_max(fmaxf(a, b));
    const float base = largest == -INFINITY ? 0.f : largest * exponent;
    rescale[row] = exp2_fast(fmaf(rows.largest[row], exponent, -base));
    rows.largest[row] = largest;
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float& first = scores[i + 2 * row];
      float& second = scores[i + 2 * row + 1];
      first = exp2_fast(fmaf(first, exponent, -base));
      second = exp2_fast(fmaf(second, exponent, -base));
      even += first;
      odd += second;
    }
    rows.sum[row] = fmaf(rows.sum[row], rescale[row], even + odd);
  }
}

// Hides the scores outside [first, end) of each of the two rows, columns counted from the thread's
// own first one.
template <int kCount>
__device__ __forceinline__ void hide_after(float (&scores)[kCount], const int (&end)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (8 * (i / 4) + i % 2 >= end[i / 2 % 2]) scores[i] = -INFINITY;
  }
}
template <int kCount>
__device__ __forceinline__ void hide_before(float (&scores)[kCount], const int (&first)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (8 * (i / 4) + i % 2 < first[i / 2 % 2]) scores[i] = -INFINITY;
  }
}

template <typename T>
__device__ __forceinline__ float mask_value(const AttentionMask& mask, int64_t at) {
  if (mask.boolean) return static_cast<const bool*>(mask.data)[at] ? 0.f : -INFINITY;
  if (mask.dtype == DType::kFloat32) return static_cast<const float*>(mask.data)[at];
  return static_cast<float>(static_cast<const T*>(mask.data)[at]);
}

// scale, softcap, slopes and mask. `row`: the thread's first query, `column`: its first key.
template <typename T, int kCount>
__device__ __forceinline__ void general_scores(const ScoreArgs& args, const WorkTile& work,
                                               float (&scores)[kCount], int row, int column) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] *= args.scale;
  if (args.softcap > 0) {
    // tanh(x) = 1 - 2 / (1 + exp(2 x)).
    const float in = 2 * kLog2E / args.softcap;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float e = 1 + exp2_fast(scores[i] * in);
      float inverse;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(e));
      scores[i] = fmaf(-2 * args.softcap, inverse, args.softcap);
    }
  }
  if (args.alibi_slopes != nullptr) {
    const float slope = args.alibi_slopes[work.sequence * args.alibi_batch_stride + work.head];
    const int ahead = row + work.keys - work.queries - column;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int distance = ahead + 8 * (i / 2 % 2) - (8 * (i / 4) + i % 2);
      scores[i] = fmaf(-slope, fabsf(static_cast<float>(distance)), scores[i]);
    }
  }
  if (args.mask.data != nullptr) {
    const AttentionMask& mask = args.mask;
    const int64_t corner = work.sequence * mask.batch_stride + work.head * mask.head_stride;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = min(row + 8 * r, work.queries - 1);
      const int64_t at = corner + query * mask.row_stride;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i / 2 % 2 != r) continue;
        const int key = column + 8 * (i / 4) + i % 2;
        if (key >= work.keys) continue;
        const float value = mask_value<T>(mask, at + key * mask.key_stride);
        scores[i] = value == -INFINITY ? -INFINITY : scores[i] + value;
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ float sink_of(const ScoreArgs& args, int head) {
  if (args.sink == nullptr) return -INFINITY;
  return args.sink_dtype == DType::kFloat32
             ? static_cast<const float*>(args.sink)[head]
             : static_cast<float>(static_cast<const T*>(args.sink)[head]);
}

}  // namespace fused_norm::hopper
