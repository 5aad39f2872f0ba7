// Rows of a 16-bit type whose columns are dealt out to the lanes of warps one by one: neighbouring
// columns are neighbouring lanes'. Short rows are a warp's each; longer ones are cut in parts, a
// warp's each, and those warps, of a block or of a cluster's, exchange what they know (FlatRows:
// how many).
#pragma once

#include "core/common/bulk_copy.cuh"
#include "core/common/flat_rows.h"
#include "core/common/pack.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

// A lane's columns of a warp's part: its own and those kLanes, 2 * kLanes, ... further on, kUnits
// in all. The first kSure of them every lane has. Where a row takes but some of a warp's lanes, the
// others have other rows.
template <int kUnits, int kSure, int kLanes = kWarpSize>
struct LaneColumns {
  int first, left;  // columns of the part from the lane's first on
  __device__ __forceinline__ explicit LaneColumns(int cols, int thread = threadIdx.x)
      : first(thread % kLanes), left(cols - first) {}
  __device__ __forceinline__ bool inside(int i) const { return i < kSure || i * kLanes < left; }
};

// Whose a row is: a warp's; warps' of one block, or of all blocks of a cluster.
enum class Sharing { kWarp, kBlock, kCluster };

// Which of its block's rows at work a warp is at, and which columns of theirs are its own.
template <Sharing kSharing>
struct RowPart {
  int group, index = 0, first = 0, cols;
  __device__ __forceinline__ RowPart(const FlatRows& flat, int row_cols, int thread = threadIdx.x)
      : group(thread / kWarpSize), cols(row_cols) {
    if (kSharing == Sharing::kWarp) return;
    if (kSharing == Sharing::kBlock) {
      index = group % flat.parts;
      group /= flat.parts;
    } else {
      index = RowCluster().rank() * kBlockParts + group;
      group = 0;
    }
    first = first_of_part(flat, index);
    cols = cols_of_part(flat, index);
  }
};

// Which columns of rows their block has.
template <Sharing kSharing>
struct BlockColumns {
  int first = 0, cols;
  __device__ __forceinline__ BlockColumns(const FlatRows& flat, int row_cols) : cols(row_cols) {
    if (kSharing != Sharing::kCluster) return;
    const int part = RowCluster().rank() * kBlockParts;
    first = first_of_part(flat, part);
    cols = first_of_part(flat, part + kBlockParts) - first;
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

// The same of the warps of a cluster: each sends what it has to all blocks. Nobody sends for a row
// before all have sent for the one before, and so are done with the set used last but one.
template <typename V>
class PartExchange<V, Sharing::kCluster> {
  using Part = RowPart<Sharing::kCluster>;

 public:
  struct Slots {
    V parts[2][kMaxClusterParts];
    CopyBarrier arrived[2];
  };

  // A barrier of the cluster's follows, as nobody may send to a block that has not begun.
  __device__ __forceinline__ PartExchange(const Part&, Slots& slots)
      : slots_(slots), blocks_(RowCluster().blocks()) {
    for (int part = threadIdx.x; part < kMaxClusterParts; part += blockDim.x)
      slots.parts[0][part] = slots.parts[1][part] = V{};
    if (threadIdx.x >= 2) return;
    slots.arrived[threadIdx.x].init();
    CopyBarrier::order_inits();
  }

  __device__ __forceinline__ const V* all(const V& own, const Part& part, int parts) {
    const int set = turn_ & 1;
    const uint32_t parity = turn_++ >> 1 & 1;
    CopyBarrier& arrived = slots_.arrived[set];
    if (threadIdx.x == 0) arrived.expect(parts * sizeof(V));
    if (lane() < blocks_) arrived.send(own, &slots_.parts[set][part.index], lane());
    arrived.template wait<true>(parity);
    return slots_.parts[set];
  }

  template <typename ValueOf>
  __device__ __forceinline__ static float sum(int parts, ValueOf value_of) {
    float sum = value_of(lane());
#pragma unroll 1
    for (int first = kWarpSize; first < parts; first += kWarpSize) sum += value_of(first + lane());
    return lane_sum<kWarpSize>(sum);
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpSize; }

  Slots& slots_;
  int blocks_, turn_ = 0;
};

// A lane's values of kRows rows, `stride` apart, of which its first columns begin at `own`;
// `filler` past the part's end.
template <int kRows, int kUnits, int kSure, int kLanes, typename X>
__device__ __forceinline__ void load_rows(const X* own, int stride,
                                          const LaneColumns<kUnits, kSure, kLanes>& columns,
                                          float filler, float (&values)[kRows][kUnits]) {
  const Bits<X>* const bits = reinterpret_cast<const Bits<X>*>(own);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      values[k][i] = filler;
      if (columns.inside(i)) values[k][i] = value_of<X>(bits[k * stride + i * kLanes]);
    }
  }
}

// Rounds them, and writes them there.
template <int kRows, int kUnits, int kSure, int kLanes, typename X>
__device__ __forceinline__ void store_rows(X* own, int stride,
                                           const LaneColumns<kUnits, kSure, kLanes>& columns,
                                           const float (&values)[kRows][kUnits]) {
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    Bits<X>* const bits = reinterpret_cast<Bits<X>*>(own) + k * stride;
#pragma unroll
    for (int i = 0; i < kUnits; i += 2) {
      const bool two = i + 1 < kUnits;
      const uint32_t pair = detail::round_pair(values[k][i], two ? values[k][i + two] : 0.0f, X());
      if (columns.inside(i)) bits[i * kLanes] = static_cast<uint16_t>(pair);
      if (two && columns.inside(i + 1)) bits[(i + 1) * kLanes] = static_cast<uint16_t>(pair >> 16);
    }
  }
}

// Parameters of a lane's columns, those of its part being from `first` on; zero past the part's
// end.
template <typename X, int kUnits, int kSure, int kLanes>
__device__ __forceinline__ void load_columns(const ParamVector& params, int first,
                                             const LaneColumns<kUnits, kSure, kLanes>& columns,
                                             float (&out)[kUnits]) {
  with_param_type<X>(params.dtype, [&](auto type) {
    const auto* const own = static_cast<const decltype(type)*>(params.data) + first + columns.first;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      out[i] = 0;
      if (columns.inside(i)) out[i] = static_cast<float>(own[i * kLanes]);
    }
  });
}
// Weights, 1 where there are none; anything past the part's end.
template <typename X, int kUnits, int kSure, int kLanes>
__device__ __forceinline__ void load_weights(const ParamVector& weight, float offset, int first,
                                             const LaneColumns<kUnits, kSure, kLanes>& columns,
                                             float (&out)[kUnits]) {
#pragma unroll
  for (int i = 0; i < kUnits; ++i) out[i] = 1;
  if (!weight.data) return;
  load_columns<X>(weight, first, columns, out);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) out[i] += offset;
}

}  // namespace fused_norm
