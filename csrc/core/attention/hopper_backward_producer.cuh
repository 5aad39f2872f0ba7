// The form of a backward kernel on Hopper, its shared memory, and the warp that fills it.
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "core/attention/hopper_ptx.cuh"
#include "core/attention/hopper_scores.cuh"
#include "core/attention/hopper_work.cuh"

namespace fused_norm::hopper {

// What a kernel is told. Its own side are the queries, with dout, or the keys, with values; the
// other side are the others. The work is that of a forward pass whose queries are the own side.
// Tensor maps have dimensions (column, row, head, batch).
struct BackwardArgs : WorkArgs, ScoreArgs {
  CUtensorMap own_first, own_second;      // query and dout, or key and value
  CUtensorMap other_first, other_second;  // key and value, or query and dout
  const float *exponents, *delta;         // of queries (workspace.h)
  int32_t group;                          // query heads of a head of keys
  float gradient_scale;                   // what dquery and dkey are multiplied by at last
  AttentionTensor first, second;          // dquery or dkey; dvalue. Null data: not asked for
  int32_t head_dim, value_dim;
};

// A form of the kernel. kGeneral: scores pass through softcap and slopes. kOfKeys: the own side are
// keys, else queries. kFirst: makes dquery or dkey; kSecond: dvalue.
template <typename T_, bool kGeneral_, int kDim_, bool kOfKeys_, bool kFirst_, bool kSecond_,
          int kOthers_, int kOwnStages_, int kFirstStages_, int kSecondStages_>
struct BackwardForm {
  using T = T_;
  static constexpr int kDim = kDim_, kOthers = kOthers_, kGroups = 2;
  static constexpr int kOwnStages = kOwnStages_;
  static constexpr bool kGeneral = kGeneral_, kOfKeys = kOfKeys_, kFirst = kFirst_,
                        kSecond = kSecond_;
  static constexpr int kFirstStages = kFirstStages_, kSecondStages = kSecondStages_;
  static constexpr int kOwn = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  // What a thread of either kind has (ForwardForm).
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  // A tile's scores are started while the tile before is still read.
  static_assert(kFirstStages >= 2 && (kFirst || kSecondStages >= 2));
  static_assert(kFirst || kSecond);
  static_assert(kOfKeys || !kSecond);
  using OwnTile = SharedTile<kOwn, kDim>;
  using OtherTile = SharedTile<kOthers, kDim>;
};

// The kinds: dquery; dkey and dvalue; and one of the two alone.
template <typename T, bool kGeneral, int kDim, int kOthers, int kOwnStages, int kFirstStages,
          int kSecondStages>
using QueryForm = BackwardForm<T, kGeneral, kDim, false, true, false, kOthers, kOwnStages,
                               kFirstStages, kSecondStages>;
template <typename T, bool kGeneral, int kDim, int kOthers, int kOwnStages, int kStages>
using KeyValueForm =
    BackwardForm<T, kGeneral, kDim, true, true, true, kOthers, kOwnStages, kStages, kStages>;
template <typename T, bool kGeneral, int kDim, int kOthers, int kOwnStages, int kFirstStages,
          int kSecondStages>
using KeyForm = BackwardForm<T, kGeneral, kDim, true, true, false, kOthers, kOwnStages,
                             kFirstStages, kSecondStages>;
template <typename T, bool kGeneral, int kDim, int kOthers, int kOwnStages, int kStages>
using ValueForm =
    BackwardForm<T, kGeneral, kDim, true, false, true, kOthers, kOwnStages, kStages, kStages>;

template <typename Form>
struct BackwardMemory {
  static constexpr int kStatistics = Form::kOfKeys ? Form::kOthers : 2;
  alignas(1024) char own_first[Form::kOwnStages][Form::OwnTile::kBytes];
  alignas(1024) char own_second[Form::kOwnStages][Form::kFirst ? Form::OwnTile::kBytes : 1024];
  alignas(1024) char first[Form::kFirstStages][Form::OtherTile::kBytes];
  alignas(1024) char second[Form::kSecondStages][Form::OtherTile::kBytes];
  // Where the others are queries: theirs, beside `first`.
  alignas(16) float exponents[Form::kFirstStages][kStatistics];
  alignas(16) float delta[Form::kFirstStages][kStatistics];
  CopyBarrier own_full[Form::kOwnStages], own_empty[Form::kOwnStages];
  CopyBarrier first_full[Form::kFirstStages], first_empty[Form::kFirstStages];
  CopyBarrier second_full[Form::kSecondStages], second_empty[Form::kSecondStages];
  // The producer fills one while consumers may still finish the one before the one at work.
  static constexpr int kWorks = 4;
  WorkTile work[kWorks];
  ListPlace place;
};

// Where the statistics of a sequence's first query lie, for one query head.
template <typename Form>
__device__ __forceinline__ int64_t first_statistic(const BackwardArgs& args, const WorkTile& work,
                                                   int head) {
  if (args.query_offsets == nullptr) {
    const int64_t heads = int64_t{args.heads} * (Form::kOfKeys ? args.group : 1);
    return (work.sequence * heads + head) * (Form::kOfKeys ? args.keys : args.queries);
  }
  return Form::kOfKeys ? int64_t{head} * args.total_keys + work.key_begin
                       : int64_t{head} * args.total_queries + work.query_begin;
}

// The heads of the other side that a tile of the own side meets: those of its group, or its own.
template <typename Form>
__device__ __forceinline__ int first_head(const BackwardArgs& args, const WorkTile& work) {
  return Form::kOfKeys ? work.head * args.group : work.kv_head;
}
template <typename Form>
__device__ __forceinline__ int steps_of(const BackwardArgs& args, const WorkTile& work) {
  return max(work.end_tile - work.first_tile, 0) * (Form::kOfKeys ? args.group : 1);
}

// One warp: copies tiles of both sides in the order in which they are used.
template <typename Form>
class BackwardProducer {
  using OwnTile = typename Form::OwnTile;
  using OtherTile = typename Form::OtherTile;
  static constexpr int kOthers = Form::kOthers;

 public:
  __device__ __forceinline__ BackwardProducer(const BackwardArgs& args,
                                              BackwardMemory<Form>& memory)
      : args_(args), memory_(memory), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    WorkList<Form::kOwn, kOthers> list(args_, &memory_.place);
    uint32_t index = blockIdx.x;
    for (uint32_t count = 0;; ++count) {
      WorkTile& work = memory_.work[count % BackwardMemory<Form>::kWorks];
      const bool found = list.tile(index, &work);
      uint32_t next = index + gridDim.x;
      if (lane_ == 0 && args_.ticket != nullptr) next = gridDim.x + atomicAdd(args_.ticket, 1);
      __syncwarp();
      const int steps = found ? steps_of<Form>(args_, work) : 0;
      head_ = found ? first_head<Form>(args_, work) : 0;
      tile_ = work.first_tile;
      if (steps > 0) load_others(work);
      const int own_slot = count % Form::kOwnStages;
      wait(memory_.own_empty[own_slot], count / Form::kOwnStages % 2 ^ 1);
      if (lane_ == 0) {
        if (steps > 0) {
          load_own(work, own_slot);
        } else {
          arrive(memory_.own_full[own_slot]);
        }
      }
#pragma unroll 1
      for (int step = 1; step < steps; ++step) load_others(work);
      if (!found) return;
      index = __shfl_sync(~0u, next, 0);
    }
  }

 private:
  __device__ __forceinline__ void load_own(const WorkTile& work, int slot) {
    CopyBarrier& full = memory_.own_full[slot];
    const int row = work.query_begin + work.first;
    full.expect((Form::kFirst ? 2 : 1) * OwnTile::kBytes);
    load_tile<OwnTile>(shared_address(memory_.own_first[slot]), &args_.own_first, full, row,
                       work.head, work.batch);
    if constexpr (Form::kFirst) {
      load_tile<OwnTile>(shared_address(memory_.own_second[slot]), &args_.own_second, full, row,
                         work.head, work.batch);
    }
  }

  // The next tile of others.
  __device__ __forceinline__ void load_others(const WorkTile& work) {
    const int slot = first_place_.slot, row = work.key_begin + tile_ * kOthers;
    if constexpr (Form::kOfKeys) {
      constexpr int kTimes = (kOthers + 31) / 32;
      float exponents[kTimes], delta[kTimes];
      const int64_t first = first_statistic<Form>(args_, work, head_) + tile_ * kOthers + lane_;
      const int end = work.keys - tile_ * kOthers - lane_;
#pragma unroll
      for (int i = 0; i < kTimes; ++i) {
        exponents[i] = 32 * i < end ? args_.exponents[first + 32 * i] : INFINITY;
        delta[i] = 32 * i < end ? args_.delta[first + 32 * i] : 0;
      }
      wait(memory_.first_empty[slot], first_place_.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kTimes; ++i) {
        if (kOthers % 32 != 0 && lane_ + 32 * i >= kOthers) continue;
        memory_.exponents[slot][lane_ + 32 * i] = exponents[i];
        memory_.delta[slot][lane_ + 32 * i] = delta[i];
      }
      __syncwarp();
    } else {
      wait(memory_.first_empty[slot], first_place_.parity ^ 1);
    }
    CopyBarrier& second_full = memory_.second_full[second_place_.slot];
    if (lane_ == 0) {
      memory_.first_full[slot].expect(OtherTile::kBytes);
      load_tile<OtherTile>(shared_address(memory_.first[slot]), &args_.other_first,
                           memory_.first_full[slot], row, head_, work.batch);
      wait(memory_.second_empty[second_place_.slot], second_place_.parity ^ 1);
      second_full.expect(OtherTile::kBytes);
      load_tile<OtherTile>(shared_address(memory_.second[second_place_.slot]), &args_.other_second,
                           second_full, row, head_, work.batch);
    }
    __syncwarp();
    first_place_.advance();
    second_place_.advance();
    if (++tile_ == work.end_tile) {
      tile_ = work.first_tile;
      ++head_;
    }
  }

  const BackwardArgs& args_;
  BackwardMemory<Form>& memory_;
  const int lane_;
  int head_, tile_;
  RingPlace<Form::kFirstStages> first_place_;
  RingPlace<Form::kSecondStages> second_place_;
};

}  // namespace fused_norm::hopper
