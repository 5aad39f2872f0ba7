// Row groups: the threads that share a row, and reductions over them.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace fused_norm {

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;
constexpr int kMaxClusterBlocks = 8;
constexpr unsigned kFullMask = 0xffffffffu;

// How the warps of a group meet. Named barriers let a block hold several groups that never wait for
// each other, but a kernel that uses them takes all 16 of a block, and a multiprocessor has 64: no
// more than four blocks are resident.
enum class Barrier { kBlock, kNamed };

// The blockDim.x threads of equal threadIdx.y share a row: 1, 2, 4, 8 or 16 lanes of a warp, or
// whole warps. A block holds blockDim.y such groups. Groups of one warp or less never wait for
// anyone. With Barrier::kBlock all groups of larger ones meet at once.
template <Barrier kBarrier>
class RowGroup {
 public:
  __device__ RowGroup() : lanes_(min(blockDim.x, kWarpSize)) {
    const int warps = this->warps();
    while (warp_lanes_ < warps) warp_lanes_ *= 2;
  }

  __device__ int threads() const { return blockDim.x; }
  __device__ int groups() const { return blockDim.y; }  // in the block
  __device__ int index() const { return threadIdx.y; }  // of the group in its block
  __device__ int thread() const { return threadIdx.x; }
  __device__ int lanes() const { return lanes_; }  // of each warp that belong to the group
  __device__ int lane() const { return threadIdx.x % kWarpSize; }
  __device__ int warps() const { return blockDim.x / kWarpSize; }  // 0 for less than a warp
  __device__ unsigned mask() const {
    if (lanes_ == kWarpSize) return kFullMask;
    return ((1u << lanes_) - 1) << (threadIdx.y * lanes_ % kWarpSize);
  }

  // Combines `value` over the group's lanes in each warp. Every lane gets the same bits, as
  // combine(a, b) must be commutative to the bit. All lanes of a warp take part, in all of these
  // reductions.
  template <typename V, typename Combine>
  __device__ V reduce_lanes(V value, Combine combine) const {
    return butterfly(value, lanes_, combine);
  }

  // Combines what the group's warps hold, each the same in all lanes. `slots` is shared memory, two
  // sets used in turn: the barrier of one reduction also says that everybody has read the slots of
  // the one before. The tree depends on the number of threads alone.
  template <typename V, typename Combine>
  __device__ V reduce_warps(V value, const V& identity, V (&slots)[2][kMaxWarps], Combine combine) {
    if (threads() <= kWarpSize) return value;
    V* const own = &slots[turn_][index() * warps()];
    turn_ ^= 1;
    if (lane() == 0) own[thread() / kWarpSize] = value;
    if constexpr (kBarrier == Barrier::kBlock) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(index() + 1), "r"(threads()) : "memory");
    }
    const int warp = lane() & (warp_lanes_ - 1);
    value = warp < warps() ? own[warp] : identity;
    return butterfly(value, warp_lanes_, combine);
  }

  // The same for the first warp alone, which spares the others the work. `slots` may be reused
  // after the next barrier.
  template <typename V, typename Combine>
  __device__ V gather_warps(V value, const V& identity, V (&slots)[kMaxWarps],
                            Combine combine) const {
    if (lane() == 0) slots[thread() / kWarpSize] = value;
    __syncthreads();
    if (thread() >= kWarpSize) return value;
    const int warp = lane() & (warp_lanes_ - 1);
    value = warp < warps() ? slots[warp] : identity;
    return butterfly(value, warp_lanes_, combine);
  }

 private:
  template <typename V, typename Combine>
  __device__ static V butterfly(V value, int lanes, Combine combine) {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      if (offset < lanes) value = combine(value, shuffle_xor(value, offset));
    }
    return value;
  }

  template <typename V>
  __device__ static V shuffle_xor(const V& value, int offset) {
    static_assert(sizeof(V) % 4 == 0);
    uint32_t words[sizeof(V) / 4];
    memcpy(words, &value, sizeof(V));
#pragma unroll
    for (uint32_t& word : words) word = __shfl_xor_sync(kFullMask, word, offset);
    V other;
    memcpy(&other, words, sizeof(V));
    return other;
  }

  int lanes_;
  int warp_lanes_ = 1;  // the number of warps, rounded up to a power of two
  int turn_ = 0;
};

// The blocks of a thread-block cluster share a row, each a slice of its columns. On chips without
// clusters, and in kernels launched without one, the cluster is the block itself.
class RowCluster {
 public:
  __device__ int rank() const {
#if __CUDA_ARCH__ >= 900
    return cooperative_groups::this_cluster().block_rank();
#else
    return 0;
#endif
  }
  __device__ int blocks() const {
#if __CUDA_ARCH__ >= 900
    return cooperative_groups::this_cluster().num_blocks();
#else
    return 1;
#endif
  }

  // Before the first reduce(), in two steps so that work fits between them: nobody may write to a
  // block that has not begun. And, as one, before a block ends whose shared memory others may still
  // write.
  __device__ void arrive() const {
#if __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().barrier_arrive();
#endif
  }
  __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().barrier_wait();
#endif
  }

  // Combines what the blocks' threads 0 to kMaxClusterBlocks - 1 hold, each block's the same, in
  // the order of the ranks. All threads take part; those beyond get their block's sum only with
  // `everybody`. `slots` as in RowGroup::reduce_warps().
  template <typename V, typename Combine>
  __device__ V reduce(V value, V (&slots)[2][kMaxClusterBlocks], Combine combine,
                      bool everybody = true) {
#if __CUDA_ARCH__ >= 900
    const auto cluster = cooperative_groups::this_cluster();
    const int blocks = cluster.num_blocks();
    V* const own = slots[turn_];
    turn_ ^= 1;
    if (threadIdx.x < blocks)
      *cluster.map_shared_rank(own + cluster.block_rank(), threadIdx.x) = value;
    cluster.sync();
    if (!everybody && threadIdx.x >= kWarpSize) return value;
    value = own[0];
    for (int rank = 1; rank < blocks; ++rank) value = combine(value, own[rank]);
#endif
    return value;
  }

 private:
  int turn_ = 0;
};

}  // namespace fused_norm
