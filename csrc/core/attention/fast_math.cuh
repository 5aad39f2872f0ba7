// Functions of one instruction, for 16-bit tensors.
#pragma once

namespace fused_norm {

// 2^x; 0 for -inf.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// To 2^-11 of the result, a rounding to fp16. Forward and backward take the same, or their
// probabilities would differ.
__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace fused_norm
