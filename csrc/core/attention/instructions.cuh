// What the tensor-core tiers share: instructions, and arithmetic for 16-bit tensors.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

namespace fused_norm {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ uint32_t shared_address(const void* data) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(data));
}

// Starts to copy the first `bytes` of 16 or 4 bytes to shared memory, and zeros for the rest.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes = kBytes) {
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

// 2^x; 0 for -inf.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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

// The softmax of rows, tile by tile. Hopper's kernels and those of one tile both call it, so that
// they have the same bits. Of a thread's two rows: largest score so far, sum over its own columns.
struct RowState {
  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};
};

// Scores become exp2(exponent (score - largest)); what was summed so far is to be multiplied by
// `rescale`. `lowest` bounds exponent * largest: rows of -inf, or far below it, give zeros.
template <int kCount>
__device__ __forceinline__ void softmax_step(float (&scores)[kCount], RowState& rows,
                                             float exponent, float lowest, float (&rescale)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float a = rows.largest[row], b = scores[2 * row];
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      a = fmaxf(a, scores[i + 2 * row]);
      b = fmaxf(b, scores[i + 2 * row + 1]);
    }
    const float largest = quad_max(fmaxf(a, b));
    const float base = fmaxf(largest * exponent, lowest);
    rescale[row] =
        rows.largest[row] == largest ? 1.f : exp2_fast(fmaf(rows.largest[row], exponent, -base));
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

// What the softmax multiplies the sums of a thread's two rows by, and their log-sum-exp, -inf of a
// row that saw nothing.
__device__ __forceinline__ void softmax_end(const RowState& rows, float exponent, float sink,
                                            float (&factor)[2], float (&lse)[2]) {
  sink *= kLog2E;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows.sum[r]), largest = rows.largest[r] * exponent;
    const float base = fmaxf(largest, sink);
    const float shrink = largest == base ? 1.f : exp2_fast(largest - base);
    const float total = sum * shrink + (sink == -INFINITY ? 0.f : exp2_fast(sink - base));
    factor[r] = sum == 0 ? 0.f : __fdividef(shrink, total);
    lse[r] = (base + __log2f(total)) * kLn2;
  }
}

}  // namespace fused_norm
