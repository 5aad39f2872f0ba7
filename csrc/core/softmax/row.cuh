// What the forward and backward kernels of a row share.
#pragma once

#include "core/common/branch.cuh"
#include "core/common/overlap.cuh"
#include "core/common/row_run.cuh"
#include "core/softmax/exp_sum.cuh"
#include "core/softmax/plan.h"

namespace fused_norm {

// Calls run(regular, log) with both known at compile time, after the kernel before. Chosen once, at
// the top of a kernel.
template <bool kMayLog, typename Run>
__device__ __forceinline__ void with_form(bool regular, bool log, Run run) {
  meet_previous_kernel();
  auto run_as = [&](auto is_log) {
    with_flag(regular, [&](auto is_regular) { run(is_regular, is_log); });
  };
  if constexpr (kMayLog) {
    with_flag(log, run_as);
  } else {
    run_as(std::false_type());
  }
}

// Calls run() with a number of packs that is one of kPacks, known at compile time.
template <int... kPacks, typename Run>
__device__ __forceinline__ void with_packs(int packs, Run run) {
  ((packs == kPacks ? (run(std::integral_constant<int, kPacks>()), true) : false) || ...);
}

// Where a lane's packs start in the columns of its block: each warp has a run of them (RunPlace),
// kPacks a lane.
template <int kPacks, int N, typename Group>
__device__ __forceinline__ int run_start(const Group& group) {
  return (group.thread() / kWarpSize * kPacks * group.lanes() + group.lane()) * N;
}

// The sum over a warp's runs, given the sums over packs of each of the lanes' elements.
template <int N, bool kRegular, typename A, typename Group>
__device__ __forceinline__ A sum_of_run(A (&elements)[N], const RunPlace<N, kRegular>& place,
                                        const Group& group) {
  if constexpr (!kRegular) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      elements[i] = __shfl_sync(kFullMask, elements[i], place.lane + (i < place.turn), place.lanes);
    }
  }
  return group.reduce_lanes(sum_of(elements), SumOf());
}

template <typename V>
struct RowSlots {
  V warps[2][kMaxWarps];
  V blocks[2][kPortableClusterBlocks];
};

// Combines the parts of a row that the warps of a group hold, and if `spread` the blocks of a
// cluster, all of which have begun.
template <typename V, typename Group, typename Combine>
__device__ __forceinline__ V reduce_row(Group& group, RowCluster& cluster, bool spread, V part,
                                        const V& identity, RowSlots<V>& slots, Combine combine) {
  part = group.reduce_warps(part, identity, slots.warps, combine);
  return spread ? cluster.reduce(part, slots.blocks, combine) : part;
}

// Which row a group works on, and where its block stands among those that share the row. Announces
// the block to its cluster.
struct RowPosition {
  bool spread;
  int64_t row;
  int rank;

  template <typename Group>
  __device__ RowPosition(const Group& group, const RowCluster& cluster, bool may_spread)
      : spread(may_spread && cluster.blocks() > 1) {
    rank = spread ? cluster.rank() : 0;
    row = spread ? int64_t{blockIdx.x / cluster.blocks()}
                 : int64_t{blockIdx.x} * group.groups() + group.index();
    if (spread) cluster.arrive();
  }
};

}  // namespace fused_norm
