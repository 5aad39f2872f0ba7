// Row groups: the threads that share a row, and reductions over them.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "core/common/types.h"

namespace fused_norm {

constexpr int kMaxWarps = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// Not cuda::std::plus: it takes references, and values would leave their registers for memory.
struct SumOf {
  template <typename A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return a + b;
  }
};

// Until so many threads, of whole warps, have come to a named barrier; 0 is the block's own. Named
// barriers let a block hold several groups that never wait for each other, but a kernel that uses
// them takes all 16 of a block, and a multiprocessor has 64: no more than four blocks are resident.
__device__ __forceinline__ void meet_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Keeps a value in its register: what is made of few instructions would be made anew at each use.
__device__ __forceinline__ void keep(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value)); }

// The blockDim.x threads of equal threadIdx.y share a row: 1, 2, 4, 8 or 16 lanes of a warp, or
// whole warps (kFullWarps: always). A block holds blockDim.y such groups. Groups of one warp or
// less never wait for anyone.
template <bool kFullWarps>
class RowGroup {
 public:
  static constexpr bool kWholeWarps = kFullWarps;

  __device__ RowGroup() : lanes_(min(blockDim.x, kWarpSize)) {
    if (!kFullWarps) keep(lanes_);
    const int warps = this->warps();
    while (warp_lanes_ < warps) warp_lanes_ *= 2;
  }

  __device__ int threads() const { return blockDim.x; }
  __device__ int groups() const { return blockDim.y; }  // in the block
  __device__ int index() const { return threadIdx.y; }  // of the group in its block
  __device__ int thread() const { return threadIdx.x; }
  // Of each warp that belong to the group.
  __device__ int lanes() const { return kFullWarps ? kWarpSize : lanes_; }
  __device__ int lane() const { return threadIdx.x % kWarpSize; }
  __device__ int warps() const { return blockDim.x / kWarpSize; }  // 0 for less than a warp

  // Combines `value` over the group's lanes in each warp. Every lane gets the same bits, as
  // combine(a, b) must be commutative to the bit. All lanes of a warp take part, in all of these
  // reductions.
  template <typename V, typename Combine>
  __device__ V reduce_lanes(V value, Combine combine) const {
    return reduce_over(value, lanes(), combine);
  }

  // The same over neighbours, a power of two of them.
  template <typename V, typename Combine>
  __device__ static V reduce_over(V value, int neighbours, Combine combine) {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      if (offset < neighbours) value = combine(value, shuffle_xor(value, offset));
    }
    return value;
  }

  // Combines `a` over a full warp for its lower half, and `b` for its upper half, each as
  // reduce_lanes() does.
  template <typename V, typename Combine>
  __device__ __forceinline__ V reduce_halves(const V& a, const V& b, Combine combine) const {
    const bool upper = lane() >= kWarpSize / 2;
    const V other = shuffle_xor(upper ? a : b, kWarpSize / 2);
    return reduce_over(combine(upper ? b : a, other), kWarpSize / 2, combine);
  }
  // What a lane of a full warp holds.
  template <typename V>
  __device__ __forceinline__ V from_lane(const V& value, int lane) const {
    return shuffle(value, [lane](uint32_t word) { return __shfl_sync(kFullMask, word, lane); });
  }
  // Combines what the halves of a full warp hold.
  template <typename V, typename Combine>
  __device__ __forceinline__ V combine_halves(const V& value, Combine combine) const {
    return combine(value, shuffle_xor(value, kWarpSize / 2));
  }

  // Combines what the group's warps hold, each the same in all lanes. `slots` is shared memory, two
  // sets used in turn: the barrier of one reduction also says that everybody has read the slots of
  // the one before. All groups of the block meet. The tree depends on the number of threads alone.
  template <typename V, typename Combine>
  __device__ V reduce_warps(V value, const V& identity, V (&slots)[2][kMaxWarps], Combine combine) {
    if (threads() <= kWarpSize) return value;
    V* const own = &slots[turn_][index() * warps()];
    turn_ ^= 1;
    if (lane() == 0) own[thread() / kWarpSize] = value;
    __syncthreads();
    const int warp = lane() & (warp_lanes_ - 1);
    value = warp < warps() ? own[warp] : identity;
    return reduce_over(value, warp_lanes_, combine);
  }

 private:
  template <typename V>
  __device__ static V shuffle_xor(const V& value, int offset) {
    return shuffle(value,
                   [offset](uint32_t word) { return __shfl_xor_sync(kFullMask, word, offset); });
  }
  template <typename V, typename ShuffleWord>
  __device__ __forceinline__ static V shuffle(const V& value, ShuffleWord shuffle_word) {
    static_assert(sizeof(V) % 4 == 0);
    uint32_t words[sizeof(V) / 4];
    memcpy(words, &value, sizeof(V));
#pragma unroll
    for (uint32_t& word : words) word = shuffle_word(word);
    V other;
    memcpy(&other, words, sizeof(V));
    return other;
  }

  int lanes_;
  int warp_lanes_ = 1;  // the number of warps, rounded up to a power of two
  int turn_ = 0;
};

// The sum over kLanes neighbours, in all of them.
template <int kLanes, typename A>
__device__ __forceinline__ A lane_sum(A value) {
  return RowGroup<true>::reduce_over(value, kLanes, SumOf());
}

struct AsItIs {
  __device__ __forceinline__ float operator()(float value) const { return value; }
};

// Combines each of K values, a power of two, over a warp, for all lanes: as reduce_lanes() does, by
// fewer exchanges. What becomes of each in the end is reckoned by some lanes, not by all.
template <int K, typename Combine, typename Finish = AsItIs>
__device__ __forceinline__ void reduce_each(float (&values)[K], Combine combine,
                                            Finish finish = Finish()) {
  const int lane = threadIdx.x % kWarpSize;
  float kept[K];
#pragma unroll
  for (int j = 0; j < K; ++j) kept[j] = values[j];
    // One half of the lanes goes on with one half of the values.
#pragma unroll
  for (int half = K / 2; half > 0; half /= 2) {
    const int offset = kWarpSize * half / K;
    const bool upper = lane & offset;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const float other = __shfl_xor_sync(kFullMask, upper ? kept[j] : kept[j + half], offset);
      kept[j] = combine(upper ? kept[j + half] : kept[j], other);
    }
  }
#pragma unroll
  for (int offset = kWarpSize / K / 2; offset > 0; offset /= 2)
    kept[0] = combine(kept[0], __shfl_xor_sync(kFullMask, kept[0], offset));
  kept[0] = finish(kept[0]);
#pragma unroll
  for (int j = 0; j < K; ++j)
    values[j] = K == 1 ? kept[0] : __shfl_sync(kFullMask, kept[0], j * (kWarpSize / K));
}

// Sums over the threads of a row group: every thread gets the same bits. The tree depends on the
// number of threads alone. Groups of several warps have a named barrier each, or are their block's
// only group.
template <bool kNamedBarrier>
class RowSums {
 public:
  static constexpr int kHalf = kWarpSize / 2;
  // Of a group of several warps, in shared memory. Two sets used in turn: the barrier of one sum
  // also says that everybody has read the one before. Of each set one half holds sums a and the
  // other sums b, warp w at (w % 16) * 2 + w / 16.
  struct Slots {
    float at[2][2][kMaxWarps];
  };

  // `slots` is the group's own. All threads of the block construct theirs, as there is a barrier in
  // that.
  template <typename Group>
  __device__ RowSums(const Group& group, Slots& slots)
      : several_(group.warps() > 1),
        upper_(group.lane() >= kHalf),
        writes_(group.lane() % kHalf == 0) {
    if (several_) {
      float* const all = &slots.at[0][0][0];
      for (int i = group.thread(); i < 4 * kMaxWarps; i += group.threads()) all[i] = 0;
      __syncthreads();
    }
    const int warp = group.thread() / kWarpSize;
    write_ = slots.at[0][upper_] + (warp % kHalf) * 2 + warp / kHalf;
    read_ = slots.at[0][upper_] + (group.lane() % kHalf) * 2;
  }

  // Makes `a` the sum of the group's.
  template <typename Group>
  __device__ __forceinline__ void add_up(const Group& group, float& a) {
    a = group.reduce_lanes(a, SumOf());
    if (!several_) return;
    if (writes_ && !upper_) *write_ = a;
    meet(group);
    // Both halves read the first half's slots.
    const float* const from = read_ - (upper_ ? kMaxWarps : 0);
    a = lane_sum<kHalf>(from[0] + from[1]);
    turn();
  }

  // The same for two values. In a full warp one half of the lanes adds up a, the other b.
  template <typename Group>
  __device__ __forceinline__ void add_up(const Group& group, float& a, float& b) {
    if (group.lanes() < kWarpSize) {
      a = group.reduce_lanes(a, SumOf());
      b = group.reduce_lanes(b, SumOf());
      return;
    }
    float sum = (upper_ ? b : a) + __shfl_xor_sync(kFullMask, upper_ ? a : b, kHalf);
    sum = lane_sum<kHalf>(sum);
    if (several_) {
      if (writes_) *write_ = sum;
      meet(group);
      sum = lane_sum<kHalf>(read_[0] + read_[1]);
      turn();
    }
    const float other = __shfl_xor_sync(kFullMask, sum, kHalf);
    a = upper_ ? other : sum;
    b = upper_ ? sum : other;
  }

 private:
  template <typename Group>
  __device__ __forceinline__ static void meet(const Group& group) {
    if constexpr (kNamedBarrier) {
      meet_at(group.index() + 1, group.threads());
    } else {
      __syncthreads();
    }
  }
  __device__ __forceinline__ void turn() {
    const int other = set_ ? -2 * kMaxWarps : 2 * kMaxWarps;
    write_ += other;
    read_ += other;
    set_ = !set_;
  }

  float* write_;
  const float* read_;
  bool several_, upper_, writes_, set_ = false;
};

// The blocks of a thread-block cluster share a row, each a slice of its columns. On chips without
// clusters, and in kernels launched without one, the cluster is the block itself.
class RowCluster {
 public:
  // arrive() and wait() come before the first gather(), in two steps so that work fits between
  // them: nobody may write to a block that has not begun.
#if __CUDA_ARCH__ >= 900
  __device__ int rank() const { return cooperative_groups::this_cluster().block_rank(); }
  __device__ int blocks() const { return cooperative_groups::this_cluster().num_blocks(); }
  __device__ void arrive() const { cooperative_groups::this_cluster().barrier_arrive(); }
  __device__ void wait() const { cooperative_groups::this_cluster().barrier_wait(); }
#else
  __device__ int rank() const { return 0; }
  __device__ int blocks() const { return 1; }
  __device__ void arrive() const {}
  __device__ void wait() const {}
#endif

  // What the blocks hold (in their threads 0 to kPortableClusterBlocks - 1), in the order of their
  // ranks, for all threads to read until the next gather(). `slots` is shared memory, two sets used
  // in turn.
  template <typename V>
  __device__ const V* gather(const V& value, V (&slots)[2][kPortableClusterBlocks]) {
    V* const own = slots[turn_];
    turn_ ^= 1;
#if __CUDA_ARCH__ >= 900
    const auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x < cluster.num_blocks())
      *cluster.map_shared_rank(own + cluster.block_rank(), threadIdx.x) = value;
    cluster.sync();
#endif
    return own;
  }

  // Combines what the blocks hold, in the order of their ranks; every thread gets the same.
  template <typename V, typename Combine>
  __device__ V reduce(V value, V (&slots)[2][kPortableClusterBlocks], Combine combine) {
    const V* const parts = gather(value, slots);
    value = parts[0];
    for (int rank = 1; rank < blocks(); ++rank) value = combine(value, parts[rank]);
    return value;
  }

 private:
  int turn_ = 0;
};

}  // namespace fused_norm
