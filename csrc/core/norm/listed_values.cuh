// How listed columns get their xhat, in kernels whose threads keep their columns.
#pragma once

#include "core/norm/staged_params.cuh"

namespace fused_norm {

// A listed column has a scale of 0, and for a shift the row's xhat. The threads of a group, which
// have a row in common, share the list: each puts the xhat of its places where the columns' owners
// find their shifts, before these come to the row. Params: StagedParams, of which each group has
// its own where anything is listed.
template <RowsLie kLie, typename Params>
class ListedValues {
 public:
  __device__ ListedValues(const ListedColumns<float>& list, bool may_list)
      : list_(list), count_(may_list ? list.count() : 0) {}

  // Whether anything is listed: the same in all threads of the block.
  __device__ __forceinline__ bool any() const { return count_ > 0; }

  // By all threads of the block, when parameters are there: the first row's values, and those of
  // the next on their way.
  __device__ void begin(const Params& params, int64_t row, int64_t next, int64_t rows) {
    if (!any()) return;
    for (int place = threadIdx.x; place < count_; place += blockDim.x)
      params.at(find(kScale, place)) = 0;
    if (threadIdx.x < count_) slot_ = find(kShift, threadIdx.x);
    if (slot_ >= 0 && row < rows) held_ = list_.xhat(row, threadIdx.x);
    turn_ = Params::kRows - 1;
    if (row < rows) bring(params, row, next, rows);
    turn_ = 0;
    __syncthreads();
  }

  // Puts the values of a row, that of the next turn, whose shifts nobody reads any more, and asks
  // for those of `next`.
  __device__ __forceinline__ void bring(const Params& params, int64_t row, int64_t next,
                                        int64_t rows) {
    if (slot_ < 0) return;
    const int turn = (turn_ + 1) % Params::kRows;
    params.at(slot_ + turn * Params::kNextKind) = held_;
    for (int place = threadIdx.x + blockDim.x; place < count_; place += blockDim.x)
      params.at(find(kShift + turn, place)) = list_.xhat(row, place);
    if (next < rows) held_ = list_.xhat(next, threadIdx.x);
  }
  // From here on it is the next turn. (All threads of a group of several warps meet in each turn.)
  template <typename Group>
  __device__ __forceinline__ void next_turn(const Group& group) {
    turn_ = (turn_ + 1) % Params::kRows;
    if (group.warps() <= 1) __syncwarp();
  }

  __device__ __forceinline__ int turn() const { return turn_; }

 private:
  __device__ int find(int kind, int place) const {
    return Params::template find<kLie>(kind, threadIdx.y * blockDim.x, list_.columns[1 + place]);
  }

  const ListedColumns<float>& list_;
  int count_, turn_ = 0;
  int slot_ = -1;   // where the value of this thread's first place goes in turn 0; -1: nowhere
  float held_ = 0;  // that value
};

}  // namespace fused_norm
