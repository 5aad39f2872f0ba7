// Rows of a 16-bit type whose columns are dealt out to the lanes of warps one by one: neighbouring
// columns are neighbouring lanes'. Short rows are a warp's each; longer ones are cut in parts, a
// warp's each, and those warps exchange what they know (FlatRows: how many).
#pragma once

#include "core/common/bulk_copy.cuh"
#include "core/common/flat_rows.h"
#include "core/common/pack.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

// A lane's columns of a warp's part: its own and those a warp's width, two, ... further on, kUnits
// in all. The first kSure of them every lane has.
template <int kUnits, int kSure>
struct LaneColumns {
  int first, left;  // columns of the part from the lane's first on
  __device__ __forceinline__ explicit LaneColumns(int cols, int thread = threadIdx.x)
      : first(thread % kWarpSize), left(cols - first) {}
  __device__ __forceinline__ bool inside(int i) const { return i < kSure || i * kWarpSize < left; }
};

// Whose a row is: a warp's, or that of warps of one block.
enum class Sharing { kWarp, kBlock };

// Which of its block's rows at work a warp is at, and which columns of theirs are its own.
template <Sharing kSharing>
struct RowPart {
  int group, index = 0, first = 0, cols;
  __device__ __forceinline__ RowPart(const FlatRows& flat, int row_cols, int thread = threadIdx.x)
      : group(thread / kWarpSize), cols(row_cols) {
    if (kSharing == Sharing::kWarp) return;
    index = group % flat.parts;
    group /= flat.parts;
    first = first_of_part(flat, index);
    cols = cols_of_part(flat, index);
  }
};

// What the warps of a row tell each other, a V each, in shared memory: two sets used in turn, as
// the barrier of one exchange also says that everybody has read the one before.
template <typename V, Sharing kSharing>
class PartExchange {
  using Part = RowPart<kSharing>;

 public:
  static constexpr int kSet = kFlatThreads / kWarpSize * kBlockParts;
  using Slots = V[2 * kSet];

  // All threads of the block construct theirs, and a barrier of the block follows.
  __device__ __forceinline__ PartExchange(const Part& part, Slots& slots)
      : slots_(slots + part.group * kBlockParts) {
    if (kSharing == Sharing::kWarp) return;
    if (part.index == 0 && lane() < kBlockParts) slots_[lane()] = slots_[kSet + lane()] = V{};
  }

  // What the warps have, each the same in all lanes, in the order of the row's parts; zeros after
  // the last.
  __device__ __forceinline__ const V* all(const V& own, const Part& part, int parts) {
    V* const slots = slots_ + (odd_ ? kSet : 0);
    odd_ = !odd_;
    if (lane() == 0) slots[part.index] = own;
    meet_at(part.group + 1, parts * kWarpSize);
    return slots;
  }

  // The sum over parts, those after the last too, of what value_of(part) gives; in all lanes.
  template <typename ValueOf>
  __device__ __forceinline__ static float sum(int, ValueOf value_of) {
    return lane_sum<kBlockParts>(value_of(lane() % kBlockParts));
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpSize; }

  V* slots_;
  bool odd_ = false;
};

// A lane's values of kRows rows, `stride` apart, of which its first columns begin at `own`;
// `filler` past the part's end.
template <int kRows, int kUnits, int kSure, typename X>
__device__ __forceinline__ void load_rows(const X* own, int stride,
                                          const LaneColumns<kUnits, kSure>& columns, float filler,
                                          float (&values)[kRows][kUnits]) {
  const Bits<X>* const bits = reinterpret_cast<const Bits<X>*>(own);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      values[k][i] = filler;
      if (columns.inside(i)) values[k][i] = value_of<X>(bits[k * stride + i * kWarpSize]);
    }
  }
}

// Rounds them, and writes them to rows from `first` on.
template <int kRows, int kUnits, int kSure, typename X>
__device__ __forceinline__ void store_rows(X* own, int first, int stride,
                                           const LaneColumns<kUnits, kSure>& columns,
                                           const float (&values)[kRows][kUnits]) {
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    Bits<X>* const bits = reinterpret_cast<Bits<X>*>(own) + (first + k) * stride;
#pragma unroll
    for (int i = 0; i < kUnits; i += 2) {
      const bool two = i + 1 < kUnits;
      const uint32_t pair = detail::round_pair(values[k][i], two ? values[k][i + two] : 0.0f, X());
      if (columns.inside(i)) bits[i * kWarpSize] = static_cast<uint16_t>(pair);
      if (two && columns.inside(i + 1))
        bits[(i + 1) * kWarpSize] = static_cast<uint16_t>(pair >> 16);
    }
  }
}

// Parameters of a lane's columns, those of its part being from `first` on; zero past the part's
// end.
template <typename X, int kUnits, int kSure>
__device__ __forceinline__ void load_columns(const ParamVector& params, int first,
                                             const LaneColumns<kUnits, kSure>& columns,
                                             float (&out)[kUnits]) {
  with_param_type<X>(params.dtype, [&](auto type) {
    const auto* const own = static_cast<const decltype(type)*>(params.data) + first + columns.first;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      out[i] = 0;
      if (columns.inside(i)) out[i] = static_cast<float>(own[i * kWarpSize]);
    }
  });
}
// Weights, 1 where there are none; anything past the part's end.
template <typename X, int kUnits, int kSure>
__device__ __forceinline__ void load_weights(const ParamVector& weight, float offset, int first,
                                             const LaneColumns<kUnits, kSure>& columns,
                                             float (&out)[kUnits]) {
#pragma unroll
  for (int i = 0; i < kUnits; ++i) out[i] = 1;
  if (!weight.data) return;
  load_columns<X>(weight, first, columns, out);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) out[i] += offset;
}

}  // namespace fused_norm
