// What each block of a cluster has of a row, sent to all of them.
#pragma once

#include "core/common/bulk_copy.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

// Row after row, without a barrier of the cluster. Two sets of slots are used in turn. A block
// sends its part of row r only when it has all parts of row r - 1. Each block that sent one of
// these was done with row r - 2, whose slots row r takes. For that to hold, the caller puts a
// barrier of the block between wait() for a row and send() of the next.
template <typename V, int kMostBlocks>
class ClusterParts {
 public:
  struct Slots {  // in shared memory
    V parts[2][kMostBlocks];
    CopyBarrier arrived[2];
  };
  // By all threads of the block. A barrier of the cluster follows: nobody may send to a block that
  // has not begun.
  __device__ ClusterParts(Slots& slots, const RowCluster& cluster)
      : slots_(slots), blocks_(cluster.blocks()), rank_(cluster.rank()) {
    if (threadIdx.x < 2) {
      slots.arrived[threadIdx.x].init();
      CopyBarrier::order_inits();
    }
  }

  __device__ __forceinline__ int blocks() const { return blocks_; }

  // Sends the block's part of row `turn`, which the first threads have.
  __device__ __forceinline__ void send(int turn, const V& part) {
    CopyBarrier& arrived = slots_.arrived[turn & 1];
    if (threadIdx.x == 0) arrived.expect(blocks_ * sizeof(V));
    if (threadIdx.x < blocks_) arrived.send(part, &slots_.parts[turn & 1][rank_], threadIdx.x);
  }

  // All parts of row `turn`, in the order of the blocks' ranks.
  __device__ __forceinline__ const V* wait(int turn) const {
    slots_.arrived[turn & 1].template wait<true>(turn >> 1 & 1);
    return slots_.parts[turn & 1];
  }

 private:
  Slots& slots_;
  int blocks_, rank_;
};

}  // namespace fused_norm
