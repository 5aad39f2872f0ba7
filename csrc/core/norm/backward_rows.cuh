// How the rows of backward kernels come to their threads: a group's next row is on its way, in
// registers or through shared memory, while it works on one; and what they make of a row.
#pragma once

#include "core/common/slice_queue.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/norm/staged_params.cuh"

namespace fused_norm {

// Each thread loads its own columns of the next row, from `col` on; rows that are dealt out.
template <typename Y, typename S, int N, RowsLie kLie, int kPacks, typename Group>
class RowsInRegisters {
 public:
  // Of the rows row, row + stride, ...
  __device__ RowsInRegisters(const BackwardInput<Y, S, float>& in, const Group& group, int col,
                             int64_t row, int64_t stride)
      : rows_(in.rows),
        group_(group),
        left_(in.cols - col),
        saved_at_(in.saved, in.saved_layout, min(row, in.rows - 1), stride, col),
        dy_at_(in.dy, in.dy_layout, min(row, in.rows - 1), stride, col) {}
  // Of no row if that is past the end.
  __device__ __forceinline__ void ask_for_first(int64_t row) {
    if (row < rows_) fetch();
  }

  // The row at hand; of one past the end, anything.
  __device__ __forceinline__ void take(int64_t, float (&saved)[kPacks][N],
                                       float (&dy)[kPacks][N]) const {
    saved_.extract(saved_loaded_, group_,
                   [&](int p, const Pack<S, N>& pack) { unpack(pack, saved[p]); });
    dy_.extract(dy_loaded_, group_, [&](int p, const Pack<Y, N>& pack) { unpack(pack, dy[p]); });
  }
  // Asks for the next one, which is `row`.
  __device__ __forceinline__ void ask_for(int64_t row) {
    saved_at_.step(row);
    dy_at_.step(row);
    fetch();
  }

 private:
  __device__ __forceinline__ void fetch() {
    saved_.fetch(saved_at_.at(), left_, group_, saved_loaded_);
    dy_.fetch(dy_at_.at(), left_, group_, dy_loaded_);
  }

  using SavedReader = ReaderOf<S, N, kLie, kPacks>;
  using GradientReader = ReaderOf<Y, N, kLie, kPacks>;
  int64_t rows_;
  const Group& group_;
  int left_;
  RowCursor<const S> saved_at_;
  RowCursor<const Y> dy_at_;
  SavedReader saved_;
  GradientReader dy_;
  typename SavedReader::Loaded saved_loaded_;
  typename GradientReader::Loaded dy_loaded_;
};

// Each thread copies its own packs of the next row to shared memory; regular rows.
template <typename Y, typename S, int N, int kPacks, typename Group>
class RowsInQueue : public SliceQueue<N, kPacks, Group, S, Y> {
 public:
  // `memory`: of the block, slice_queue_bytes() for each thread.
  __device__ RowsInQueue(const BackwardInput<Y, S, float>& in, const Group& group, int col,
                         int64_t row, int64_t stride, char* memory)
      : SliceQueue<N, kPacks, Group, S, Y>(
            group, memory, in.rows, stride, in.cols - col,
            {in.saved, in.saved_layout, min(row, in.rows - 1), stride, col},
            {in.dy, in.dy_layout, min(row, in.rows - 1), stride, col}) {}

  // Asks for the next row too.
  __device__ __forceinline__ void take(int64_t row, float (&saved)[kPacks][N],
                                       float (&dy)[kPacks][N]) {
    this->turn_to(row);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      unpack(this->template pack<0>(p), saved[p]);
      unpack(this->template pack<1>(p), dy[p]);
#pragma unroll
      for (int i = 0; i < N; ++i) keep(saved[p][i]), keep(dy[p][i]);
    }
  }
};

// Pass 1 of a row, of which `left` columns remain from the thread's first on; the thread's packs
// are `step` columns apart. Makes xhat of what was saved and w of dy, adds them to the columns'
// sums, and gives the thread's part of the row's sums: packs 0 and 2 are added first, then pack 1,
// as lanes with one pack each would add them.
template <bool kRms, bool kFromOutput, typename Params, typename Listed, typename Add, int kPacks,
          int N>
__device__ __forceinline__ void add_up_row(const Params& params, const Listed& listed, int left,
                                           int step, float mean, float rstd,
                                           float (&xhat)[kPacks][N], float (&w)[kPacks][N], Add add,
                                           float& sum_w, float& sum_wx) {
  float g[N], of_w[N], of_wx[N], odd_w = 0, odd_wx = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (p * step >= left) break;
    if constexpr (kFromOutput) {
      params.take_back(p, xhat[p], listed.any(), listed.turn());
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        xhat[p][i] = kRms ? xhat[p][i] * rstd : (xhat[p][i] - mean) * rstd;
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) of_w[i] = of_wx[i] = 0;
    params.get(kWeight, p, g);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float d = w[p][i];
      add(p, i, d);
      of_w[i] = w[p][i] = d * g[i];
      of_wx[i] = of_w[i] * xhat[p][i];
    }
    if (!kRms) (p % 2 == 0 ? sum_w : odd_w) += tree_sum<N>(of_w);
    (p % 2 == 0 ? sum_wx : odd_wx) += tree_sum<N>(of_wx);
  }
  if (kPacks > 1) sum_w += odd_w, sum_wx += odd_wx;
}

// Pass 2: makes dx of xhat and w, and writes it to `dx`, where the thread's columns start.
template <RowsLie kLie, typename In, typename X, typename Group, typename Rows, typename Params,
          typename Gradient, int kPacks, int N>
__device__ __forceinline__ void write_row(const In& in, const BackwardOutput<X, float>& out,
                                          const Group& group, const Rows& rows,
                                          const Params& params, int left, X* dx,
                                          const Gradient& gradient, float (&xhat)[kPacks][N],
                                          float (&w)[kPacks][N]) {
  const WriterOf<X, N, kLie> writer{dx, left};
  const int step = slice_step<N>(group);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (p * step >= left) break;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      w[p][i] = gradient.at(w[p][i], xhat[p][i]);
    }
    if constexpr (In::kGates) {
      float g[N];
      params.get(kWeight, p, g);
      rows.finish(p, dx - out.dx + p * step, g, xhat[p], w[p]);
    }
    if (out.dresidual != nullptr)
      out.template add_residual<kLie>(dx - out.dx + p * step, left - p * step, w[p], group.lanes());
    Pack<X, N> pack;
    round_to(pack, w[p]);
    writer.store(p, pack, group);
  }
}

}  // namespace fused_norm
