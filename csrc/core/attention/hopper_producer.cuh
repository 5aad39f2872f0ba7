// The form of a forward kernel on Hopper, its shared memory, and the warp that fills it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/attention/hopper_ptx.cuh"
#include "core/attention/hopper_scores.cuh"
#include "core/attention/hopper_work.cuh"

namespace fused_norm::hopper {

// What the kernel is told. Tensor maps have dimensions (column, row, head, batch).
struct ForwardArgs : WorkArgs, ScoreArgs {
  CUtensorMap query, key, value;
  void* out;
  int64_t out_batch_stride, out_head_stride, out_row_stride;
  int32_t value_dim;
  float* lse;
};

// A form of the kernel. kGeneral: scores pass through scale, softcap, slopes and mask. kTurns: two
// warpgroups start their products in turn.
template <typename T_, int kDim_, int kKeys_, int kGroups_, int kStages_, int kQueryStages_,
          bool kGeneral_, bool kTurns_>
struct ForwardForm {
  using T = T_;
  static constexpr int kDim = kDim_, kKeys = kKeys_, kGroups = kGroups_, kStages = kStages_;
  static constexpr bool kGeneral = kGeneral_, kTurns = kTurns_;
  static constexpr int kQueryStages = kQueryStages_;
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
  static_assert(!kTurns || kGroups == 2);
  static_assert(!kGeneral || kQueryStages == 1);  // a tile with a mask may be done twice
};

template <typename Form>
struct ForwardMemory {
  alignas(1024) char query[Form::kQueryStages][Form::QueryTile::kBytes];
  alignas(1024) char key[Form::kStages][Form::KeyTile::kBytes];
  alignas(1024) char value[Form::kStages][Form::KeyTile::kBytes];
  alignas(16) char mask[Form::kGeneral ? Form::kRows * mask_pitch(Form::kKeys, 4) : 16];
  CopyBarrier mask_full;
  CopyBarrier query_full[Form::kQueryStages], query_empty[Form::kQueryStages];
  CopyBarrier key_full[Form::kStages], key_empty[Form::kStages];
  CopyBarrier value_full[Form::kStages], value_empty[Form::kStages];
  // The block's tiles of queries in turn: the producer fills one while consumers may still finish
  // the one before those whose queries are here.
  static constexpr int kWorks = Form::kQueryStages + 2;
  WorkTile work[kWorks];
  ListPlace place;
  // With a mask: whether the tile has to be done again (see mend), and which keys some query sees.
  CopyBarrier verdict;
  int spoiled[2];  // by turns
  bool seen[Form::kKeys];
};

// One warp: copies the tiles of queries, keys and values in the order in which they are used.
template <typename Form>
__device__ __forceinline__ void produce(const ForwardArgs& args, ForwardMemory<Form>& memory) {
  using KeyTile = typename Form::KeyTile;
  const bool leader = threadIdx.x % 32 == 0;
  WorkList<Form::kRows, Form::kKeys> list(args, &memory.place);
  RingPlace<Form::kStages> key_place, value_place;
  RingPlace<Form::kQueryStages> query_place;
  RingPlace<ForwardMemory<Form>::kWorks> work_place;
  uint32_t verdict_parity = 0;

  const auto load = [&](const CUtensorMap* map, char* to, CopyBarrier& full, CopyBarrier& empty,
                        uint32_t parity, const WorkTile& work, int tile) {
    wait(empty, parity ^ 1);
    full.expect(KeyTile::kBytes);
    load_tile<KeyTile>(shared_address(to), map, full, work.key_begin + tile * Form::kKeys,
                       work.kv_head, work.batch);
  };
  const auto load_key = [&](const WorkTile& work, int tile) {
    load(&args.key, memory.key[key_place.slot], memory.key_full[key_place.slot],
         memory.key_empty[key_place.slot], key_place.parity, work, tile);
    key_place.advance();
  };
  const auto load_value = [&](const WorkTile& work, int tile) {
    load(&args.value, memory.value[value_place.slot], memory.value_full[value_place.slot],
         memory.value_empty[value_place.slot], value_place.parity, work, tile);
    value_place.advance();
  };

  const auto load_rest = [&](const WorkTile& work) {
#pragma unroll 1
    for (int tile = work.end_tile - 2; tile >= work.first_tile; --tile) {
      load_key(work, tile);
      load_value(work, tile + 1);
    }
    load_value(work, work.first_tile);
  };

  uint32_t index = blockIdx.x;
  while (true) {
    WorkTile& work = memory.work[work_place.slot];
    work_place.advance();
    const bool found = list.tile(index, &work);
    uint32_t next = index + gridDim.x;
    if (leader) {
      if (args.ticket != nullptr) next = gridDim.x + atomicAdd(args.ticket, 1);
      const bool any = found && work.first_tile < work.end_tile;
      if (any) load_key(work, work.end_tile - 1);
      CopyBarrier& full = memory.query_full[query_place.slot];
      wait(memory.query_empty[query_place.slot], query_place.parity ^ 1);
      if (any) {
        full.expect(Form::QueryTile::kBytes);
        load_tile<typename Form::QueryTile>(shared_address(memory.query[query_place.slot]),
                                            &args.query, full, work.query_begin + work.first,
                                            work.head, work.batch);
        load_rest(work);
        if constexpr (Form::kGeneral) {
          if (args.mask.data != nullptr) {
            wait(memory.verdict, verdict_parity);
            const bool spoiled = memory.spoiled[verdict_parity];
            verdict_parity ^= 1;
            if (spoiled) {
              load_key(work, work.end_tile - 1);
              load_rest(work);
            }
          }
        }
      } else {
        arrive(full);
      }
    }
    query_place.advance();
    if (!found) return;
    index = __shfl_sync(~0u, next, 0);
  }
}

// The other warps of the producer's warpgroup copy tiles of the mask.
constexpr int kMaskWarps = 3, kMaskThreads = 32 * kMaskWarps;
constexpr int kMaskIsRead = 8;  // a named barrier, of them and the consumers

// Bits: an element. Rows beyond the sequence are its last one, columns beyond it zeros.
template <typename Bits, typename Form>
__device__ __forceinline__ void copy_mask(const ForwardArgs& args, ForwardMemory<Form>& memory,
                                          const WorkTile& work, int tile) {
  constexpr int kBytes = sizeof(Bits), kPitch = mask_pitch(Form::kKeys, kBytes);
  const AttentionMask& mask = args.mask;
  const int64_t corner = work.sequence * mask.batch_stride + work.head * mask.head_stride;
  const int first = tile * Form::kKeys, columns = min(Form::kKeys, work.keys - first);
  const Bits* from = static_cast<const Bits*>(mask.data) + corner + first * mask.key_stride;
  const bool in_parts = mask.key_stride == 1 && (mask.row_stride | corner) * kBytes % 16 == 0 &&
                        reinterpret_cast<uintptr_t>(mask.data) % 16 == 0;
  // Parts of 16 bytes, or elements.
  const auto for_all = [&](auto parts, auto copy) {
    constexpr int kParts = decltype(parts)::value;
#pragma unroll 1  // registers are few
    const int rows = mask.row_stride == 0 ? 1 : Form::kRows;
    for (int at = threadIdx.x - 32; at < rows * kParts; at += kMaskThreads) {
      const int row = at / kParts, source = min(work.first + row, work.queries - 1);
      copy(row, at % kParts, from + source * mask.row_stride);
    }
  };
  if (in_parts) {
    for_all(std::integral_constant<int, Form::kKeys * kBytes / 16>(),
            [&](int row, int part, const Bits* source) {
              const int left = min(max(columns * kBytes - part * 16, 0), 16);
              copy_async(shared_address(memory.mask + row * kPitch + part * 16),
                         left == 0 ? source : source + part * (16 / kBytes), left);
            });
    arrive_after_copies(memory.mask_full);
  } else {
    for_all(std::integral_constant<int, Form::kKeys>(), [&](int row, int key, const Bits* source) {
      *reinterpret_cast<Bits*>(memory.mask + row * kPitch + key * kBytes) =
          key < columns ? source[key * mask.key_stride] : Bits{0};
    });
    arrive(memory.mask_full);
  }
}

template <typename Form>
__device__ __forceinline__ void copy_masks(const ForwardArgs& args, ForwardMemory<Form>& memory) {
  RingPlace<Form::kQueryStages> query_place;
  RingPlace<ForwardMemory<Form>::kWorks> work_place;
  uint32_t verdict_parity = 0;
  bool has_copied = false;
  const auto wait_for_readers = [&] {
    if (has_copied) named_sync(kMaskIsRead, 128 * Form::kGroups + kMaskThreads);
    has_copied = true;
  };
  while (true) {
    wait(memory.query_full[query_place.slot], query_place.parity);
    const WorkTile& work = memory.work[work_place.slot];
    work_place.advance();
    if (work.sequence < 0) return wait_for_readers();
    const bool any = work.first_tile < work.end_tile;
    for (bool again = any, first = true; again; first = false) {
      for (int tile = work.end_tile - 1; tile >= work.first_tile; --tile) {
        wait_for_readers();
        if (args.mask.boolean) {
          copy_mask<uint8_t>(args, memory, work, tile);
        } else if (args.mask.dtype == DType::kFloat32) {
          copy_mask<uint32_t>(args, memory, work, tile);
        } else {
          copy_mask<uint16_t>(args, memory, work, tile);
        }
      }
      again = false;
      if (!first) break;
      wait(memory.verdict, verdict_parity);
      again = memory.spoiled[verdict_parity];
      verdict_parity ^= 1;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(memory.query_empty[query_place.slot]);  // done with `work`
    query_place.advance();
  }
}

}  // namespace fused_norm::hopper
