// How listed columns get their xhat, in kernels whose threads keep their columns.
#pragma once

#include "core/norm/staged_params.cuh"

namespace fused_norm {

// A listed column has a scale of 0, and for a shift the row's xhat. Threads that meet in each row
// share its listed columns: the threads of a group, or in the ring the lanes of a warp, which share
// the warp's own. Each puts the xhat of its places where the columns' owners find their shifts,
// before these come to the row. Params: StagedParams, of each group its own where any are listed.
template <RowsLie kLie, typename Params, bool kByWarps = false>
class ListedValues {
 public:
  // The places from places.x to places.y are shared. The block's columns start at first_col.
  __device__ ListedValues(const ListedColumns<float>& list, int2 places, int first_col = 0)
      : list_(list), first_(places.x), end_(places.y), first_col_(first_col) {}

  // Whether anything is listed: the same in all threads that share the places.
  __device__ __forceinline__ bool any() const { return first_ < end_; }

  // Makes the scales zero, which are the parameters of that kind.
  __device__ void clear_scales(const Params& params, int kind) const {
#pragma unroll 1
    for (int place = own(); place < end_; place += threads()) params.at(find(kind, place)) = 0;
  }
  // When parameters are there: puts the values of the first of the rows row, row + stride, ..., if
  // there is one, and asks for those of the next.
  __device__ void begin(const Params& params, int64_t row, int64_t stride, int64_t rows) {
    if (!any()) return;
    if (!kByWarps) clear_scales(params, kScale);
    if (own() < end_) slot_ = find(kShift, own());
    has_more_ = own() + threads() < end_;
    const int more = row + stride >= rows ? 0 : row + 2 * stride >= rows ? 1 : 2;
    turn_ = Params::kRows - 1;
    if (row < rows) {
      values_ = values_of(row);
      if (slot_ >= 0) held_ = *values_;
      step_ = step_of(stride);
      bring(params, row, stride, more);
    }
    turn_ = 0;
    if (!kByWarps) __syncthreads();
  }

  // Puts the values of a row, that of the next turn, whose shifts nobody reads any more, and asks
  // for those of the row after. At least so many rows come after it.
  __device__ __forceinline__ void bring(const Params& params, int64_t row, int64_t stride,
                                        int more) {
    const unsigned turn = (turn_ + 1) % Params::kRows;
    if (slot_ >= 0) params.at(slot_ + turn * Params::kNextKind) = held_;
    if (has_more_) put_rest(params, turn, row);
    if (!kByWarps) {  // anew, as registers are few
      values_ = values_of(row);
      step_ = step_of(stride);
    }
    values_ += step_;
    if (slot_ >= 0 && more > 0) held_ = *values_;
    // One of many warps would wait for memory.
    if (kByWarps) prefetch_to_l2(values_ + step_, slot_ >= 0 && more > 1);
  }
  // From here on it is the next turn. The lanes of a warp meet here, if they do not meet anyway
  // before they read its shifts, as several warps do in a row's sums.
  __device__ __forceinline__ void next_turn(bool meet_anyway) {
    turn_ = (turn_ + 1) % Params::kRows;
    if (!meet_anyway) __syncwarp();
  }
  __device__ __forceinline__ int turn() const { return static_cast<int>(turn_); }

 private:
  __device__ __forceinline__ const float* values_of(int64_t row) const {
    return list_.side + row * list_.room + own();
  }
  __device__ __forceinline__ uint32_t step_of(int64_t stride) const {
    return static_cast<uint32_t>(stride) * static_cast<uint32_t>(list_.room);
  }
  // Puts the row's values of this thread's places but the first.
  __device__ __forceinline__ void put_rest(const Params& params, unsigned turn, int64_t row) const {
    const float* const values = kByWarps ? values_ : values_of(row);
#pragma unroll 1
    for (int i = threads(); own() + i < end_; i += threads())
      params.at(find(kShift + turn, own() + i)) = values[i];
  }
  // This thread's first place, and how many threads share them.
  __device__ __forceinline__ int own() const {
    return first_ + static_cast<int>(kByWarps ? threadIdx.x % kWarpSize : threadIdx.x);
  }
  __device__ __forceinline__ static int threads() { return kByWarps ? kWarpSize : blockDim.x; }
  __device__ int find(int kind, int place) const {
    const int first_thread = kByWarps ? 0 : threadIdx.y * blockDim.x;
    const unsigned lanes = kByWarps ? kWarpSize : min(blockDim.x, kWarpSize);
    return Params::template find<kLie>(kind, first_thread, list_.columns[1 + place] - first_col_,
                                       lanes);
  }

  const ListedColumns<float>& list_;
  int first_, end_, first_col_;
  unsigned turn_ = 0;
  // Where the value of this thread's first place goes in turn 0, -1: nowhere; whether it has more.
  int slot_ = -1;
  bool has_more_ = false;
  float held_ = 0;       // that value, of the row that comes next
  const float* values_;  // where it was, and by how much the next row's is further
  uint32_t step_;
};

}  // namespace fused_norm
