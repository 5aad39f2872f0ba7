// How the rows of backward kernels come to their threads: a group's next row is on its way, in
// registers or through shared memory, while it works on one.
#pragma once

#include "core/common/slice_queue.cuh"
#include "core/norm/backward_input.cuh"

namespace fused_norm {

// Each thread loads its own columns of the next row, from `col` on.
template <typename Y, typename S, int N, RowsLie kLie, int kPacks, typename Group>
class RowsInRegisters {
 public:
  // Of the rows row, row + stride, ...
  __device__ RowsInRegisters(const BackwardInput<Y, S, float>& in, const Group& group, int col,
                             int64_t row, int64_t stride)
      : in_(in),
        group_(group),
        left_(in.cols - col),
        saved_at_(in.saved, in.saved_layout, min(row, in.rows - 1), stride, col),
        dy_at_(in.dy, in.dy_layout, min(row, in.rows - 1), stride, col) {}
  // Of no row if that is past the end.
  __device__ __forceinline__ void ask_for_first(int64_t row) {
    if (row < in_.rows) fetch(row);
  }

  // The row at hand; of one past the end, anything. All lanes of a warp take part.
  __device__ __forceinline__ void take(int64_t, float (&saved)[kPacks][N],
                                       float (&dy)[kPacks][N]) const {
    saved_.extract(saved_loaded_, left_, group_,
                   [&](int p, const Pack<S, N>& pack) { unpack(pack, saved[p]); });
    dy_.extract(dy_loaded_, left_, group_,
                [&](int p, const Pack<Y, N>& pack) { unpack(pack, dy[p]); });
  }
  // Asks for the next one, which is `row`.
  __device__ __forceinline__ void ask_for(int64_t row) {
    saved_at_.step(row);
    dy_at_.step(row);
    fetch(row);
  }

 private:
  __device__ __forceinline__ void fetch(int64_t row) {
    constexpr bool kShifted = kLie == RowsLie::kShifted;
    saved_.fetch(saved_at_.at(), left_,
                 kShifted && rows_follow(in_.saved_layout, row, in_.rows, in_.cols, N), group_,
                 saved_loaded_);
    dy_.fetch(dy_at_.at(), left_,
              kShifted && rows_follow(in_.dy_layout, row, in_.rows, in_.cols, N), group_,
              dy_loaded_);
  }

  using SavedReader = ReaderOf<S, N, kLie, kPacks>;
  using GradientReader = ReaderOf<Y, N, kLie, kPacks>;
  const BackwardInput<Y, S, float>& in_;
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
    }
  }
};

}  // namespace fused_norm
