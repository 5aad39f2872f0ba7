// The form of a forward kernel on Hopper, its shared memory, and the warp that fills it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "core/attention/hopper_mask.cuh"
#include "core/attention/hopper_ptx.cuh"
#include "core/attention/hopper_scores.cuh"
#include "core/attention/hopper_work.cuh"
#include "core/attention/plan.h"

namespace fused_norm::hopper {

// What the kernel is told. Tensor maps have dimensions (column, row, head, batch).
struct ForwardArgs : ScoreArgs {
  CUtensorMap query_map, key_map, value_map;
  MaskKind mask_kind;  // kAny for general scores too
};

// What a form of the kernel takes beside plain scores. kNone: nothing, so its loop is short. kSome:
// softcap, slopes, masks of keys. kMask: softcap, slopes, other masks. kDropout: dropout, and what
// kSome takes.
enum class Options { kNone, kSome, kMask, kDropout };

// A form of the kernel. kGroups: multiplying warpgroups.
template <typename T_, int kDim_, Options kOptions, int kGroups_>
struct ForwardForm {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr bool kGeneral = kOptions != Options::kNone;
  static constexpr bool kDrops = kOptions == Options::kDropout;
  static constexpr bool kMasked = kOptions == Options::kMask;
  static constexpr bool kMasksKeys = kOptions == Options::kSome || kDrops;
  // Who fills the slot of a tile of keys: who starts its copy, and who writes what masks it.
  static constexpr int kKeyFillers = kMasksKeys ? 33 : 1;
  static constexpr HopperTiles kTiles = kHopperForwardTiles[kMasked][hopper_dim_index(kDim)];
  static constexpr int kKeys = kTiles.others, kGroups = kGroups_;
  static constexpr int kQueryStages = kTiles.own_stages;
  static constexpr int kKeyStages = kTiles.first_stages, kValueStages = kTiles.second_stages;
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
  using Mask = MaskTile<T, kRows, kKeys, 4, (kDim <= 192 ? 2 : 1)>;
};

// A tile of queries; `again`: its sums were spoiled (MaskVerdict).
struct ForwardTile : PartTile {
  bool again;
};
// With a mask, whose warps wait until the tile is known.
struct MaskedForwardTile : ForwardTile {
  CopyBarrier is_known;
};

template <typename Form>
struct ForwardMemory {
  alignas(1024) char query[Form::kQueryStages][Form::QueryTile::kBytes];
  alignas(1024) char key[Form::kKeyStages][Form::KeyTile::kBytes];
  alignas(1024) char value[Form::kValueStages][Form::KeyTile::kBytes];
  alignas(16) char mask[Form::kMasked ? Form::Mask::kBytes : 16];
  CopyBarrier mask_full[2], mask_empty[2];
  CopyBarrier query_full[Form::kQueryStages], query_empty[Form::kQueryStages];
  CopyBarrier key_full[Form::kKeyStages], key_empty[Form::kKeyStages];
  CopyBarrier value_full[Form::kValueStages], value_empty[Form::kValueStages];
  // The block's tiles of queries in turn: the producer fills one while consumers may still finish
  // the one before those whose queries are here.
  static constexpr int kWorks = Form::kQueryStages + 2;
  std::conditional_t<Form::kMasked, MaskedForwardTile, ForwardTile> work[kWorks];
  ListPlace place;
  // What a mask of keys adds to the scores of a tile of them.
  static constexpr int kMaskedKeys = Form::kMasksKeys ? Form::kKeys : 2;
  alignas(8) float key_added[Form::kKeyStages][kMaskedKeys];
  bool key_hidden[Form::kGroups][kMaskedKeys];  // of a warpgroup's last tile of keys
  MaskVerdict<Form::kKeys> verdict;
  // Of no head. Read once, as shared memory leaves the first-level cache no room.
  std::conditional_t<Form::kDrops, Dropout, char> dropout;

  // By one thread.
  __device__ __forceinline__ void init() {
    constexpr int kWarps = 4 * Form::kGroups;  // of consumers: each arrives once
    init_ring(query_full, query_empty, 1, kWarps + (Form::kMasked ? Form::Mask::kWarps : 0));
    verdict.init(kWarps);
    if constexpr (Form::kMasked)
      for (MaskedForwardTile& tile : work) tile.is_known.init();
    init_ring(mask_full, mask_empty, Form::Mask::kThreads, 128 * Form::kGroups);
    place = {};
    init_ring(key_full, key_empty, Form::kKeyFillers, Form::kMasksKeys ? 32 * kWarps : kWarps);
    init_ring(value_full, value_empty, 1, kWarps);
  }
};

// One warp: copies the tiles of queries, keys and values in the order in which they are used.
template <typename Form>
class ForwardProducer {
  using KeyTile = typename Form::KeyTile;
  static constexpr auto kHidden = Form::kGeneral ? Hidden::kKeys : Hidden::kNone;

 public:
  __device__ __forceinline__ ForwardProducer(const ForwardArgs& args, ForwardMemory<Form>& memory)
      : args_(args), memory_(memory), leader_(threadIdx.x == 0), list_(args, &memory.place) {}

  __device__ __forceinline__ void run() {
    uint32_t ahead = blockIdx.x;  // of the tile that comes next, unless one is done again
    const ForwardTile* work = begin(ahead);
    if (Form::kQueryStages == 1) load_query(*work);
    while (work->sequence >= 0) {
      const int takes_at = min(work->end_tile - 1, work->first_tile + kTicketSteps);
#pragma unroll 1
      for (int tile = work->end_tile - 1;; --tile) {
        if (tile == takes_at && !again_) ahead = next_index(args_, ahead);
        if (tile <= work->first_tile) break;
        load_key(*work, tile - 1);
        load_value(*work, tile);
      }
      ahead = __shfl_sync(~0u, ahead, 0);
      if (Form::kMasked && sees_keys(*work)) load_value(*work, work->first_tile);
      if (Form::kMasked) look_back(*work);
      // The next tile's first copies go before the last one of this: they take the longest.
      const ForwardTile* next = begin(again_ ? spoiled_ : ahead);
      if (!Form::kMasked && sees_keys(*work)) load_value(*work, work->first_tile);
      if (Form::kQueryStages == 1) load_query(*next);
      work = next;
    }
  }

 private:
  // Finds a tile of queries, and starts the copies of its first keys and, if they have another slot
  // than those before, its queries: first, as they come from memory, the keys mostly from a cache.
  __device__ __forceinline__ const ForwardTile* begin(uint32_t index) {
    auto* work = &memory_.work[work_place_.slot()];
    work_place_.advance();
    list_.tile(index, work);
    index_ = index;
    if (leader_) work->again = again_;
    // Not the end while a verdict is unread, but a tile without queries.
    if (leader_ && work->sequence < 0 && unread_) static_cast<PartTile&>(*work) = {};
    __syncwarp();
    if constexpr (Form::kMasked)
      if (leader_) arrive(work->is_known);
    if (Form::kQueryStages > 1) load_query(*work);
    if (sees_keys(*work)) load_key(*work, work->end_tile - 1);
    return work;
  }
  // Whether the tile before `work` is done again.
  __device__ __forceinline__ void look_back(const ForwardTile& work) {
    again_ = unread_ && memory_.verdict.read(verdict_turn_);
    spoiled_ = before_;
    before_ = index_;
    unread_ = sees_keys(work) && !work.again;
  }
  __device__ __forceinline__ void load_query(const WorkTile& work) {
    const int slot = query_place_.slot();
    CopyBarrier& full = memory_.query_full[slot];
    memory_.query_empty[slot].wait(query_place_.parity() ^ 1);
    query_place_.advance();
    if (!leader_) return;
    if (!sees_keys(work)) return arrive(full);
    full.expect(Form::QueryTile::kBytes);
    load_tile<typename Form::QueryTile>(shared_address(memory_.query[slot]), &args_.query_map, full,
                                        work.query_begin + work.first, work.head, work.batch);
  }
  __device__ __forceinline__ void load_key(const WorkTile& work, int tile) {
    const int slot = key_place_.slot();
    memory_.key_empty[slot].wait(key_place_.parity() ^ 1);
    if constexpr (Form::kMasksKeys) {
      if (mask_changes(args_, work, tile)) set_key_mask(work, tile, slot);
      arrive(memory_.key_full[slot]);
    }
    if (leader_) load(&args_.key_map, memory_.key[slot], memory_.key_full[slot], work, tile);
    key_place_.advance();
  }
  __device__ __forceinline__ void load_value(const WorkTile& work, int tile) {
    const int slot = value_place_.slot();
    memory_.value_empty[slot].wait(value_place_.parity() ^ 1);
    if (leader_) load(&args_.value_map, memory_.value[slot], memory_.value_full[slot], work, tile);
    value_place_.advance();
  }
  __device__ __forceinline__ void load(const CUtensorMap* map, char* to, CopyBarrier& full,
                                       const WorkTile& work, int tile) const {
    full.expect(KeyTile::kBytes);
    load_tile<KeyTile>(shared_address(to), map, full, work.key_begin + tile * Form::kKeys,
                       work.kv_head, work.batch);
  }
  __device__ __forceinline__ void set_key_mask(const WorkTile& work, int tile, int slot) {
    for (int i = threadIdx.x; i < Form::kKeys; i += 32) {
      const int key = tile * Form::kKeys + i;
      const float added =
          key < work.keys ? key_mask_value(args_.mask, work.sequence, work.head, key) : 0;
      memory_.key_added[slot][i] = added * args_.mask_factor;
    }
  }

  const ForwardArgs& args_;
  ForwardMemory<Form>& memory_;
  const bool leader_;
  // With a mask: of the tile at hand, the one before, and the one to be done again, if any.
  uint32_t index_ = 0, before_ = 0, spoiled_ = 0, verdict_turn_ = 0;
  bool again_ = false, unread_ = false;  // unread: the verdict on the tile before
  WorkList<Form::kRows, Form::kKeys, kHidden, true> list_;
  RingPlace<Form::kKeyStages> key_place_;
  RingPlace<Form::kValueStages> value_place_;
  RingPlace<Form::kQueryStages> query_place_;
  RingPlace<ForwardMemory<Form>::kWorks> work_place_;
};

// The other warps of the producer's warpgroup copy tiles of the mask.
template <typename Form>
__device__ __forceinline__ void copy_masks(const ForwardArgs& args, ForwardMemory<Form>& memory) {
  RingPlace<Form::kQueryStages> query_place;
  RingPlace<ForwardMemory<Form>::kWorks> work_place;
  uint32_t turn = 0;
  const uint32_t slots = Form::Mask::slots(args.mask);
  while (true) {
    const auto& work = memory.work[work_place.slot()];
    work.is_known.wait(work_place.parity());
    work_place.advance();
    if (work.sequence < 0) return wait_for_all_copies();
    for (int tile = work.end_tile - 1; tile >= work.first_tile; --tile) {
      if (!mask_changes(args, work, tile)) continue;
      __syncwarp();  // copies diverge
      const uint32_t slot = turn % slots;
      memory.mask_empty[slot].wait(turn++ / slots % 2 ^ 1);
      Form::Mask::copy(args.mask, memory.mask + slot * Form::Mask::kSlotBytes,
                       memory.mask_full[slot], work.sequence, work.head, work.first, work.queries,
                       tile * Form::kKeys, work.keys);
    }
    // Done with `work`. Its queries are there first, or this would count for those before.
    memory.query_full[query_place.slot()].wait(query_place.parity());
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(memory.query_empty[query_place.slot()]);
    query_place.advance();
  }
}

}  // namespace fused_norm::hopper
