// What the tensor-core tiers share: instructions, arithmetic for 16-bit tensors, and dropout of a
// warp's accumulators.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "core/attention/dropout.h"
#include "core/common/pack.cuh"
#include "core/common/statistics.cuh"
#include "core/common/types.h"

namespace fused_norm {

constexpr float kLn2 = 0.6931471805599453f;

// Starts to copy the first `bytes` of 16 or 4 bytes to shared memory, and zeros for the rest.
template <int kBytes>
__device__ __forceinline__ void copy_first(uint32_t to, const void* from, int bytes = kBytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  }
}

// Over the four threads of a row of a matrix product's result.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// tanh(x), to 2^-22, of 2 log2(e) x: 1 - 2 / (1 + e^(2 x)). The reciprocal is made by Newton's
// steps, as the unit of exponentials is what softmax waits for.
__device__ __forceinline__ float tanh_fast(float exponent) {
  float capped;
  asm("min.NaN.f32 %0, %1, 0f41F00000;" : "=f"(capped) : "f"(exponent));  // 30: tanh is 1
  const float e = 1 + exp2_fast(capped);
  float inverse = __uint_as_float(0x7EF311C7u - __float_as_uint(e));  // within an eighth
#pragma unroll
  for (int i = 0; i < 3; ++i) inverse = fmaf(inverse, fmaf(-e, inverse, 1), inverse);
  return fmaf(-2, inverse, 1);
}
constexpr float kTanhUnit = 2.8853900817779268f;  // 2 log2(e)

// The same where |exponent| < 2, to 2^-17 of it: by the units of products alone.
__device__ __forceinline__ float tanh_near(float exponent) {
  const float square = exponent * exponent;
  float ratio = fmaf(-2.2546985e-05f, square, 0.00064398913f);
  ratio = fmaf(ratio, square, -0.01385853f);
  ratio = fmaf(ratio, square, 0.34657145f);
  return ratio * exponent;
}

// The softmax of rows, tile by tile. All tensor-core kernels call it, so that those of a tier have
// the same bits. Of a thread's two rows: the exponent that is subtracted from all of the row's, and
// the sum over the thread's own columns. At first a base is `lowest`: rows of -inf, or of exponents
// that are no larger, give zeros.
struct RowState {
  float base[2], sum[2] = {0, 0};

  __device__ __forceinline__ explicit RowState(float lowest = -FLT_MAX) : base{lowest, lowest} {}
};

// Of a thread's own columns of a row.
template <int kCount>
__device__ __forceinline__ float largest_of_row(const float (&scores)[kCount], int row) {
  float a = scores[2 * row], b = scores[2 * row + 1];
#pragma unroll
  for (int i = 4; i < kCount; i += 4) {
    a = fmaxf(a, scores[i + 2 * row]);
    b = fmaxf(b, scores[i + 2 * row + 1]);
  }
  return fmaxf(a, b);
}
// That, or 0 if it is negative: by integers, of which one instruction takes three.
template <int kCount>
__device__ __forceinline__ float largest_or_zero_of_row(const float (&scores)[kCount], int row) {
  int a = 0;
#pragma unroll
  for (int i = 2 * row; i < kCount; i += 4) {
    a = max(max(a, __float_as_int(scores[i])), __float_as_int(scores[i + 1]));
  }
  return __int_as_float(a);
}

// How softmax_step() finds whether a base moves. kFirst: in a row's first tile it always does.
// kByFloats: by the largest score. kByIntegers: by that or 0, which is faster, but looks at all
// scores again if a base is far below 0.
enum class Moves { kFirst, kByFloats, kByIntegers };

// Scores become exp2(exponent score - base). A base moves, to the row's largest exponent, only when
// that is larger by kSlack: so most tiles leave all sums as they are, and no lane asks the others
// for their maxima. True: bases of the warp have moved, and what was summed so far is to be
// multiplied by `rescale`.
template <Moves kMoves, int kCount>
__device__ __forceinline__ bool softmax_step(float (&scores)[kCount], RowState& rows,
                                             float exponent, float (&rescale)[2]) {
  constexpr float kSlack = 8;
  const auto exceeds = [&](float score, int row) {
    return fmaf(score, exponent, -rows.base[row]) > kSlack;
  };
  float largest[2];
  bool moves = kMoves == Moves::kFirst;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if constexpr (kMoves == Moves::kByIntegers) {
      moves |= exceeds(largest_or_zero_of_row(scores, row), row);
    } else {
      largest[row] = largest_of_row(scores, row);
      moves |= exceeds(largest[row], row);
    }
  }
  if (kMoves != Moves::kFirst) moves = __any_sync(~0u, moves);
  if (moves) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (kMoves == Moves::kByIntegers) largest[row] = largest_of_row(scores, row);
      const float most = quad_max(largest[row]), before = rows.base[row];
      // Not Inf, from which a row whose exponents are beyond fp32 would have zeros: it has NaN.
      if (exceeds(most, row)) rows.base[row] = fminf(most * exponent, FLT_MAX);
      rescale[row] = exp2_fast(before - rows.base[row]);
      rows.sum[row] *= rescale[row];
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float& first = scores[i + 2 * row];
      float& second = scores[i + 2 * row + 1];
      first = exp2_fast(fmaf(first, exponent, -rows.base[row]));
      second = exp2_fast(fmaf(second, exponent, -rows.base[row]));
      even += first;
      odd += second;
    }
    rows.sum[row] += even + odd;
  }
  return moves;
}

// What the softmax multiplies the sums of a thread's two rows by, and their log-sum-exp: that of
// its sink where a row saw nothing.
__device__ __forceinline__ void softmax_end(const RowState& rows, const float (&sink)[2],
                                            float (&factor)[2], float (&lse)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sink_exponent = sink[r] * kLog2E;
    const float sum = quad_sum(rows.sum[r]), base = fmaxf(rows.base[r], sink_exponent);
    const float shrink = rows.base[r] == base ? 1.f : exp2_fast(rows.base[r] - base);
    const float of_sink = sink[r] == -INFINITY ? 0.f : exp2_fast(sink_exponent - base);
    const float total = sum * shrink + of_sink;
    factor[r] = sum == 0 ? 0.f : __fdividef(shrink, total);
    lse[r] = sum == 0 ? sink[r] : (base + __log2f(total)) * kLn2;
  }
}

// What dropout keeps of a tile of scores (dropout.h): of a thread's kCount elements, of which
// element i is 8 (i / 2 % 2) rows and 8 (i / 4) + i % 2 columns behind the first. Rows are queries
// and columns keys; kOfKeys: the reverse.
//
// A draw serves eight keys of a query: two each of four lanes, or one each of eight lanes
// (kOfKeys). So of every sixteen columns a lane makes one draw for all that share it, and they
// exchange. kUnroll: how many draws are made at once; more need more registers.
template <bool kOfKeys, int kCount, int kUnroll = 4>
class KeptElements {
  static_assert(kCount % 8 == 0);
  static constexpr int kDraws = kCount / 8, kWords = (kDraws + 3) / 4;

 public:
  // `row`, `column`: of the thread's first element.
  __device__ __forceinline__ void draw(const Dropout& dropout, int row, int column) {
    constexpr int kShare = kOfKeys ? 8 : 4, kApart = kOfKeys ? 4 : 1;  // lanes
    const int lane = threadIdx.x % kWarpSize, turn = lane / kApart % kShare;
    column += turn / (kShare / 2) * 8;
    (kOfKeys ? column : row) += kOfKeys ? turn % 2 : turn % 2 * 8;
    if (kOfKeys) row += turn / 2 % 2 * 8;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32_t drawn = 0;
#pragma unroll kUnroll
      for (int i = 4 * word; i < min(4 * word + 4, kDraws); ++i) {
        const int other = column + 16 * i;
        drawn |= dropout.kept(kOfKeys ? other : row, kOfKeys ? row : other) << i % 4 * 4;
      }
      words_[word] = 0;
#pragma unroll
      for (int from = 0; from < kShare; ++from) {
        const uint32_t of_lane = __shfl_sync(~0u, drawn, lane + (from - turn) * kApart);
        // Of each draw the lane's key, or its two.
        words_[word] |= kOfKeys ? (of_lane >> bit_of(lane / 4) & 0x1111) << bit_of(from)
                                : (of_lane >> lane % 4 & 0x11111111) << from;
      }
    }
  }
  // Has it drawn now. The compiler would draw when an element is looked at, as nothing orders the
  // two: so here is something that seldom happens, unless p is near 1, and needs the words.
  __device__ __forceinline__ void hold() const {
    uint32_t any = 0;
    for (uint32_t word : words_) any |= word;
    if (any == 0) asm volatile("nanosleep.u32 1;" ::: "memory");
  }
  __device__ __forceinline__ bool keeps(int i) const {
    return words_[i / 32] >> bit_of(i % 32) & 1;
  }
  // Multiplies elements by `scale`, or 0.
  __device__ __forceinline__ void apply(float (&elements)[kCount], float scale) {
    // Or the compiler keeps what it finds of each element until there is a second look.
    for (uint32_t& word : words_) asm volatile("" : "+r"(word));
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements[i] = (keeps(i) ? elements[i] : 0) * scale;
  }
  // Makes zeros of those that are dropped, of pairs of 16 bits.
  template <int kPairs>
  __device__ __forceinline__ void drop(uint32_t (&pairs)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = of_pair(pairs[i], i);
  }
  __device__ __forceinline__ uint32_t of_pair(uint32_t pair, int i) const {
    uint32_t mask;  // the highest bit of each half, in all its bits
    asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(mask) : "r"(words_[i / 16] << (15 - i % 16)));
    return pair & mask;
  }

 private:
  uint32_t words_[kWords];  // of 32 elements each: bit_of(i) is element i's
};

}  // namespace fused_norm
