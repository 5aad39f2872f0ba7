// exp() for the softmaxes and attention on the CPU.
#pragma once

#include <c10/util/bit_cast.h>

#include <cmath>
#include <cstdint>

#include "cpu/rows.h"

namespace fused_norm::cpu {
namespace {

// exp to about one unit in the last place, in a form that compilers vectorise. NaN stays NaN.
inline float exponential(float x) {
  constexpr float kLargest = 104;  // exp(-kLargest) rounds to zero, exp(kLargest) to infinity
  // The low bits of x + kMagic are x, rounded to an integer.
  constexpr float kMagic = 0x1.8p23f, kLog2e = 0x1.715476p0f;
  // ln(2) in two parts: an exponent times the first is exact.
  constexpr float kLn2High = 0x1.62ep-1f, kLn2Low = 0x1.0bfbe8p-15f;
  x = x < -kLargest ? -kLargest : x;
  x = x > kLargest ? kLargest : x;
  const float shifted = x * kLog2e + kMagic, n = shifted - kMagic;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  // The series at |r| <= ln(2) / 2: the next term is 5e-9, below 2^-24.
  float sum = 1.0f / 5040;
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = sum * r + term;
  // 2^n as two factors, each of them a normal number also where 2^n is not.
  const uint32_t biased = c10::bit_cast<uint32_t>(shifted) - c10::bit_cast<uint32_t>(kMagic) + 254;
  const uint32_t half = biased >> 1;
  return sum * c10::bit_cast<float>(half << 23) * c10::bit_cast<float>((biased - half) << 23);
}
inline double exponential(double x) { return std::exp(x); }

// y = exp(x - shift), and the sum of that. x and y may be the same row.
template <typename Acc>
double exp_row(const Acc* x, Acc shift, Acc* y, int64_t n) {
  return row_sum<Acc>(n, [=](int64_t i) { return y[i] = exponential(x[i] - shift); });
}

}  // namespace
}  // namespace fused_norm::cpu
