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
  // Of general scores only: of query . key, before all else; by kTanhUnit / softcap where that is
  // positive.
  float scale;
  bool multiplies;  // no option and no exponent takes the last factor
  float exponent;   // of scores in the softmax: exp2(exponent * score); positive
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

__host__ __device__ constexpr int mask_pitch(int keys, int bytes) { return keys * bytes + 16; }

// A tile of the mask in shared memory, as it is in the tensor but for 16 bytes more a row, so that
// rows lie in different banks.
struct MaskTile {
  uint32_t data;
  int keys;       // of a tile
  bool has_rows;  // else all queries have the same

  // Scores times `factor`, plus the mask; -inf where that is, whatever the score. `row`, `column`:
  // a thread's first place in the tile.
  template <typename T, int kCount>
  __device__ __forceinline__ void add(const AttentionMask& mask, int row, int column, float factor,
                                      float (&scores)[kCount]) const {
    if (mask.boolean) {
      add_pairs<uint16_t>(scores, row, column, factor, [](uint32_t pair) {
        return make_float2(pair & 0xFF ? 0.f : -INFINITY, pair >> 8 ? 0.f : -INFINITY);
      });
    } else if (mask.dtype == DType::kFloat32) {
      add_pairs<float2>(scores, row, column, factor, [](float2 pair) { return pair; });
    } else {
      add_pairs<uint32_t>(scores, row, column, factor, [](uint32_t pair) {
        return make_float2(unpack<T>(pair & 0xFFFF), unpack<T>(pair >> 16));
      });
    }
  }

 private:
  template <typename Pair, int kCount, typename Values>
  __device__ __forceinline__ void add_pairs(float (&scores)[kCount], int row, int column,
                                            float factor, Values values) const {
    constexpr int kBytes = sizeof(Pair) / 2;
    const int pitch = mask_pitch(keys, kBytes) * has_rows;
    const uint32_t first = data + row * pitch + column * kBytes;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      Pair pair;
      load_shared(pair, first + i / 2 % 2 * 8 * pitch + i / 4 * 8 * kBytes);
      const float2 added = values(pair);
      scores[i] = added.x == -INFINITY ? -INFINITY : fmaf(scores[i], factor, added.x);
      scores[i + 1] = added.y == -INFINITY ? -INFINITY : fmaf(scores[i + 1], factor, added.y);
      asm volatile("" : "+f"(scores[i]), "+f"(scores[i + 1]));  // one after the other: registers
    }
  }
};

// softcap and slopes: query . key become scores but for a factor, which it returns, and the mask.
// `row`: the thread's first query, `column`: its first key, or the other way round. capped() is
// called when scores are tanh(s / softcap).
template <int kCount, typename Capped>
__device__ __forceinline__ float general_scores(const ScoreArgs& args, const WorkTile& work,
                                                int head, float (&scores)[kCount], int row,
                                                int column, Capped capped) {
  float factor = args.scale;
  if (args.softcap > 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = tanh_fast(scores[i] * args.scale);
    capped();
    factor = args.softcap;
  }
  if (args.alibi_slopes != nullptr) {
    const float slope = args.alibi_slopes[work.sequence * args.alibi_batch_stride + head];
    const float ahead = static_cast<float>(row + work.keys - work.queries - column);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float distance = ahead + static_cast<float>(8 * (i / 2 % 2) - 8 * (i / 4) - i % 2);
      scores[i] = fmaf(scores[i], factor, -slope * fabsf(distance));
      asm volatile("" : "+f"(scores[i]));
    }
    factor = 1;
  }
  if (args.multiplies) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] *= factor;
  }
  return factor;
}

template <typename T>
__device__ __forceinline__ float sink_of(const ScoreArgs& args, int head) {
  if (args.sink == nullptr) return -INFINITY;
  return args.sink_dtype == DType::kFloat32
             ? static_cast<const float*>(args.sink)[head]
             : static_cast<float>(static_cast<const T*>(args.sink)[head]);
}

}  // namespace fused_norm::hopper
