// exp() in a form that compilers vectorise, for the softmaxes and attention on the CPU.
#pragma once

#include <c10/util/bit_cast.h>

#include <cstdint>

#include "cpu/rows.h"

namespace fused_norm::cpu {
namespace {

// Constants of exp(). kMagic is 1.5 * 2^p: adding it leaves a number rounded to an integer, in the
// low bits of the sum. exp(-kLargest) rounds to zero and exp(kLargest) to infinity.
template <typename Acc>
struct Exp;

template <>
struct Exp<float> {
  using Bits = uint32_t;
  static constexpr float kMagic = 0x1.8p23f, kLog2e = 0x1.715476p0f, kLargest = 104;
  // ln(2) in two parts: an exponent times the first is exact.
  static constexpr float kLn2High = 0x1.62ep-1f, kLn2Low = 0x1.0bfbe8p-15f;
  static constexpr int kMantissa = 23, kBias = 127;
  // Terms of the series at |r| <= ln(2) / 2: the next one is 5e-9, below 2^-24.
  static constexpr int kDegree = 7;
};

template <>
struct Exp<double> {
  using Bits = uint64_t;
  static constexpr double kMagic = 0x1.8p52, kLog2e = 0x1.71547652b82fep0, kLargest = 746;
  static constexpr double kLn2High = 0x1.62e42fefa3p-1, kLn2Low = 0x1.3de6af278ece6p-42;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr int kDegree = 13;  // the next term is 4e-18
};

constexpr double one_over_factorial(int k) { return k == 0 ? 1 : one_over_factorial(k - 1) / k; }

template <typename Acc, int k>
inline Acc series(Acc r) {
  if constexpr (k == Exp<Acc>::kDegree) {
    return one_over_factorial(k);
  } else {
    return series<Acc, k + 1>(r) * r + Acc(one_over_factorial(k));
  }
}

// exp to about one unit in the last place, in a form that compilers vectorise. NaN stays NaN.
template <typename Acc>
inline Acc exponential(Acc x) {
  using C = Exp<Acc>;
  using Bits = typename C::Bits;
  x = x < -C::kLargest ? -C::kLargest : x;
  x = x > C::kLargest ? C::kLargest : x;
  const Acc shifted = x * C::kLog2e + C::kMagic;
  const Acc n = shifted - C::kMagic;
  const Acc r = (x - n * C::kLn2High) - n * C::kLn2Low;
  // 2^n as two factors, each of them a normal number also where 2^n is not.
  const Bits biased = c10::bit_cast<Bits>(shifted) - c10::bit_cast<Bits>(C::kMagic) + 2 * C::kBias;
  const Bits half = biased >> 1;
  const Acc scale = c10::bit_cast<Acc>(half << C::kMantissa);
  const Acc rest = c10::bit_cast<Acc>((biased - half) << C::kMantissa);
  return series<Acc, 0>(r) * scale * rest;
}

// y = exp(x - shift), and the sum of that. x and y may be the same row.
template <typename Acc>
double exp_row(const Acc* x, Acc shift, Acc* y, int64_t n) {
  return row_sum<Acc>(n, [=](int64_t i) { return y[i] = exponential(x[i] - shift); });
}

}  // namespace
}  // namespace fused_norm::cpu
