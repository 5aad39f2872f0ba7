// The form of a forward kernel on Hopper, its shared memory, and the warp that fills it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/attention/hopper_mask.cuh"
#include "core/attention/hopper_ptx.cuh"
#include "core/attention/hopper_scores.cuh"
#include "core/attention/hopper_work.cuh"
#include "core/attention/plan.h"

namespace fused_norm::hopper {

// What the kernel is told. Tensor maps have dimensions (column, row, head, batch).
struct ForwardArgs : WorkArgs, ScoreArgs {
  CUtensorMap query, key, value;
  AttentionTensor out;
  int32_t value_dim;
  float* lse;
};

// A form of the kernel. kMasked: there is a mask. kGroups: multiplying warpgroups.
template <typename T_, int kDim_, bool kMasked_, int kGroups_>
struct ForwardForm {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr bool kMasked = kMasked_;
  static constexpr HopperForwardTiles kTiles = kHopperForwardTiles[kMasked][hopper_dim_index(kDim)];
  static constexpr int kKeys = kTiles.keys, kGroups = kGroups_;
  static constexpr int kQueryStages = kTiles.query_stages;
  static constexpr int kKeyStages = kTiles.key_stages, kValueStages = kTiles.value_stages;
  static constexpr int kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  // What a thread of either kind has. The launch gives all the same, 168 or 128, and takes no more
  // from the 65536 of the chip than that: a warpgroup that asks for more in sum waits for ever.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kGroups == 3 ? 160 : 232;
  static_assert(kProducerRegisters + kGroups * kConsumerRegisters <=
                (kGroups + 1) * kLaunchRegisters);
  using QueryTile = SharedTile<kRows, kDim>;
  using KeyTile = SharedTile<kKeys, kDim>;
  using Mask = MaskTile<kRows, kKeys, 4>;
  static_assert(!kMasked || kQueryStages == 1);  // a tile with a mask may be done twice
};

template <typename Form>
struct ForwardMemory {
  alignas(1024) char query[Form::kQueryStages][Form::QueryTile::kBytes];
  alignas(1024) char key[Form::kKeyStages][Form::KeyTile::kBytes];
  alignas(1024) char value[Form::kValueStages][Form::KeyTile::kBytes];
  alignas(16) char mask[Form::kMasked ? Form::Mask::kBytes : 16];
  CopyBarrier mask_full;
  CopyBarrier query_full[Form::kQueryStages], query_empty[Form::kQueryStages];
  CopyBarrier key_full[Form::kKeyStages], key_empty[Form::kKeyStages];
  CopyBarrier value_full[Form::kValueStages], value_empty[Form::kValueStages];
  // The block's tiles of queries in turn: the producer fills one while consumers may still finish
  // the one before those whose queries are here.
  static constexpr int kWorks = Form::kQueryStages + 2;
  WorkTile work[kWorks];
  ListPlace place;
  MaskVerdict<Form::kKeys> verdict;
};

// One warp: copies the tiles of queries, keys and values in the order in which they are used.
template <typename Form>
__device__ __forceinline__ void produce(const ForwardArgs& args, ForwardMemory<Form>& memory) {
  using KeyTile = typename Form::KeyTile;
  const bool leader = threadIdx.x % 32 == 0;
  WorkList<Form::kRows, Form::kKeys> list(args, &memory.place);
  RingPlace<Form::kKeyStages> key_place;
  RingPlace<Form::kValueStages> value_place;
  RingPlace<Form::kQueryStages> query_place;
  RingPlace<ForwardMemory<Form>::kWorks> work_place;
  uint32_t verdict_turn = 0;

  const auto load = [&](const CUtensorMap* map, auto& to, auto& full, auto& empty, auto& place,
                        const WorkTile& work, int tile) {
    wait(empty[place.slot], place.parity ^ 1);
    full[place.slot].expect(KeyTile::kBytes);
    load_tile<KeyTile>(shared_address(to[place.slot]), map, full[place.slot],
                       work.key_begin + tile * Form::kKeys, work.kv_head, work.batch);
    place.advance();
  };
  const auto load_key = [&](const WorkTile& work, int tile) {
    load(&args.key, memory.key, memory.key_full, memory.key_empty, key_place, work, tile);
  };
  const auto load_value = [&](const WorkTile& work, int tile) {
    load(&args.value, memory.value, memory.value_full, memory.value_empty, value_place, work, tile);
  };

  // All but the first keys and the last values.
  const auto load_rest = [&](const WorkTile& work) {
#pragma unroll 1
    for (int tile = work.end_tile - 2; tile >= work.first_tile; --tile) {
      load_key(work, tile);
      load_value(work, tile + 1);
    }
  };
  const auto load_query = [&](const WorkTile& work) {
    const int slot = query_place.slot;
    CopyBarrier& full = memory.query_full[slot];
    wait(memory.query_empty[slot], query_place.parity ^ 1);
    query_place.advance();
    if (!sees_keys(work)) return arrive(full);
    full.expect(Form::QueryTile::kBytes);
    load_tile<typename Form::QueryTile>(shared_address(memory.query[slot]), &args.query, full,
                                        work.query_begin + work.first, work.head, work.batch);
  };
  // By the warp: finds a tile of queries, and starts the copy of its first keys.
  bool found;
  const auto begin = [&](uint32_t index) {
    WorkTile& work = memory.work[work_place.slot];
    work_place.advance();
    found = list.tile(index, &work);
    if (leader && sees_keys(work)) load_key(work, work.end_tile - 1);
    return &work;
  };

  uint32_t index = blockIdx.x;
  const WorkTile* work = begin(index);
  if (leader) load_query(*work);
  while (found) {
    if (leader) {
      index = args.ticket == nullptr ? index + gridDim.x : gridDim.x + atomicAdd(args.ticket, 1);
      load_rest(*work);
      if (Form::kMasked && sees_keys(*work)) {
        load_value(*work, work->first_tile);
        if (memory.verdict.read(verdict_turn)) {
          load_key(*work, work->end_tile - 1);
          load_rest(*work);
          load_value(*work, work->first_tile);
        }
      }
    }
    index = __shfl_sync(~0u, index, 0);
    // The next tile's first copies go before the last one of this: they take the longest.
    const WorkTile* next = begin(index);
    if (leader) {
      if (Form::kQueryStages > 1) load_query(*next);
      if (!Form::kMasked && sees_keys(*work)) load_value(*work, work->first_tile);
      if (Form::kQueryStages == 1) load_query(*next);
    }
    work = next;
  }
}

// The other warps of the producer's warpgroup copy tiles of the mask.
template <typename Form>
__device__ __forceinline__ void copy_masks(const ForwardArgs& args, ForwardMemory<Form>& memory) {
  RingPlace<Form::kQueryStages> query_place;
  RingPlace<ForwardMemory<Form>::kWorks> work_place;
  uint32_t verdict_turn = 0;
  bool has_copied = false;
  while (true) {
    wait(memory.query_full[query_place.slot], query_place.parity);
    const WorkTile& work = memory.work[work_place.slot];
    work_place.advance();
    if (work.sequence < 0) return wait_for_readers<128 * Form::kGroups>(has_copied);
    for (bool again = sees_keys(work), first = true; again; first = false) {
      for (int tile = work.end_tile - 1; tile >= work.first_tile; --tile) {
        wait_for_readers<128 * Form::kGroups>(has_copied);
        Form::Mask::copy(args.mask, memory.mask, memory.mask_full, work.sequence, work.head,
                         work.first, work.queries, tile * Form::kKeys, work.keys);
      }
      again = first && memory.verdict.read(verdict_turn);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(memory.query_empty[query_place.slot]);  // done with `work`
    query_place.advance();
  }
}

}  // namespace fused_norm::hopper
