// Rows of any length: each is read once for its sums, and again for what is made of them. This is
// the slow path: for fp64, and for rows that are too long for the other kernels. Dtypes are known
// at run time (any_rows.cuh); A is the precision of sums.

#include "core/common/any_rows.cuh"
#include "core/common/branch.cuh"
#include "core/common/launch.cuh"
#include "core/common/overlap.cuh"
#include "core/common/statistics.cuh"
#include "core/norm/backward_input.cuh"
#include "core/norm/forward.cuh"
#include "core/norm/launchers.cuh"

namespace fused_norm {

// A thread's columns at a time.
template <typename A>
constexpr int kForwardColumns = streamed_columns(true, sizeof(A));
template <typename A>
constexpr int kBackwardColumns = streamed_columns(false, sizeof(A));

template <typename A>
struct StreamedForward {
  int64_t rows;
  int cols;
  AnyRows x;
  AnyOutput y;
  ParamVector weight, bias;
  A weight_offset;
  StatisticsOut<A, true> out;
};

template <bool kRms, typename A>
__device__ __forceinline__ void norm_forward_twice(const StreamedForward<A>& in) {
  using Statistics = std::conditional_t<kRms, SumOfSquares<A>, Moments<A>>;
  constexpr int N = kForwardColumns<A>;
  __shared__ __align__(16) char slot_bytes[2 * kMaxWarps * sizeof(Statistics)];
  auto& slots = reinterpret_cast<Statistics(&)[2][kMaxWarps]>(slot_bytes);

  RowGroup<true> group;
  meet_previous_kernel();
  const int64_t row = int64_t{blockIdx.x} * group.groups() + group.index();
  const int cols = row < in.rows ? in.cols : 0;
  const int first = any_column<N>(group), step = group.threads() * N;
  A x[N];
  Statistics of_warp;
  for (int base = 0; base < in.cols; base += step) {
    const int col = base + first;
    in.x.load(row, col, cols, x);
    of_warp = Statistics::merge(of_warp, Statistics::of(group, x, cols - col));
  }
  const Statistics of_row = group.reduce_warps(of_warp, Statistics(), slots, Statistics::merge);
  const A mean = of_row.row_mean();
  const auto rstd = in.out.rstd_of(of_row.sum_of_squares());
  if (group.thread() == 0 && cols > 0) in.out.write(row, mean, rstd.nearest(), kRms);

  for (int col = first; col < cols; col += step) {
    A g[N], b[N];
    in.x.load(row, col, cols, x);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      g[i] = A(1);
      b[i] = A(0);
    }
    if (in.weight.data) {
      AnyRows{in.weight.data, in.weight.dtype}.load(0, col, cols, g);
#pragma unroll
      for (int i = 0; i < N; ++i) g[i] += in.weight_offset;
    }
    if (!kRms && in.bias.data) AnyRows{in.bias.data, in.bias.dtype}.load(0, col, cols, b);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A xhat = rstd.times(x[i] - mean);
      x[i] = kRms ? xhat * g[i] : fma(xhat, g[i], b[i]);
    }
    in.y.store(row, col, cols, x);
  }
}

template <typename A>
__global__ void __launch_bounds__(kMaxForwardThreads, 2)
    norm_forward_streaming(const __grid_constant__ StreamedForward<A> in, bool rms) {
  with_flag(rms, [&](auto is_rms) { norm_forward_twice<decltype(is_rms)::value>(in); });
}

// What the backward kernels read and write; null where not asked for.
template <typename A>
struct StreamedBackward {
  int64_t rows;
  int cols;
  bool rms, from_output;
  AnyRows dy, saved, dresidual;
  AnyOutput dx;
  const A* mean;
  const A* rstd;
  ParamVector weight, bias;
  A weight_offset;
  ListedColumns<A> list;
  A* means;  // of each row, those of w and of w * xhat
  A* dweight_partials;
  A* dbias_partials;
};

// A thread's dy and xhat of some columns of a row; zero past the row's end.
template <typename A, int N>
struct StreamedRow {
  A dy[N], xhat[N];

  __device__ __forceinline__ void load(const StreamedBackward<A>& in, int64_t row, int col,
                                       int cols) {
    in.saved.load(row, col, cols, xhat);
    in.dy.load(row, col, cols, dy);
  }
  // Makes xhat of what was saved.
  __device__ __forceinline__ void normalize(const StreamedBackward<A>& in, int64_t row,
                                            const ColumnParams<A, N>& params) {
    const A mean = in.mean ? in.mean[row] : A(0), rstd = in.rstd[row];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      xhat[i] =
          in.from_output ? (xhat[i] - params.shift[i]) * params.scale[i] : (xhat[i] - mean) * rstd;
    }
    params.take_listed(in.list, row, xhat);
  }
};

// First kernel: each row's means of w and of w * xhat.
template <typename A>
__global__ void __launch_bounds__(kMaxRowMeansThreads, 2)
    norm_backward_row_means(const __grid_constant__ StreamedBackward<A> in) {
  constexpr int N = kBackwardColumns<A>;
  using Sums = GradientSums<A, false>;
  __shared__ Sums slots[2][kMaxWarps];

  RowGroup<true> group;
  const int64_t row = int64_t{blockIdx.x} * group.groups() + group.index();
  const int cols = row < in.rows ? in.cols : 0;
  Sums sums{};
  for (int col = any_column<N>(group); col < cols; col += group.threads() * N) {
    StreamedRow<A, N> of;
    of.load(in, row, col, cols);
    const auto params = ColumnParams<A, N>::template load<true, RowsLie::kElements>(in, col);
    of.normalize(in, row, params);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A w = of.dy[i] * params.weight[i];
      sums.w += w;
      sums.wx += w * of.xhat[i];
    }
  }
  sums = group.reduce_warps(group.reduce_lanes(sums, Sums::merge), Sums{}, slots, Sums::merge);
  if (cols > 0 && group.thread() == 0) {
    in.means[2 * row] = sums.w / in.cols;
    in.means[2 * row + 1] = sums.wx / in.cols;
  }
}

// Second kernel: a thread owns some columns, and walks over every gridDim.y-th row.
template <typename A>
__global__ void __launch_bounds__(kTileThreads, 6)
    norm_backward_columns(const __grid_constant__ StreamedBackward<A> in) {
  constexpr int N = kBackwardColumns<A>;
  const RowGroup<true> group;
  const int col = blockIdx.x * kTileThreads * N + any_column<N>(group);
  const auto params = ColumnParams<A, N>::template load<true, RowsLie::kElements>(in, col);
  A dweight[N] = {}, dbias[N] = {};
  StreamedRow<A, N> next;
  next.load(in, blockIdx.y, col, in.cols);
  for (int64_t row = blockIdx.y; row < in.rows; row += gridDim.y) {
    StreamedRow<A, N> of = next;
    if (row + gridDim.y < in.rows) next.load(in, row + gridDim.y, col, in.cols);
    of.normalize(in, row, params);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dweight[i] += of.dy[i] * of.xhat[i];
      dbias[i] += of.dy[i];
    }
    if (in.dx.data == nullptr) continue;
    const A mean_w = in.rms ? A(0) : in.means[2 * row], mean_wx = in.means[2 * row + 1];
    const A rstd = in.rstd[row];
    A added[N] = {};
    if (in.dresidual.data) in.dresidual.load(row, col, in.cols, added);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A w = of.dy[i] * params.weight[i];
      added[i] += rstd * (w - mean_w - of.xhat[i] * mean_wx);
    }
    in.dx.store(row, col, in.cols, added);
  }
  const AnyOutput dweights{in.dweight_partials, kDTypeOf<A>},
      dbiases{in.dbias_partials, kDTypeOf<A>};
  if (dweights.data) dweights.store(blockIdx.y, col, in.cols, dweight);
  if (dbiases.data) dbiases.store(blockIdx.y, col, in.cols, dbias);
}

cudaError_t norm_stream_forward(const NormForwardParams& params, const NormForwardPlan& plan,
                                cudaStream_t stream) {
  return with_accumulator(params.x_dtype, [&](auto zero) {
    using A = decltype(zero);
    const StreamedForward<A> in{
        params.rows,
        params.cols,
        {params.x, params.x_dtype, params.x_layout},
        {params.y, params.y_dtype},
        params.weight,
        params.bias,
        static_cast<A>(params.weight_offset),
        {static_cast<A*>(params.mean), static_cast<A*>(params.rstd), static_cast<A>(params.eps),
         static_cast<A>(params.cols), A(1) / params.cols}};
    return launch_plan(norm_forward_streaming<A>, plan, stream, in, params.rms);
  });
}

cudaError_t norm_stream_backward(const NormBackwardParams& params, const NormBackwardPlan& plan,
                                 cudaStream_t stream) {
  return with_accumulator(params.x_dtype, [&](auto zero) {
    using A = decltype(zero);
    const BackwardWorkspace<A> workspace(params, plan);
    const ColumnLook<A> look = column_look_of<A>(params);
    const StreamedBackward<A> in{
        params.rows,
        params.cols,
        params.rms,
        params.from_output,
        {params.dy, params.y_dtype, params.dy_layout},
        {params.saved, params.from_output ? params.y_dtype : params.x_dtype, params.saved_layout},
        {params.dresidual, params.x_dtype, one_stride(params.cols)},
        {params.dx, params.x_dtype},
        static_cast<const A*>(params.mean),
        static_cast<const A*>(params.rstd),
        params.weight,
        params.bias,
        static_cast<A>(params.weight_offset),
        look.listed,
        workspace.rest,
        workspace.dweight,
        workspace.dbias};
    if (params.dx) {
      const cudaError_t error =
          launch(norm_backward_row_means<A>, plan.blocks,
                 dim3(plan.threads_per_row, plan.rows_per_block), {}, stream, in);
      if (error != cudaSuccess) return error;
    }
    const cudaError_t error = launch(norm_backward_columns<A>, dim3(plan.tiles, plan.partials),
                                     kTileThreads, {}, stream, in);
    if (error != cudaSuccess) return error;
    return norm_second_stage(params, plan, workspace, look, stream);
  });
}

}  // namespace fused_norm
