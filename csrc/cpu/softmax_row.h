// What a softmax does to a row of numbers in its accumulation type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/exponential.h"
#include "cpu/rows.h"

// In each source of its own: functions in several versions, one for each kind of chip.
namespace fused_norm::cpu {
namespace {

template <typename Acc>
constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();

// Terms of a row that are added in Acc before they join a RowSum: few enough for fp32 to lose
// little of them, enough to make the sum cheap.
constexpr int64_t kTerms = 512;

template <typename Acc>
FUSED_NORM_SIMD Acc largest_of(const Acc* x, int64_t n) {
  Acc largest = -kInfinity<Acc>;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

// y = exp(x - shift), and the sum of that. x and y may be the same row.
template <typename Acc>
FUSED_NORM_SIMD double exp_row(const Acc* x, Acc shift, Acc* y, int64_t n) {
  RowSum total;
  for (int64_t start = 0; start < n; start += kTerms) {
    const int64_t end = std::min(n, start + kTerms);
    Acc sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < end; ++i) {
      const Acc e = exponential(x[i] - shift);
      y[i] = e;
      sum += e;
    }
    total.add(sum);
  }
  return total.value();
}

template <typename Acc>
FUSED_NORM_SIMD void multiply_row(Acc factor, Acc* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] *= factor;
}

}  // namespace
}  // namespace fused_norm::cpu
