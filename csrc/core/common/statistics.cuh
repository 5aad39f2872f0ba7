// Row statistics: mean and mean square about it, of a row whose values a group's threads hold.
#pragma once

#include <cuda_runtime.h>

#include <limits>
#include <type_traits>

#include "core/common/pack.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr float kLog2E = 1.4426950408889634f;

// 2^x; 0 for -inf.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / v by the hardware, and to one ulp with a Newton step; for normal v.
__device__ __forceinline__ float approximate_reciprocal(float v) { return __fdividef(1.0f, v); }
__device__ __forceinline__ double approximate_reciprocal(double v) { return 1.0 / v; }
__device__ __forceinline__ float reciprocal(float v) {
  const float r = approximate_reciprocal(v);
  return fmaf(r, fmaf(-v, r, 1.0f), r);
}
__device__ __forceinline__ double reciprocal(double v) { return 1.0 / v; }

// a + b without loss, as its rounded value and the rest (Knuth's two-sum; the same for b + a).
template <typename A>
struct ExactSum {
  A value, rest;
  __device__ ExactSum(A a, A b) : value(a + b) {
    const A b_part = value - a;
    rest = (a - (value - b_part)) + (b - b_part);
  }
};

// rstd. Where an fp32 output shows the last bit (kExact) it has two parts. `value` is cut off, not
// rounded, so that `rest` is not negative, and -0 stays -0.
template <typename A, bool kExact>
struct Rstd {
  A value, rest;
  __device__ __forceinline__ A nearest() const { return kExact ? value + rest : value; }
  __device__ __forceinline__ A times(A x) const {
    return kExact ? fma(x, value, x * rest) : x * value;
  }
};

// 1 / sqrt(squares / cols + eps): a Newton step after the hardware's rsqrt. As rsqrt for zero,
// infinity and NaN. Where an fp32 output shows the last bit (kExact), quotient, sum and product
// carry their rounding errors into the step.
template <bool kExact>
__device__ __forceinline__ Rstd<float, kExact> reciprocal_root_mean(float squares, float cols,
                                                                    float per_cols, float eps) {
  const float mean_square = squares * per_cols;
  const float v = kExact ? mean_square + eps : fmaf(squares, per_cols, eps);
  const float r = rsqrtf(v);
  const float vr = v * r;
  float residual = fmaf(-vr, r, 1.0f);
  if constexpr (kExact) {
    const float quotient_rest = fmaf(-mean_square, cols, squares) * per_cols;
    const float v_rest = ExactSum<float>(mean_square, eps).rest + quotient_rest;
    residual -= (fmaf(v, r, -vr) + v_rest * r) * r;
  }
  if (!(v > 0.0f && v < kInfinity)) return {r, 0.0f};
  const float half_r = 0.5f * r;
  const float value = kExact ? __fmaf_rz(half_r, residual, r) : fmaf(half_r, residual, r);
  return {value, fmaf(half_r, residual, r - value)};
}
template <bool>
__device__ __forceinline__ Rstd<double, false> reciprocal_root_mean(double squares, double cols,
                                                                    double, double eps) {
  return {1.0 / sqrt(squares / cols + eps), 0.0};
}

// Combines N values as a tree: short chains of dependent operations, small rounding errors.
template <typename A, int N, typename Combine>
__device__ __forceinline__ A halved(const A (&values)[N], Combine combine) {
  A left[N];
#pragma unroll
  for (int i = 0; i < N; ++i) left[i] = values[i];
#pragma unroll
  for (int width = N / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) left[i] = combine(left[i], left[i + width]);
  }
  return left[0];
}
template <typename A, int N>
__device__ __forceinline__ A sum_of(const A (&values)[N]) {
  return halved(values, SumOf());
}

template <typename A>
struct SumAndSquares {
  A sum, squares;
  __device__ static SumAndSquares merge(const SumAndSquares& a, const SumAndSquares& b) {
    return {a.sum + b.sum, a.squares + b.squares};
  }
};

// What LayerNorm knows of part of a row. Mean and m2 = sum (x - mean)^2 come with what their
// rounding left, so that merging loses none of it: rounded at every merge, the mean of a row far
// from zero would be off by several units in the last place.
template <typename A>
struct Moments {
  A count = 0, mean = 0, mean_rest = 0, m2 = 0, m2_rest = 0;

  // Chan, Golub and LeVeque's parallel form of Welford's update, arranged to be commutative to the
  // bit, exact for equal means, and free of 0 * inf when one side is empty.
  __device__ static Moments merge(const Moments& a, const Moments& b) {
    const A count = a.count + b.count;
    const A per_count = approximate_reciprocal(max(count, A(1)));
    // An empty part has the other's mean: beside a difference of the mean's size, the rest is lost.
    const Moments &of_a = a.count == A(0) ? b : a, &of_b = b.count == A(0) ? a : b;
    const A delta = (of_b.mean - of_a.mean) + (of_b.mean_rest - of_a.mean_rest);
    const ExactSum<A> means(of_a.mean, of_b.mean);
    const A mean_rest = A(0.5) * ((of_a.mean_rest + of_b.mean_rest) + means.rest +
                                  delta * ((b.count - a.count) * per_count));
    const ExactSum<A> m2(a.m2, b.m2);
    const A between = (delta * (a.count * b.count * per_count)) * delta;
    return {count, A(0.5) * means.value, mean_rest, m2.value,
            (a.m2_rest + b.m2_rest) + m2.rest + between};
  }

  // Of a warp's part of a row, the same in all lanes; a lane's N values are those of columns a
  // warp's width apart, of which `left` remain from its first one on. Two passes over registers;
  // the second, about the first one's mean, also finds how far that is off, so that rows far from
  // zero lose nothing and the mean of a constant row is exact (the corrected two-pass algorithm of
  // Chan, Golub and LeVeque).
  template <int N, typename Group>
  __device__ __forceinline__ static Moments of(const Group& group, const A (&x)[N], int left) {
    const int count = max(0, min(left + group.lane(), N * kWarpSize));
    const A per_count = reciprocal(static_cast<A>(max(count, 1)));
    A sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += x[i];  // zero past the row
    const A mean = group.reduce_lanes(sum, SumOf()) * per_count;

    SumAndSquares<A> centred{0, 0};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A difference = i * kWarpSize < left ? x[i] - mean : A(0);
      centred.sum += difference;
      centred.squares += difference * difference;
    }
    centred = group.reduce_lanes(centred, SumAndSquares<A>::merge);
    const A correction = centred.sum * per_count;
    return {static_cast<A>(count), mean, correction, centred.squares, -centred.sum * correction};
  }
  __device__ A row_mean() const { return mean + mean_rest; }
  __device__ A sum_of_squares() const { return m2 + m2_rest; }  // about the mean
};

// What RMSNorm knows of part of a row.
template <typename A>
struct SumOfSquares {
  A sum = 0, rest = 0;  // of the squares, and what their addition rounded off

  // Columns past the row are zero and add nothing.
  template <int N, typename Group>
  __device__ static SumOfSquares of(const Group& group, const A (&x)[N], int) {
    A squares[N];
#pragma unroll
    for (int i = 0; i < N; ++i) squares[i] = x[i] * x[i];
    return group.reduce_lanes(SumOfSquares{sum_of(squares), 0}, merge);
  }
  __device__ static SumOfSquares merge(const SumOfSquares& a, const SumOfSquares& b) {
    const ExactSum<A> sum(a.sum, b.sum);
    return {sum.value, (a.rest + b.rest) + sum.rest};
  }
  __device__ A row_mean() const { return 0; }
  __device__ A sum_of_squares() const {
    const A total = sum + rest;
    return total == total ? total : sum;  // the rest of an infinity is NaN
  }
};

}  // namespace fused_norm
