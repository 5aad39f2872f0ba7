// How the rows of backward kernels come to their threads: a group's next row is on its way, in
// registers or through shared memory, while it works on one.
#pragma once

#include "core/common/bulk_copy.cuh"
#include "core/common/ring_slot.cuh"
#include "core/common/slice_queue.cuh"
#include "core/norm/backward_input.cuh"
#include "core/norm/plan.h"
#include "core/norm/row_ring.cuh"

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
    saved_.extract(saved_loaded_, left_, group_, saved);
    dy_.extract(dy_loaded_, left_, group_, dy);
  }
  // Asks for the next one, which is `row`.
  __device__ __forceinline__ void ask_for(int64_t row) {
    saved_at_.step(row);
    dy_at_.step(row);
    fetch(row);
  }
  // The whole group has taken the row before `next`.
  __device__ __forceinline__ void drop(int64_t) const {}

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
class RowsInQueue {
 public:
  // `memory`: of the block, slice_queue_bytes() for each thread.
  __device__ RowsInQueue(const BackwardInput<Y, S, float>& in, const Group& group, int col,
                         int64_t row, int64_t stride, char* memory)
      : in_(in),
        group_(group),
        left_(in.cols - col),
        stride_(stride),
        saved_at_(in.saved, in.saved_layout, min(row, in.rows - 1), stride, col),
        dy_at_(in.dy, in.dy_layout, min(row, in.rows - 1), stride, col),
        queue_(memory, group.index() * group.threads() + group.thread(),
               group.groups() * group.threads()) {}
  __device__ __forceinline__ void ask_for_first(int64_t row) { put(row); }

  // Asks for the next row too.
  __device__ __forceinline__ void take(int64_t row, float (&saved)[kPacks][N],
                                       float (&dy)[kPacks][N]) {
    const int64_t next = row + stride_;
    if (next < in_.rows) {
      saved_at_.step(next);
      dy_at_.step(next);
    }
    put(next);
    queue_.wait();
    queue_.take([&](int p, const Pack<S, N>& of_saved, const Pack<Y, N>& of_dy) {
      unpack(of_saved, saved[p]);
      unpack(of_dy, dy[p]);
    });
  }
  __device__ __forceinline__ void ask_for(int64_t) const {}
  __device__ __forceinline__ void drop(int64_t) const {}

 private:
  __device__ __forceinline__ void put(int64_t row) {
    queue_.put(saved_at_.at(), dy_at_.at(), row < in_.rows ? left_ : 0, group_);
  }

  const BackwardInput<Y, S, float>& in_;
  const Group& group_;
  int left_;
  int64_t stride_;
  RowCursor<const S> saved_at_;
  RowCursor<const Y> dy_at_;
  SliceQueue<S, Y, N, kPacks> queue_;
};

// Rows that are dealt out, by bulk copies: a warp reads neighbours from shared memory wherever they
// lie, and more rows than the next are on their way. For groups of several warps.
template <typename Y, typename S, int N, RowsLie kLie, int kPacks, typename Group>
class RowsInRing {
 public:
  // `memory`: of the block, kRowStages rows for each group. A barrier of the block's follows.
  __device__ RowsInRing(const BackwardInput<Y, S, float>& in, const Group& group, int col,
                        int64_t row, int64_t stride, char* memory, RingStages<kRowStages>& stages)
      : in_(in), group_(group), col_(col), ahead_((kRowStages - 1) * stride), stages_(stages) {
    const int of_saved = ring_slot(in.cols * sizeof(S));
    second_ = of_saved;
    stage_bytes_ = of_saved + ring_slot(in.cols * sizeof(Y));
    memory_ = memory + group.index() * kRowStages * stage_bytes_;
    if (!fills() || row >= in.rows) return;
    used_ = in.cols * static_cast<int>(of_dy() ? sizeof(Y) : sizeof(S));
    step_ = of_dy() ? stride * in.dy_layout.stride * static_cast<int>(sizeof(Y))
                    : stride * in.saved_layout.stride * static_cast<int>(sizeof(S));
    at_ = start_of(row);
    end_ = start_of(in.rows - 1) + used_;
    if (!of_dy()) {
      for (CopyBarrier& filled : stages.filled) filled.init(2);
      CopyBarrier::order_inits();
    }
    __syncwarp(kFilling);
    for (int s = 0; s < kRowStages && row < in.rows; ++s, row += stride) {
      if (s > 0) step_to(row);
      fill(s);
    }
  }

  __device__ __forceinline__ void take(int64_t row, float (&saved)[kPacks][N],
                                       float (&dy)[kPacks][N]) const {
    if (row >= in_.rows) return;
    stages_.filled[stage_.number].wait(stage_.parity);
    const char* const from = memory_ + stage_.number * stage_bytes_;
    read(reinterpret_cast<const S*>(from + stages_.shift[stage_.number][0]), saved);
    read(reinterpret_cast<const Y*>(from + second_ + stages_.shift[stage_.number][1]), dy);
  }
  __device__ __forceinline__ void ask_for_first(int64_t) const {}
  __device__ __forceinline__ void ask_for(int64_t) const {}
  __device__ __forceinline__ void drop(int64_t next) {
    if (fills() && next + ahead_ < in_.rows) {
      step_to(next + ahead_);
      fill(stage_.number);
    }
    stage_.next(kRowStages);
  }

 private:
  // Two lanes, of the warp with the fewest columns: each copies the rows of a tensor.
  static constexpr unsigned kFilling = 3;
  __device__ __forceinline__ bool fills() const {
    const int of_warp = group_.thread() - (group_.threads() - kWarpSize);
    return of_warp == 0 || of_warp == 1;
  }
  __device__ __forceinline__ bool of_dy() const { return group_.lane() == 1; }

  __device__ __forceinline__ const char* start_of(int64_t row) const {
    return of_dy() ? reinterpret_cast<const char*>(row_start(in_.dy, in_.dy_layout, row))
                   : reinterpret_cast<const char*>(row_start(in_.saved, in_.saved_layout, row));
  }
  __device__ __forceinline__ void step_to(int64_t row) {
    if (in_.saved_layout.inner == 0 && in_.dy_layout.inner == 0) {
      at_ += step_;
    } else {
      at_ = start_of(row);
    }
  }
  // Copies the 16-byte granules in which the row lies, as far as they lie in the tensor, and what
  // is left of it by itself. The whole group waits for this: no instruction more than it takes.
  __device__ __forceinline__ void fill(int stage) {
    CopyBarrier& filled = stages_.filled[stage];
    char* const to = memory_ + stage * stage_bytes_ + (of_dy() ? second_ : 0);
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(at_) % kGranule);
    const char* const start = at_ - shift;
    int bytes = (shift + used_ + kGranule - 1) & -kGranule;
    if (start + bytes > end_) {
      bytes -= kGranule;
#pragma unroll 1
      for (int at = bytes; at < shift + used_; at += 2)
        *reinterpret_cast<uint16_t*>(to + at) = *reinterpret_cast<const uint16_t*>(start + at);
      CopyBarrier::order_writes();
    }
    stages_.shift[stage][of_dy()] = shift;
    filled.expect(bytes);
    filled.copy(to, start, bytes);
  }

  template <typename T>
  __device__ __forceinline__ void read(const T* row, float (&values)[kPacks][N]) const {
    // The packs of a thread follow each other as their units do. In the warp where the row ends
    // too, no load waits for another.
    constexpr int kElements = kPacks * N, kUnit = unit_of(kLie, N);
    const int left = in_.cols - col_;
    const T* const own = row + col_;
    Unit<T, kUnit> units[kElements / kUnit];
    with_units<kUnit>(own, [&](auto whole) {
      auto load = [&](int i) {
        return load_unit<kUnit, decltype(whole)::value, Memory::kShared>(own + i * kWarpSize);
      };
      if (left + group_.lane() * kUnit >= kElements * kWarpSize) {
#pragma unroll
        for (int i = 0; i < kElements; i += kUnit) units[i / kUnit] = load(i);
      } else {
#pragma unroll
        for (int i = 0; i < kElements; i += kUnit) {
          units[i / kUnit] = {};
          if (i * kWarpSize < left) units[i / kUnit] = load(i);
        }
      }
    });
#pragma unroll
    for (int i = 0; i < kElements; i += kUnit)
      unpack_unit<T, kUnit>(units[i / kUnit], values[i / N] + i % N);
  }

  const BackwardInput<Y, S, float>& in_;
  const Group& group_;
  int col_;
  int64_t ahead_;
  RingStages<kRowStages>& stages_;
  char* memory_;
  int second_, stage_bytes_;  // where dy's row lies in a stage, and the size of a stage
  // Of a thread that fills: where the last row on its way starts, where the tensor ends.
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t step_ = 0;
  int used_ = 0;
  RingSlot stage_;  // of the row at hand
};

}  // namespace fused_norm
