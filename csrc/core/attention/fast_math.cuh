// Functions of one instruction, for 16-bit tensors.
#pragma once

namespace fused_norm {

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

}  // namespace fused_norm
