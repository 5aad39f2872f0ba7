// What the backward kernels read and write. With w = dy * (weight + offset), and xhat from the
// saved input or output,
//   dx = rstd * (w - mean(w) - xhat * mean(w * xhat))      (RMSNorm: without mean(w))
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
// in two stages without atomics: blocks that walk over rows write partial sums (backward.cuh,
// backward_ring.cuh for long rows, or streaming.cu for any length), then sum_partials() adds those
// in a fixed order (partial_sums.cuh). Of few rows one kernel makes all (backward_few.cuh).
#pragma once

#include "core/common/row_slice.cuh"
#include "core/common/statistics.cuh"
#include "core/norm/columns.cuh"
#include "core/norm/policies.cuh"

namespace fused_norm {

// What the kernels read. The saved tensor has dtype S: the input's, or the output's when
// from_output.
template <typename Y, typename S, typename A>
struct BackwardInput {
  int64_t rows;
  int cols;
  A per_cols;  // 1 / cols
  bool rms, from_output;
  const Y* dy;
  RowLayout dy_layout;
  const S* saved;
  RowLayout saved_layout;
  const A* mean;  // null: no mean to subtract
  const A* rstd;
  ParamVector weight, bias;
  A weight_offset;
  ListedColumns<A> list;

  static constexpr bool kGates = false;
  using Gradient = Y;
  using Kept = S;
};

// Whether LayerNorm's kernels are also RMSNorm's, and find out at run time: two dtypes are seldom.
template <typename X, typename Y>
constexpr bool kForBothNorms = !std::is_same_v<X, Y>;

// Gradients; null where not asked for. Partials are [2][partial rows][cols]: dweight's, then
// dbias's.
template <typename X, typename A>
struct BackwardOutput {
  X* dx;
  A* dweight_partials;
  A* dbias_partials;
  const X* dresidual;  // null, or what is added to dx, which lies likewise

  // Brings a slice near, which starts at element `first` and has packs `step` apart.
  template <RowsLie kLie, int N, int kPacks>
  __device__ __forceinline__ void prefetch_residual(int64_t first, int left, int step) const {
    // Each lane what would be its pack.
    const int near = static_cast<int>(threadIdx.x) % kWarpSize * (N - unit_of(kLie, N));
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (near + p * step < left) prefetch_to_l2(dresidual + first + near + p * step);
    }
  }

  // Adds to a pack of dx, which starts at element `at`; `left` columns of the row remain from there
  // on. Values past the row's end get anything.
  template <RowsLie kLie, int N>
  __device__ __forceinline__ void add_residual(int64_t at, int left, A (&gradient)[N],
                                               int lanes = kWarpSize) const {
    constexpr int kAtOnce = dealt_out(kLie) ? 1 : N;
#pragma unroll
    for (int i = 0; i < N; i += kAtOnce) {
      const int column = column_in_pack(kLie, N, i, lanes);
      if (column >= left) break;
      A added[kAtOnce];
      unpack(Pack<X, kAtOnce>{load_words<sizeof(X) * kAtOnce>(dresidual + at + column)}, added);
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) gradient[i + e] += added[e];
    }
  }
};

// 1 / g of any normal number: reciprocal() is 0 beyond 2^126. A division has branches, which keep
// those of several columns from overlapping.
template <typename A>
__device__ __forceinline__ A reciprocal_of_any(A g) {
  const A unit = fabs(g) > A(0x1p64) ? A(0x1p-64) : A(1);
  return reciprocal(g * unit) * unit;
}

// 1 / weight of a column; NaN where that is not recoverable.
template <typename A>
__device__ __forceinline__ A scale_of(const RecoverableLimits<A>& recoverable, A g, A bias) {
  return meets(recoverable, g, bias) ? reciprocal_of_any(g) : static_cast<A>(NAN);
}

// xhat = (saved - shift) * scale. From the input both are the row's (mean, rstd); from the output
// they are the column's (bias, 1 / weight). A listed column has (its place in the list, 0), and its
// xhat is taken from there; one that is not recoverable and not listed has a scale of NaN.
template <typename A, int N>
struct ColumnParams {
  A weight[N], shift[N], scale[N];
  uint32_t listed;  // a bit for each column

  // Parameters of a pack's columns from `col` on; zero past the end, so that such columns add
  // nothing anywhere. kListed: some columns may be listed.
  template <bool kListed, RowsLie kLie, typename In>
  __device__ static ColumnParams load(const In& in, int col) {
    ColumnParams params;
    params.listed = 0;
    AskedParams<A, N, true, kLie>(in, col).take(in, col, kWarpSize, params.weight, params.shift);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int column = col + column_in_pack(kLie, N, i);
      params.scale[i] = A(0);
      if (!in.from_output || column >= in.cols) continue;
      const A g = params.weight[i], bias = params.shift[i];
      params.scale[i] = scale_of(in.list.recoverable, g, bias);
      if (kListed && !meets(in.list.precise, g, bias)) {
        const int place = in.list.find(column);
        if (place >= 0) {
          params.shift[i] = static_cast<A>(place);
          params.scale[i] = A(0);
          params.listed |= 1u << i;
        }
      }
    }
    return params;
  }

  // Puts the listed columns' values in a row's `xhat`.
  __device__ __forceinline__ void take_listed(const ListedColumns<A>& list, int64_t row,
                                              A (&xhat)[N]) const {
    if (listed == 0) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (listed >> i & 1) xhat[i] = list.xhat(row, static_cast<int>(shift[i]));
    }
  }
};

// dx = rstd * (w - mean(w) - xhat * mean(w * xhat)) of a row, given its sums.
template <bool kRms>
struct RowGradient {
  float rstd, of_xhat, constant;

  __device__ __forceinline__ RowGradient(float rstd, float per_cols, float sum_w, float sum_wx)
      : rstd(rstd),
        of_xhat(-rstd * (sum_wx * per_cols)),
        constant(kRms ? 0.0f : -rstd * (sum_w * per_cols)) {}
  __device__ __forceinline__ float at(float w, float xhat) const {
    return fmaf(xhat, of_xhat, kRms ? w * rstd : fmaf(w, rstd, constant));
  }
};

// Makes a row's sums of what each thread of a group has of them.
template <bool kRms, typename Group, typename Sums>
__device__ __forceinline__ void sum_up_group(const Group& group, Sums& sums, float& sum_w,
                                             float& sum_wx) {
  if constexpr (kRms) {
    sums.add_up(group, sum_wx);
  } else {
    sums.add_up(group, sum_w, sum_wx);
  }
}

// A row's sums: of w (LayerNorm) and of w * xhat.
template <typename A, bool kRms>
struct GradientSums {
  A w, wx;
  __device__ static GradientSums merge(const GradientSums& a, const GradientSums& b) {
    return {a.w + b.w, a.wx + b.wx};
  }
};
template <typename A>
struct GradientSums<A, true> {
  A wx;
  __device__ static GradientSums merge(const GradientSums& a, const GradientSums& b) {
    return {a.wx + b.wx};
  }
};

}  // namespace fused_norm
