// Scores of a tile in a warpgroup's registers: its options, and what it hides. Rows of tiles:
// hidden ones made zero, finished ones written.
#pragma once

#include <cstdint>

#include "core/attention/hopper_ptx.cuh"
#include "core/attention/hopper_work.cuh"

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

// Rows of a tile for which hidden(row) become zeros, whatever they were: a NaN there
// would survive its weight of 0. By a warpgroup, before its own products and a barrier of its
// threads; others may do the same at the same time.
template <typename Tile, typename Hidden>
__device__ __forceinline__ void clear_rows(char* tile, Hidden hidden) {
  constexpr int kParts = Tile::kRowBytes / 16;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < Tile::kRows * kParts * Tile::kPanels; i += 128) {
    if (hidden(i / kParts % Tile::kRows)) reinterpret_cast<int4*>(tile)[i] = make_int4(0, 0, 0, 0);
  }
  CopyBarrier::order_writes();
}

// Row `row` of a head of the sequence of a tile's own side.
template <typename T>
__device__ __forceinline__ T* row_of(const AttentionTensor& tensor, const WorkTile& work, int head,
                                     int row) {
  return static_cast<T*>(tensor.data) + work.batch * tensor.batch_stride +
         head * tensor.head_stride + int64_t{work.query_begin + row} * tensor.row_stride;
}

// Thirty-two columns at a time, the four threads of a row give each other parts, so that each
// stores 16 bytes in a row.
template <typename T, int kCount>
__device__ __forceinline__ void store_row(const float (&values)[kCount], int row, float factor,
                                          T* out, int columns) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int block = 0; block < kCount / 16; ++block) {
    uint32_t parts[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 16 * block + 4 * i + 2 * row;
      parts[i] = round_pair(values[at] * factor, values[at + 1] * factor, T());
    }
    // Part i of thread t goes to thread i, as its t-th.
    const bool odd = lane & 1, high = lane & 2;
    uint32_t a = __shfl_xor_sync(~0u, odd ? parts[0] : parts[1], 1);
    uint32_t b = __shfl_xor_sync(~0u, odd ? parts[2] : parts[3], 1);
    const uint32_t low0 = odd ? a : parts[0], low1 = odd ? parts[1] : a;
    const uint32_t high0 = odd ? b : parts[2], high1 = odd ? parts[3] : b;
    a = __shfl_xor_sync(~0u, high ? low0 : high0, 2);
    b = __shfl_xor_sync(~0u, high ? low1 : high1, 2);
    const uint4 pack = high ? make_uint4(a, b, high0, high1) : make_uint4(low0, low1, a, b);
    const int column = 32 * block + 8 * lane;
    if (out != nullptr && column < columns) *reinterpret_cast<uint4*>(out + column) = pack;
  }
}

// The same in fp32, of a row that is there; each thread stores what it has.
template <int kCount>
__device__ __forceinline__ void store_row(const float (&values)[kCount], int row, float factor,
                                          float* out, int columns) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const int column = 8 * i + threadIdx.x % 4 * 2, at = 4 * i + 2 * row;
    if (column >= columns) return;
    *reinterpret_cast<float2*>(out + column) =
        make_float2(values[at] * factor, values[at + 1] * factor);
  }
}

}  // namespace fused_norm::hopper
