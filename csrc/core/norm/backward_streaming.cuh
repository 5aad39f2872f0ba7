// Backward for rows of any length, in two kernels that each read the rows.
#pragma once

#include "core/norm/backward_input.cuh"

namespace fused_norm {

// dx of one element, given the row's means of w and w * xhat.
template <typename A>
__device__ __forceinline__ A gradient_of_x(A w, A xhat, A rstd,
                                           const GradientSums<A, false>& means) {
  return rstd * (w - means.w - xhat * means.wx);
}

// Any length, first kernel: the sums of w and w * xhat of each row, as means[row] = {mean(w),
// mean(w * xhat)}.
template <typename Y, typename S, typename A, bool kListed>
__global__ void __launch_bounds__(kMaxRowMeansThreads)
    norm_backward_row_means(const __grid_constant__ BackwardInput<Y, S, A> in, A* means) {
  constexpr int N = kPackElements<S, Y>;
  constexpr int kPacks = sizeof(A) == 8 ? 1 : 2;
  using Sums = GradientSums<A, false>;
  __shared__ Sums slots[2][kMaxWarps];

  RowGroup<Barrier::kNamed> group;
  const int step = group.threads() * N;
  for (int64_t first = int64_t{blockIdx.x} * group.groups(); first < in.rows;
       first += int64_t{gridDim.x} * group.groups()) {
    const int64_t row = first + group.index();
    const bool in_range = row < in.rows;
    const A mean = in.mean && in_range ? in.mean[row] : A(0);
    const A rstd = in_range ? in.rstd[row] : A(0);
    const auto saved_row = in.template open_saved<N>(row, group);
    const auto dy_row = in.template open_dy<N>(row, group);
    Sums sums{};
    for (int base = 0; base < in.cols; base += kPacks * step) {
      const int col = base + group.thread() * N;
      Pack<S, N> saved[kPacks];
      Pack<Y, N> dy[kPacks];
      saved_row.load(saved, col, step);
      dy_row.load(dy, col, step);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const auto params = ColumnParams<A, N>::template load<true, kListed>(in, col + p * step);
        A xhat[N], d[N];
        unpack(saved[p], xhat);
        unpack(dy[p], d);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          xhat[i] = in.from_output ? (xhat[i] - params.shift[i]) * params.scale[i]
                                   : (xhat[i] - mean) * rstd;
        }
        if (kListed && in_range) params.take_listed(in.list, row, xhat);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const A w = d[i] * params.weight[i];
          sums.w += w;
          sums.wx += w * xhat[i];
        }
      }
    }
    sums = group.reduce_warps(group.reduce_lanes(sums, Sums::merge), Sums{}, slots, Sums::merge);
    if (in_range && group.thread() == 0) {
      means[2 * row] = sums.w / in.cols;
      means[2 * row + 1] = sums.wx / in.cols;
    }
  }
}

// Any length, second kernel: a thread owns one pack of columns and walks over every gridDim.y-th
// row.
template <typename X, typename Y, typename S, typename A, bool kListed>
__global__ void __launch_bounds__(kTileThreads)
    norm_backward_columns(const __grid_constant__ BackwardInput<Y, S, A> in,
                          const __grid_constant__ BackwardOutput<X, A> out, const A* means) {
  constexpr int N = kPackElements<X, Y>;
  out.clear_totals();
  const RowGroup<Barrier::kBlock> group;
  const int col = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  const auto params = ColumnParams<A, N>::template load<true, kListed>(in, col);
  A dweight[N] = {}, dbias[N] = {};
  Pack<S, N> saved[1];
  Pack<Y, N> dy[1];
  auto fetch = [&](int64_t row) {
    in.template open_saved<N>(row, group).load(saved, col, 0);
    in.template open_dy<N>(row, group).load(dy, col, 0);
  };
  fetch(blockIdx.y);
  for (int64_t row = blockIdx.y; row < in.rows; row += gridDim.y) {
    A xhat[N], d[N];
    unpack(saved[0], xhat);
    unpack(dy[0], d);
    if (row + gridDim.y < in.rows) fetch(row + gridDim.y);
    const A mean = in.mean ? in.mean[row] : A(0);
    const A rstd = in.rstd[row];
    GradientSums<A, false> row_means{};
    if (out.dx != nullptr) row_means = {in.rms ? A(0) : means[2 * row], means[2 * row + 1]};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      xhat[i] =
          in.from_output ? (xhat[i] - params.shift[i]) * params.scale[i] : (xhat[i] - mean) * rstd;
    }
    if (kListed) params.take_listed(in.list, row, xhat);
    A gradient[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dweight[i] += d[i] * xhat[i];
      dbias[i] += d[i];
      gradient[i] = gradient_of_x(d[i] * params.weight[i], xhat[i], rstd, row_means);
    }
    if (out.dx != nullptr) {
      Pack<X, N> dx;
      if (out.dresidual != nullptr) {
        Pack<X, N> residual[1];
        out.template open_dresidual<N>(row, in.rows, in.cols, group).load(residual, col, 0);
        A added[N];
        unpack(residual[0], added);
#pragma unroll
        for (int i = 0; i < N; ++i) gradient[i] += added[i];
      }
      round_to(dx, gradient);
      out.template open_dx<N>(row, in.rows, in.cols, group).store(col, dx);
    }
  }
  const int64_t partial = int64_t{blockIdx.y} * in.cols;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (col + i >= in.cols) break;
    if (out.dweight_partials) out.dweight_partials[partial + col + i] = dweight[i];
    if (out.dbias_partials) out.dbias_partials[partial + col + i] = dbias[i];
  }
}

}  // namespace fused_norm
