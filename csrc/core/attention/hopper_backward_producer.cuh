// The form of a backward kernel on Hopper, its shared memory, and the warp that fills it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "core/attention/hopper_mask.cuh"
#include "core/attention/hopper_ptx.cuh"
#include "core/attention/hopper_scores.cuh"
#include "core/attention/hopper_work.cuh"
#include "core/attention/plan.h"
#include "core/attention/tiers.h"

namespace fused_norm::hopper {

// Elements of a chunk, 64 queries by at most 64 columns of dquery; the warps that write chunks, one
// for each multiplying warpgroup, behind the producer's first.
constexpr int kChunkElements = 64 * 64, kChunkWarps = 2;

// Sums in scratch memory to which blocks add one after the other (hopper_fused.cuh).
struct ChunkSums {
  float* chunks;
  uint32_t* counters;  // how many blocks have added to each chunk; 0 at first
  QueryParts tiles;
};

// The first of a sequence's chunks of one group, of tiles of kRows; the next tile's is two further.
template <int kRows>
__device__ __forceinline__ int64_t first_chunk(const QueryParts& tiles, int sequence, int head,
                                               int begin, int half) {
  return 2 * tiles.first(sequence, head, begin / kRows) + half;
}

// What a kernel is told. Its own side are the queries, with dout, or the keys, with values; the
// other side are the others. The work is that of a forward pass whose queries are the own side.
// Tensor maps have dimensions (column, row, head, batch).
struct BackwardArgs : ScoreArgs {
  AttentionGradient gradient;             // its call is that of a forward pass as it is
  CUtensorMap own_first, own_second;      // query and dout, or key and value
  CUtensorMap other_first, other_second;  // key and value, or query and dout
  CUtensorMap statistics_map;             // of the statistics' two rows, but for kQuery
  int32_t parts, group;                   // parts of a head of keys, and query heads of a part
  float gradient_scale;                   // what dquery and dkey are multiplied by at last
  bool masks_keys;                        // of kAll: the mask is one of keys, which needs no tiles
  // Of kAll: dquery, once more as the compiler spills otherwise, and its sums. Of kKeys too: those
  // of dkey and dvalue, where there are parts.
  AttentionTensor dquery;
  ChunkSums sums, own_sums;
};

// The gradients that a kernel makes. kKeys: dkey and dvalue (hopper_keys.cuh). kAll: these and the
// sums of dquery (hopper_fused.cuh). kMask: that of an additive mask (hopper_mask_gradient.cuh).
enum class Makes { kQuery, kKeys, kAll, kMask };

// A form of the kernel. kGeneral: scores pass through softcap, slopes and mask. kDrops, with kAll
// and kGeneral: there is dropout.
template <typename T_, int kDim_, Makes kMakes, bool kGeneral_, bool kDrops_ = false>
struct BackwardForm {
  using T = T_;
  static constexpr bool kGeneral = kGeneral_, kDrops = kDrops_, kAll = kMakes == Makes::kAll;
  static constexpr bool kOfMask = kMakes == Makes::kMask, kApart = kMakes == Makes::kKeys;
  // Whether the own side are keys, not queries. Keys have a second sum: dvalue.
  static constexpr bool kOfKeys = kAll || kApart;
  static constexpr int kDim = kDim_, kIndex = hopper_dim_index(kDim);
  static constexpr HopperTiles kTiles = kAll      ? kHopperFusedTiles[kGeneral][kIndex]
                                        : kOfMask ? kHopperMaskGradientTiles[kIndex]
                                        : kApart  ? kHopperKeyGradientTiles[kGeneral][kIndex]
                                                  : kHopperQueryGradientTiles[kIndex];
  static constexpr int kOthers = kTiles.others, kGroups = 2;
  static constexpr int kOwnStages = kTiles.own_stages, kFirstStages = kTiles.first_stages;
  static constexpr int kSecondStages = kTiles.second_stages, kWeightStages = 2;
  static constexpr int kOwn = kApart ? kHopperApartRows : kHopperOwnRows;
  static constexpr int kThreads = 128 * (kGroups + 1);
  // What a thread of either kind has (ForwardForm). With dropout the warps that write
  // chunks need more.
  static constexpr int kProducerRegisters = kDrops ? 56 : 40;
  static constexpr int kConsumerRegisters = kDrops ? 224 : 232;
  static_assert(kProducerRegisters + kGroups * kConsumerRegisters <=
                (kGroups + 1) * (65536 / kThreads / 8 * 8));
  static_assert(!kDrops || (kAll && kGeneral));
  // Kernels without options have registers to spare. They hold the first blocks of 16 columns of
  // the own second tile, so that D's product reads one factor, not two, from shared memory; and a
  // statistic of a thread's first pairs of columns.
  static constexpr int kOwnBlocks = kGeneral || !kAll ? 0 : kDim == 64 ? 2 : kDim == 96 ? 6 : 0;
  static constexpr int kReadAhead = kGeneral || !kAll ? 0 : 8;
  // A tile's scores are started while the tile before is still read.
  static_assert(kFirstStages >= 2 && (!kApart || kSecondStages >= 2));
  // Of kAll: the two chunks of a tile's dquery have 64 queries each, or 64 columns and the rest.
  static constexpr bool kByQueries = kOthers == 128;
  static_assert(!kAll || (kByQueries ? kDim == 64 : kOthers == 64 && kDim > 64 && kDim <= 128));
  static __host__ __device__ constexpr int chunk_elements(int half) {
    return kByQueries || half == 0 ? kChunkElements : 64 * (kDim - 64);
  }
  using OwnTile = SharedTile<kOwn, kDim>;
  using OtherTile = SharedTile<kOthers, kDim>;
  // Where there is room for a tile of a mask. Queries' tiles may be done twice for it.
  static constexpr bool kMasks = kGeneral && kDim <= kMaxMaskedBackwardDim;
  static constexpr bool kMends = kMasks && !kOfMask && !kOfKeys;
  static constexpr Hidden kHidden = kOfMask || !(kMasks || kAll) ? Hidden::kNone
                                    : kOfKeys                    ? Hidden::kQueries
                                                                 : Hidden::kKeys;
  // The warps that copy tiles of a mask are the last of the producer's warpgroup.
  static constexpr int kMaskWarps = kAll ? 3 - kChunkWarps : 3;
  using Mask = MaskTile<T, kOfKeys ? kOthers : kOwn, kOfKeys ? kOwn : kOthers, 2, 1, kMaskWarps>;

  // Whether scores pass through tiles of a mask.
  static __device__ __forceinline__ bool has_mask(const BackwardArgs& args) {
    return kMasks && args.mask.data != nullptr && !args.masks_keys;
  }
  // The head of a tile of the own side. Of keys, first come the first parts of all heads, then the
  // second, as a part's sums wait for those of the part before.
  static __device__ __forceinline__ int own_head(const BackwardArgs& args, const WorkTile& work) {
    return kOfKeys ? work.head % args.kv_heads : work.head;
  }
  static __device__ __forceinline__ int part_of(const BackwardArgs& args, const WorkTile& work) {
    return work.head / args.kv_heads;
  }
  // The heads of the other side that a tile of the own side meets: those of its part, or its own.
  static __device__ __forceinline__ int first_head(const BackwardArgs& args, const WorkTile& work) {
    if constexpr (!kOfKeys) return work.kv_head;
    return (own_head(args, work) * args.parts + part_of(args, work)) * args.group;
  }
  // The queries' head, where the last `heads` of the group are left.
  static __device__ __forceinline__ int query_head(const BackwardArgs& args, const WorkTile& work,
                                                   int heads) {
    return kOfKeys ? first_head(args, work) + args.group - heads : work.head;
  }

  // Where a walk stands: its tile of others, the heads that are left of that with the one at hand,
  // and the last tile. A tile is met in each head before the next. Tiles go upwards; those of the
  // kernel of all downwards, as all tiles of keys that a query sees under a causal mask can then
  // begin at once.
  struct Steps {
    int tile, heads, last;
  };
  static __device__ __forceinline__ int begin_tile(const WorkTile& work) {
    return kAll ? work.end_tile - 1 : work.first_tile;
  }
  static __device__ __forceinline__ int last_tile(const WorkTile& work) {
    return kAll ? work.first_tile : work.end_tile - 1;
  }
  static __device__ __forceinline__ int next_tile(int tile) { return kAll ? tile - 1 : tile + 1; }
  static __device__ __forceinline__ int heads_of_others(const BackwardArgs& args) {
    return kOfKeys ? args.group : 1;
  }
  static __device__ __forceinline__ int count_steps(const BackwardArgs& args,
                                                    const WorkTile& work) {
    return max(work.end_tile - work.first_tile, 0) * heads_of_others(args);
  }
  static __device__ __forceinline__ Steps begin_steps(const BackwardArgs& args,
                                                      const WorkTile& work) {
    return {begin_tile(work), heads_of_others(args), last_tile(work)};
  }
  // To the tile's next head, or the next tile; false: that was the last.
  static __device__ __forceinline__ bool advance(const BackwardArgs& args, const WorkTile& work,
                                                 Steps& steps) {
    if (--steps.heads > 0) return true;
    steps.heads = heads_of_others(args);
    // With options no register is left for it. (Reads of shared memory are slow beside products.)
    const int last = kGeneral && kAll ? last_tile(work) : steps.last;
    if (steps.tile == last) return false;
    steps.tile = next_tile(steps.tile);
    return true;
  }
};

// Of kAll: W of tiles of others, and the chunks of dquery that the groups make of it.
template <typename Form>
struct FusedMemory {
  using WeightTile = SharedTile<Form::kOwn, Form::kOthers>;
  alignas(1024) char weights[Form::kWeightStages][WeightTile::kBytes];
  alignas(1024) float4 chunk[Form::kGroups][kChunkElements / 4];
};
// Of kApart: P of tiles of others, as the threads of a group have it, 16 bytes of each at a time.
template <typename Form>
struct ApartMemory {
  uint4 weights[Form::kWeightStages][Form::kOthers / 16][128];
};
struct NoMemory {};

template <typename Form>
struct BackwardMemory
    : std::conditional_t<Form::kAll, FusedMemory<Form>,
                         std::conditional_t<Form::kApart, ApartMemory<Form>, NoMemory>> {
  alignas(1024) char own_first[Form::kOwnStages][Form::OwnTile::kBytes];
  alignas(1024) char own_second[Form::kOwnStages][Form::OwnTile::kBytes];
  alignas(1024) char first[Form::kFirstStages][Form::OtherTile::kBytes];
  alignas(1024) char second[Form::kSecondStages][Form::OtherTile::kBytes];
  // Delta and exponents of queries that come with a stage.
  static constexpr int kStageQueries = Form::kOfKeys   ? Form::kOthers
                                       : Form::kOfMask ? Form::kOwn
                                                       : 2;  // none
  alignas(128) float statistics[Form::kFirstStages][2][kStageQueries];
  float key_mask[Form::kAll ? Form::kOwn : 1];  // what a mask adds to the own keys' exponents
  alignas(16) char mask[Form::kMasks ? Form::Mask::kBytes : 1];
  CopyBarrier mask_full, mask_empty;
  MaskVerdict<Form::kMends ? Form::kOthers : 8> verdict;
  CopyBarrier own_full[Form::kOwnStages], own_empty[Form::kOwnStages];
  CopyBarrier first_full[Form::kFirstStages], first_empty[Form::kFirstStages];
  CopyBarrier second_full[Form::kSecondStages], second_empty[Form::kSecondStages];
  CopyBarrier weights_full[Form::kWeightStages], weights_empty[Form::kWeightStages];
  // The producer fills one while consumers may still finish the one before the one at work.
  static constexpr int kWorks = 4;
  WorkTile work[kWorks];
  ListPlace place;
  uint32_t count[Form::kGeneral ? 4 * Form::kGroups : 1];   // of consumers' warps: BackwardConsumer
  std::conditional_t<Form::kDrops, Dropout, char> dropout;  // as forward's
};

// One warp: copies tiles of both sides in the order in which they are used.
template <typename Form>
class BackwardProducer {
  using OwnTile = typename Form::OwnTile;
  using OtherTile = typename Form::OtherTile;
  static constexpr int kOthers = Form::kOthers;

 public:
  __device__ __forceinline__ BackwardProducer(const BackwardArgs& args,
                                              BackwardMemory<Form>& memory)
      : args_(args), memory_(memory) {}

  __device__ __forceinline__ void run() {
    WorkList<Form::kOwn, kOthers, Form::kHidden> list(args_, &memory_.place);
    // Blocks that may wait for others' sums take tickets in turn.
    const bool in_turn = Form::kAll || (Form::kApart && args_.parts > 1);
    uint32_t index = in_turn ? take_ticket() : blockIdx.x;
    for (uint32_t count = 0;; ++count) {
      WorkTile& work = memory_.work[count % BackwardMemory<Form>::kWorks];
      const bool found = list.tile(index, &work);
      __syncwarp();
      const int steps = found ? Form::count_steps(args_, work) : 0;
      const uint32_t own_slot = count % Form::kOwnStages;
      begin_others(work);
      if (steps > 0) load_others(work);
      memory_.own_empty[own_slot].wait(count / Form::kOwnStages % 2 ^ 1);
      if (lane_ == 0) {
        steps > 0 ? load_own(work, own_slot) : arrive(memory_.own_full[own_slot]);
      }
#pragma unroll 1
      for (int step = 1;; ++step) {
        if (!in_turn && step == max(steps - kTicketSteps, 1)) index = next_index(args_, index);
        if (step >= steps) break;
        load_others(work);
      }
      if constexpr (Form::kMends) {
        if (steps > 0 && Form::has_mask(args_) && memory_.verdict.read(verdict_turn_)) {
          begin_others(work);
#pragma unroll 1
          for (int step = 0; step < steps; ++step) load_others(work);
        }
      }
      if (!found) return;
      index = in_turn ? take_ticket() : __shfl_sync(~0u, index, 0);
    }
  }

 private:
  // Blocks wait for lower tickets alone and do theirs in order: so the lowest that is not done
  // never waits. Taken when the copies begin, or others would wait for a long tile.
  __device__ __forceinline__ uint32_t take_ticket() const {
    return __shfl_sync(~0u, lane_ == 0 ? atomicAdd(args_.ticket, 1) : 0, 0);
  }
  __device__ __forceinline__ void load_own(const WorkTile& work, int slot) {
    CopyBarrier& full = memory_.own_full[slot];
    const int row = work.query_begin + work.first;
    full.expect(2 * OwnTile::kBytes);
    load_tile<OwnTile>(shared_address(memory_.own_first[slot]), &args_.own_first, full, row,
                       Form::own_head(args_, work), work.batch);
    load_tile<OwnTile>(shared_address(memory_.own_second[slot]), &args_.own_second, full, row,
                       Form::own_head(args_, work), work.batch);
  }

  __device__ __forceinline__ void begin_others(const WorkTile& work) {
    step_ = 0;
    tile_ = Form::begin_tile(work);
  }
  __device__ __forceinline__ void load_others(const WorkTile& work) {
    if (lane_ == 0) copy_others(work, Form::first_head(args_, work) + step_);
    __syncwarp();
    ++tiles_;
    if (++step_ < Form::heads_of_others(args_)) return;
    step_ = 0;
    tile_ = Form::next_tile(tile_);
  }
  __device__ __forceinline__ void copy_others(const WorkTile& work, int head) {
    const int slot = tiles_ % Form::kFirstStages, second_slot = tiles_ % Form::kSecondStages;
    const int row = work.key_begin + tile_ * kOthers;
    CopyBarrier& full = memory_.first_full[slot];
    memory_.first_empty[slot].wait(tiles_ / Form::kFirstStages % 2 ^ 1);
    full.expect(OtherTile::kBytes + (Form::kOfKeys ? sizeof(memory_.statistics[0]) : 0));
    load_tile<OtherTile>(shared_address(memory_.first[slot]), &args_.other_first, full, row, head,
                         work.batch);
    if constexpr (Form::kOfKeys) {
      const int64_t first =
          first_statistic(args_.gradient.of_statistics, work.sequence, head, work.key_begin);
      load_floats(memory_.statistics[slot], &args_.statistics_map, full,
                  static_cast<int>(first) + tile_ * kOthers, 0);
    }
    CopyBarrier& second_full = memory_.second_full[second_slot];
    memory_.second_empty[second_slot].wait(tiles_ / Form::kSecondStages % 2 ^ 1);
    second_full.expect(OtherTile::kBytes);
    load_tile<OtherTile>(shared_address(memory_.second[second_slot]), &args_.other_second,
                         second_full, row, head, work.batch);
  }

  const BackwardArgs& args_;
  BackwardMemory<Form>& memory_;
  const int lane_ = threadIdx.x % 32;
  int step_, tile_;                        // of others: the head in its group, and the tile
  uint32_t verdict_turn_ = 0, tiles_ = 0;  // tiles of others so far
};

template <typename Form>
__device__ __forceinline__ void copy_masks(const BackwardArgs& args, BackwardMemory<Form>& memory) {
  uint32_t verdict_turn = 0, turn = 0;
  for (uint32_t count = 0;; ++count) {
    const uint32_t slot = count % Form::kOwnStages;
    memory.own_full[slot].wait(count / Form::kOwnStages % 2);
    const WorkTile& work = memory.work[count % BackwardMemory<Form>::kWorks];
    if (work.sequence < 0) return wait_for_all_copies();
    const int heads = Form::heads_of_others(args);
    for (bool again = sees_keys(work), first = true; again; first = false) {
      for (int tile = Form::begin_tile(work); tile >= work.first_tile && tile < work.end_tile;
           tile = Form::next_tile(tile)) {
        if (!mask_changes(args, work, tile)) continue;
        for (int left = heads; left > 0; --left) {
          const int head = Form::kOfKeys ? Form::first_head(args, work) + heads - left : work.head;
          const int others = tile * Form::kOthers;
          __syncwarp();  // copies diverge
          memory.mask_empty.wait(turn++ % 2 ^ 1);
          const auto copy = [&](int query, int queries, int key, int keys) {
            Form::Mask::copy(args.mask, memory.mask, memory.mask_full, work.sequence, head, query,
                             queries, key, keys);
          };
          Form::kOfKeys ? copy(others, work.keys, work.first, work.queries)
                        : copy(work.first, work.queries, others, work.keys);
        }
      }
      again = Form::kMends && first && memory.verdict.read(verdict_turn);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(memory.own_empty[slot]);  // done with `work`
  }
}

}  // namespace fused_norm::hopper
