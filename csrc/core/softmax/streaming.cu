// Rows of any length: each is read once for its sum, and again for what is made of it. This is the
// slow path: for fp64, and for rows that are too long for the other kernels. Dtypes are known at
// run time (any_rows.cuh); A is the precision of sums.

#include "core/common/any_rows.cuh"
#include "core/common/launch.cuh"
#include "core/softmax/backward.cuh"
#include "core/softmax/launch.h"
#include "core/softmax/policies.cuh"
#include "core/softmax/row.cuh"

namespace fused_norm {

// A thread's share of the columns that a block of a cluster takes: from `first` on, to `end`.
struct StreamedSlice {
  int first, end, step;

  template <int N, typename Group>
  __device__ static StreamedSlice of(const Group& group, int rank, int slice, int cols) {
    const int begin = rank * slice;
    return {begin + any_column<N>(group), min(begin + slice, cols), group.threads() * N};
  }

  // Calls run() with the column that the thread's columns start at, turn by turn. The second time
  // the way is back: what was read last is the likeliest to be in the L2 cache yet.
  template <typename Run>
  __device__ __forceinline__ void walk(Run run) const {
    for (int col = first; col < end; col += step) run(col);
  }
  template <typename Run>
  __device__ __forceinline__ void walk_back(Run run) const {
    if (first >= end) return;
    for (int turn = (end - first - 1) / step; turn >= 0; --turn) run(first + turn * step);
  }
};

template <typename A>
struct StreamedForward {
  int64_t rows;
  int cols, slice;
  AnyRows x;
  AnyOutput y;
  bool log, masked;
  A scale;
  ScoreMask mask;

  // A thread's scores of a row, of which `visible` are not masked out by `causal`.
  template <bool kMasked, int N>
  __device__ __forceinline__ void load(int64_t row, int col, int visible, int64_t mask_offset,
                                       A (&scores)[N]) const {
    x.load(row, col, visible, scores);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int at = col + i * kWarpSize;
      if constexpr (kMasked) {
        A term[1];
        load_mask(mask.mask, mask_offset, {at, 0, 0}, visible, term);
        scores[i] = mask.score(scores[i], scale, term[0], at < visible);
      } else {
        scores[i] = at < visible ? scores[i] : kLowest<A>;
      }
    }
  }
};

template <bool kMasked, typename A>
__device__ __forceinline__ void softmax_forward_twice(const StreamedForward<A>& in,
                                                      RowSlots<ExpSum<A>>& slots) {
  constexpr int N = streamed_elements(1, sizeof(A) == 8);
  RowGroup<true> group;
  RowCluster cluster;
  const RowPosition at(group, cluster, true);
  const int cols = at.row < in.rows ? in.cols : 0;
  const int visible = kMasked ? in.mask.visible(at.row, cols) : cols;
  const int64_t mask_offset = kMasked && visible > 0 ? in.mask.row_offset(at.row) : 0;
  const auto slice = StreamedSlice::of<N>(group, at.rank, in.slice, cols);

  A scores[N];
  ExpSum<A> sum = ExpSum<A>::empty();
  slice.walk([&](int col) {
    in.template load<kMasked>(at.row, col, visible, mask_offset, scores);
    const A before = sum.max;
    sum.max = larger_of(before, max_of(scores));
    const A shift = shift_of(sum.max);
#pragma unroll
    for (int i = 0; i < N; ++i) scores[i] = exp_of(scores[i] - shift);
    sum.sum = fma(sum.sum, exp_of(before - shift), sum_of(scores));
  });
  if (at.spread) cluster.wait();
  sum = group.reduce_lanes(sum, ExpSum<A>::merge);
  sum = reduce_row(group, cluster, at.spread, sum, ExpSum<A>::empty(), slots, ExpSum<A>::merge);

  auto write = [&](const auto& finish, auto is_log) {
    const A shift = shift_of(sum.max);
    slice.walk_back([&](int col) {
      in.template load<kMasked>(at.row, col, visible, mask_offset, scores);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A difference = scores[i] - shift;
        scores[i] = finish(difference, decltype(is_log)::value ? A(0) : exp_of(difference));
      }
      in.y.store(at.row, col, in.cols, scores);
    });
  };
  if (in.log) {
    write(Finish<true, A>(sum, sum.max), std::true_type());
  } else {
    Finish<false, A> finish(sum, sum.max);
    if constexpr (kMasked) finish.of_empty(sum, in.mask.of_empty);
    write(finish, std::false_type());
  }
}

template <typename A>
__global__ void __launch_bounds__(kBlockTierThreads, 2)
    softmax_forward_streaming(const __grid_constant__ StreamedForward<A> in) {
  __shared__ RowSlots<ExpSum<A>> slots;
  meet_previous_kernel();
  with_flag(in.masked,
            [&](auto masked) { softmax_forward_twice<decltype(masked)::value>(in, slots); });
}

template <typename A>
struct StreamedBackward {
  int64_t rows;
  int cols, slice;
  AnyRows dy, y;
  AnyOutput dx;
  bool log;
  A scale;
};

template <bool kLog, typename A>
__device__ __forceinline__ void softmax_backward_twice(const StreamedBackward<A>& in) {
  constexpr int N = streamed_elements(2, sizeof(A) == 8);
  __shared__ RowSlots<A> slots;
  RowGroup<true> group;
  RowCluster cluster;
  const RowPosition at(group, cluster, true);
  const int cols = at.row < in.rows ? in.cols : 0;
  const auto slice = StreamedSlice::of<N>(group, at.rank, in.slice, cols);

  A dy[N], y[N], sum = 0;
  slice.walk([&](int col) {
    in.dy.load(at.row, col, in.cols, dy);
    if (!kLog) in.y.load(at.row, col, in.cols, y);
#pragma unroll
    for (int i = 0; i < N; ++i) dy[i] = kLog ? dy[i] : dy[i] * y[i];
    sum += sum_of(dy);
  });
  if (at.spread) cluster.wait();
  sum =
      reduce_row(group, cluster, at.spread, group.reduce_lanes(sum, SumOf()), A(0), slots, SumOf());

  slice.walk_back([&](int col) {
    in.dy.load(at.row, col, in.cols, dy);
    in.y.load(at.row, col, in.cols, y);
#pragma unroll
    for (int i = 0; i < N; ++i) dy[i] = gradient_of<kLog>(dy[i], y[i], sum, in.scale);
    in.dx.store(at.row, col, in.cols, dy);
  });
}

template <typename A>
__global__ void __launch_bounds__(kBlockTierThreads, 2)
    softmax_backward_streaming(const __grid_constant__ StreamedBackward<A> in) {
  meet_previous_kernel();
  with_flag(in.log, [&](auto log) { softmax_backward_twice<decltype(log)::value>(in); });
}

cudaError_t softmax_streaming(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                              cudaStream_t stream) {
  return with_accumulator(params.x_dtype, [&](auto zero) {
    using A = decltype(zero);
    const StreamedForward<A> in{params.rows,
                                params.cols,
                                plan.slice,
                                {params.x, params.x_dtype, params.x_layout},
                                {params.y, params.y_dtype},
                                params.log,
                                plan.pass == SoftmaxPass::kMaskedForward,
                                static_cast<A>(params.scale),
                                score_mask_of(params)};
    return launch_plan(softmax_forward_streaming<A>, plan, stream, in);
  });
}

cudaError_t softmax_streaming(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                              cudaStream_t stream) {
  return with_accumulator(params.x_dtype, [&](auto zero) {
    using A = decltype(zero);
    const StreamedBackward<A> in{params.rows,
                                 params.cols,
                                 plan.slice,
                                 {params.dy, params.y_dtype, params.dy_layout},
                                 {params.y, params.y_dtype, params.y_layout},
                                 {params.dx, params.x_dtype},
                                 params.log,
                                 static_cast<A>(params.scale)};
    return launch_plan(softmax_backward_streaming<A>, plan, stream, in);
  });
}

}  // namespace fused_norm
