// Before the kernel of all gradients (hopper_fused.cuh) multiplies a tile of keys: it reads a mask
// of keys, and makes keys and values zero that no query sees, as they may hold a NaN.
#pragma once

#include "core/attention/hopper_backward.cuh"

namespace fused_norm::hopper {

template <typename Form>
class KeysConsumer : public BackwardConsumer<Form> {
  using Base = BackwardConsumer<Form>;
  using T = typename Form::T;
  using OwnTile = typename Form::OwnTile;

 protected:
  using Base::args_, Base::memory_, Base::group_, Base::lane_, Base::own_slot_;
  using Base::Base;

  // Makes the group's keys and values zero that no query sees: a NaN there would spoil dquery or W.
  __device__ __forceinline__ void clear_own(const WorkTile& work) {
    const Band band = band_of(args_, work);
    const int first = -band.right - work.first;
    const int end = min(work.queries, work.keys + band.left) - work.first;
    masks_ = args_.masks_keys && read_mask(work);
    const bool has_tiles = has_mask<Form>(args_);
    if (has_tiles) find_unseen(work);
    if (first <= 0 && end >= Form::kOwn && !masks_ && !has_tiles) return;
    named_sync(Base::kOfGroup + group_, 128);
    const auto hidden = [&](int row) {
      return row / 64 == group_ && (row < first || row >= end ||
                                    ((masks_ || has_tiles) && memory_.key_mask[row] == -INFINITY));
    };
    clear_rows<OwnTile>(memory_.own_first[own_slot_], hidden);
    clear_rows<OwnTile>(memory_.own_second[own_slot_], hidden);
    named_sync(Base::kOfGroup + group_, 128);
  }
  // Reads what a mask adds to the exponents of the warpgroup's keys; whether it is not 0 for all.
  __device__ __forceinline__ bool read_mask(const WorkTile& work) {
    bool masks = false;
    for (int row = 64 * group_ + lane_; row < 64 * (group_ + 1); row += 32) {
      const int key = work.first + row, head = own_head<Form>(args_, work);
      const float value =
          key < work.queries ? key_mask_value(args_.mask, work.sequence, head, key) : 0;
      if (row % 64 / 16 == threadIdx.x % 128 / 32) memory_.key_mask[row] = value * kLog2E;
      masks |= value != 0;
    }
    return __any_sync(~0u, masks);
  }
  // With a mask of pairs: notes in key_mask which of the warp's keys no query of these heads sees.
  // Only those are looked for that hold a NaN, an Inf, or numbers whose product may be one: they
  // are rare. (Kernels that walk over keys look at their sums instead: MaskVerdict.)
  __device__ __forceinline__ void find_unseen(const WorkTile& work) {
    constexpr int kParts = OwnTile::kRowBytes / 16;  // of a row of a panel
    const int first = 64 * group_ + threadIdx.x % 128 / 32 * 16;
    uint32_t spoiled = 0;  // a bit a row
#pragma unroll 1
    for (int i = lane_; i < 16 * kParts * OwnTile::kPanels; i += 32) {
      const int row = i / kParts % 16;
      const int at =
          i / (16 * kParts) * (OwnTile::kPanelBytes / 16) + first * kParts + i % (16 * kParts);
      for (const char* tile : {memory_.own_first[own_slot_], memory_.own_second[own_slot_]}) {
        const uint4 pack = reinterpret_cast<const uint4*>(tile)[at];
        for (uint32_t two : {pack.x, pack.y, pack.z, pack.w}) {
          const float sizes = fabsf(value_of<T>(two)) + fabsf(value_of<T>(two >> 16));
          if (!(sizes < 0x1p63f)) spoiled |= 1u << row;
        }
      }
    }
    spoiled = __reduce_or_sync(~0u, spoiled);
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const bool unseen = (spoiled >> row & 1) != 0 && !is_seen(work, work.first + first + row);
      if (lane_ == 0) memory_.key_mask[first + row] = unseen ? -INFINITY : 0;
    }
  }
  // Whether a query of these heads sees the key, by the mask and the band. By a warp.
  __device__ __forceinline__ bool is_seen(const WorkTile& work, int key) {
    if (key >= work.queries) return true;
    const Band band = band_of(args_, work);
    const int first = max(0, key - band.left), end = min(work.keys, key + band.right + 1);
    bool seen = false;
    with_mask_reader(args_.mask, [&](auto read) {
#pragma unroll 1
      for (int head = 0; head < args_.group && !seen; ++head) {
        const int64_t corner = work.sequence * args_.mask.batch_stride +
                               (first_head<Form>(args_, work) + head) * args_.mask.head_stride +
                               key * args_.mask.key_stride;
#pragma unroll 1
        for (int query = first + lane_; query < end && !seen; query += 32) {
          seen = read(corner + query * args_.mask.row_stride) != -INFINITY;
        }
      }
    });
    return __any_sync(~0u, seen);
  }

  bool masks_ = false;  // a mask of keys changes the exponents of the group's keys
};

}  // namespace fused_norm::hopper
