// The exponentials of a row: their sum, relative to the largest element.
#pragma once

#include "core/common/row_group.cuh"
#include "core/common/statistics.cuh"

namespace fused_norm {

// e^t. In fp32 by the hardware's 2^t, good to 2^-22 and zero where the result is subnormal; the
// largest element is subtracted before, as folding it into the product would lose all of t in rows
// far from zero.
__device__ __forceinline__ float exp_of(float t) { return exp2_fast(t * kLog2E); }
__device__ __forceinline__ double exp_of(double t) { return exp(t); }

__device__ __forceinline__ float log_of(float v) { return logf(v); }
__device__ __forceinline__ double log_of(double v) { return log(v); }

template <typename A>
constexpr A kLowest = -std::numeric_limits<A>::infinity();

// What exponents are taken relative to: the maximum, or zero where that is -inf, so that a part of
// nothing but -inf sums to zero.
template <typename A>
__device__ __forceinline__ A shift_of(A max) {
  return max == kLowest<A> ? A(0) : max;
}

// What softmax knows of part of a row: its maximum, and the sum of exp(x - shift_of(max)). A NaN
// shows in the sum alone.
template <typename A>
struct ExpSum {
  A max, sum;

  __device__ static ExpSum empty() { return {kLowest<A>, A(0)}; }

  // Commutative to the bit.
  __device__ static ExpSum merge(const ExpSum& a, const ExpSum& b) {
    const bool a_is_larger = a.max > b.max;
    const A max = a_is_larger ? a.max : b.max, smaller_max = a_is_larger ? b.max : a.max;
    const A sum = a_is_larger ? a.sum : b.sum, smaller_sum = a_is_larger ? b.sum : a.sum;
    const A scale = smaller_max == max ? A(1) : exp_of(smaller_max - max);
    return {max, fma(smaller_sum, scale, sum)};
  }
};

// NaN where both are.
__device__ __forceinline__ float larger_of(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger_of(double a, double b) { return fmax(a, b); }

struct LargerOf {
  template <typename A>
  __device__ A operator()(A a, A b) const {
    return larger_of(a, b);
  }
};

template <typename A, int N>
__device__ __forceinline__ A max_of(const A (&values)[N]) {
  return halved(values, LargerOf());
}

// How elements become outputs, given the row's sum and the shift their exponents were taken by.
// softmax: y = exp(x - shift) * factor; log_softmax: y = (x - shift) + offset.
template <bool kLog, typename A>
struct Finish {
  A by;  // factor or offset
  // Where all elements were shifted by the row's maximum: of what of_sum() gives.
  __device__ explicit Finish(A by) : by(by) {}
  __device__ static A of_sum(A sum) { return kLog ? A(0) - log_of(sum) : reciprocal(sum); }
  // `part_max`: the maximum that the shift came from. A sum of zero, a row of nothing but -inf,
  // gives NaN.
  __device__ Finish(const ExpSum<A>& row, A part_max) {
    if constexpr (kLog) {
      by = (shift_of(part_max) - shift_of(row.max)) - log_of(row.sum);
    } else {
      by = exp_of(part_max - shift_of(row.max)) * reciprocal(row.sum);
    }
  }
  // Of softmax: what such a row gives instead.
  __device__ __forceinline__ void of_empty(const ExpSum<A>& row, float result) {
    if (row.sum == A(0)) by = result;
  }
  __device__ A operator()(A difference, A exponential) const {
    return kLog ? difference + by : exponential * by;
  }
};

}  // namespace fused_norm
