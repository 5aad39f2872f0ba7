// Scores of a tile in a warpgroup's registers: its options, and what it hides.
#pragma once

#include <cstdint>

#include "core/attention/hopper_ptx.cuh"
#include "core/attention/hopper_work.cuh"
#include "core/attention/kept_elements.cuh"

namespace fused_norm::hopper {

// What becomes of query . key, and of probabilities.
struct ScoreArgs : WorkArgs {
  bool general;  // forward: scores need more than the exponent's scale, a band and a mask
  // tanh takes query . key times tanh_scale. `factor` is softcap, or the scale without it: slopes
  // take scores times that. So does a mask of numbers, but times 1 behind slopes.
  float tanh_scale, factor, factor_for_mask;
  bool multiplies;    // scores are multiplied by `factor`: no option, mask or exponent takes it
  bool adds_mask;     // there is a mask of numbers, of pairs: it takes factor_for_mask
  float exponent;     // of scores in the softmax: exp2(exponent * score); positive
  float softcap;      // the call's
  float mask_factor;  // a mask of keys times this is added to scores; log2(e) / exponent
  float dropout_scale;
};

// Makes `hidden` what lies behind or before the band of a thread's two rows, of which `row` is the
// first. `column`: its first one.
template <int kCount>
__device__ __forceinline__ void hide_after(float (&scores)[kCount], const Band& band, int columns,
                                           int row, int column, float hidden = -INFINITY) {
  const int end[2] = {min(columns, row + band.highest + 1) - column,
                      min(columns, row + 8 + band.highest + 1) - column};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (8 * (i / 4) + i % 2 >= end[i / 2 % 2]) scores[i] = hidden;
  }
}
template <int kCount>
__device__ __forceinline__ void hide_before(float (&scores)[kCount], const Band& band, int row,
                                            int column, float hidden = -INFINITY) {
  const int first[2] = {row + band.lowest - column, row + 8 + band.lowest - column};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (8 * (i / 4) + i % 2 < first[i / 2 % 2]) scores[i] = hidden;
  }
}

// Adds a number for each column, from a thread's first on; -inf takes the place of any score.
template <int kCount>
__device__ __forceinline__ void add_to_columns(float (&scores)[kCount], const float* added) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float2 two = *reinterpret_cast<const float2*>(added + 2 * i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float value = j % 2 ? two.y : two.x;
      scores[i + j] = value == -INFINITY ? value : scores[i + j] + value;
      asm volatile("" : "+f"(scores[i + j]));  // registers
    }
  }
}

// Scores times `scale` become the tanh of what is that over kTanhUnit. What becomes of a score does
// not depend on the others; where all of a warp's are near, it does no more for them.
template <int kCount>
__device__ __forceinline__ void cap(float (&scores)[kCount], float scale) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scores[i] *= scale;
    bits |= __float_as_uint(scores[i]);
  }
  constexpr uint32_t kFar = 0x40000000;  // set in numbers from 2 on, and in NaN
  if (__any_sync(~0u, bits & kFar)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // Both, and no branch for each.
      float near = tanh_near(scores[i]), far = tanh_fast(scores[i]);
      asm("" : "+f"(near), "+f"(far));
      scores[i] = __float_as_uint(scores[i]) & kFar ? far : near;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = tanh_near(scores[i]);
  }
}

// Applies softcap and slopes to query . key. A mask of numbers is added later, to factor_for_mask
// times the result. head(): the queries' head. `row`: the thread's first row in the tile, `column`:
// its first row of the other side. capped() is called when scores are tanh(s / softcap).
template <int kCount, typename Head, typename Capped>
__device__ __forceinline__ void general_scores(const ScoreArgs& args, const WorkTile& work,
                                               Head head, float (&scores)[kCount], int row,
                                               int column, Capped capped) {
  if (args.softcap > 0) {
    cap(scores, args.tanh_scale);
    capped();
  }
  if (args.alibi_slopes != nullptr) {
    const float slope = args.alibi_slopes[work.sequence * args.alibi_batch_stride + head()];
    const float ahead = static_cast<float>(work.first + row + work.keys - work.queries - column);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float distance = ahead + static_cast<float>(8 * (i / 2 % 2) - 8 * (i / 4) - i % 2);
      scores[i] = fmaf(scores[i], args.factor, -slope * fabsf(distance));
      asm volatile("" : "+f"(scores[i]));
    }
  }
  if (args.multiplies) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] *= args.factor;
  }
}

template <typename T>
__device__ __forceinline__ float sink_of(const ScoreArgs& args, int head, int row) {
  const AttentionSinks& sink = args.sink;
  if (sink.data == nullptr) return -INFINITY;
  const int at = sink.place(head, row);
  return sink.dtype == DType::kFloat32 ? static_cast<const float*>(sink.data)[at]
                                       : static_cast<float>(static_cast<const T*>(sink.data)[at]);
}

}  // namespace fused_norm::hopper
