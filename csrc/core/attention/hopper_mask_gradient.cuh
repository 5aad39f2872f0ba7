// The gradient of an additive mask on Hopper: a block has a tile of the mask, queries by keys, and
// adds up W (hopper_backward.cuh) of all heads and sequences that the tile serves, in their order.
// Tiles of both sides change with each. The mask's tile stays in shared memory.
#pragma once

#include "core/attention/hopper_backward.cuh"

namespace fused_norm::hopper {

// Calls use(work, tile, seen, part) for the block's tiles of the mask: `work` has the queries, and
// the sequence and head that are the mask's; `tile` are the keys. Not seen: the band hides it all.
// `part`: of the pairs that the tile serves.
template <typename Form, typename Use>
__device__ __forceinline__ void for_mask_tiles(const BackwardArgs& args, Use use) {
  const uint32_t key_tiles = (args.keys + Form::kOthers - 1) / Form::kOthers;
  const MaskShare& share = args.gradient.share;
  const uint32_t tiles = share.batch * share.heads * args.query_tiles * key_tiles;
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < tiles * share.parts; index += gridDim.x) {
    const uint32_t at = index / share.parts, row = at / key_tiles, pair = row / args.query_tiles;
    const int tile = at % key_tiles;
    WorkTile work;
    work.first = row % args.query_tiles * Form::kOwn;
    work.sequence = pair / share.heads;
    work.head = pair % share.heads;
    work.query_begin = work.key_begin = 0;
    work.queries = args.queries;
    work.keys = args.keys;
    const Range tiles_seen =
        key_tiles_of<Form::kOthers>(work, band_of(args, work), work.first, Form::kOwn);
    use(work, tile, tile >= tiles_seen.begin && tile < tiles_seen.end, index % share.parts);
  }
}

// Calls use(sequence, head, is_last) for a part of what a tile of the mask serves.
template <typename Use>
__device__ __forceinline__ void for_served(const BackwardArgs& args, const WorkTile& work, int part,
                                           Use use) {
  const MaskShare& share = args.gradient.share;
  const int end = min((part + 1) * share.pairs, share.served);
#pragma unroll 1
  for (int pair = part * share.pairs; pair < end; ++pair) {
    int sequence = work.sequence, head = work.head;
    share.set_pair(pair, args.heads, &sequence, &head);
    use(sequence, head, pair + 1 == end);
  }
}

// One thread: copies the tiles of both sides of all that is served, and the queries' statistics.
template <typename Form>
__device__ __forceinline__ void copy_sides(const BackwardArgs& args, BackwardMemory<Form>& memory) {
  using OwnTile = typename Form::OwnTile;
  using OtherTile = typename Form::OtherTile;
  RingPlace<Form::kFirstStages> place;
  for_mask_tiles<Form>(args, [&](const WorkTile& work, int tile, bool seen, int part) {
    if (!seen) return;
    for_served(args, work, part, [&](int sequence, int head, bool) {
      const int slot = place.slot(), key = tile * Form::kOthers, kv_head = head / args.heads_per_kv;
      CopyBarrier& full = memory.first_full[slot];
      memory.first_empty[slot].wait(place.parity() ^ 1);
      full.expect(2 * OwnTile::kBytes + 2 * OtherTile::kBytes + sizeof(memory.statistics[0]));
      const auto load = [&](auto tile_of, char* to, const CUtensorMap& map, int row, int of_head) {
        load_tile<decltype(tile_of)>(shared_address(to), &map, full, row, of_head, sequence);
      };
      load(OwnTile(), memory.own_first[slot], args.own_first, work.first, head);
      load(OtherTile(), memory.first[slot], args.other_first, key, kv_head);
      load(OwnTile(), memory.own_second[slot], args.own_second, work.first, head);
      load(OtherTile(), memory.second[slot], args.other_second, key, kv_head);
      const int64_t statistic = first_statistic(args.gradient.of_statistics, sequence, head, 0);
      load_floats(memory.statistics[slot], &args.statistics_map, full,
                  static_cast<int>(statistic) + work.first, 0);
      place.advance();
    });
  });
}

template <typename Form>
__device__ __forceinline__ void copy_served_masks(const BackwardArgs& args,
                                                  BackwardMemory<Form>& memory) {
  uint32_t turn = 0;
  for_mask_tiles<Form>(args, [&](const WorkTile& work, int tile, bool seen, int) {
    if (!seen) return;
    __syncwarp();  // copies diverge
    memory.mask_empty.wait(turn++ % 2 ^ 1);
    Form::Mask::copy(args.mask, memory.mask, memory.mask_full, work.sequence, work.head, work.first,
                     work.queries, tile * Form::kOthers, work.keys);
  });
  wait_for_all_copies();
}

template <typename Form>
class MaskGradientConsumer : public BackwardConsumer<Form> {
  using Base = BackwardConsumer<Form>;
  using T = typename Form::T;
  using Base::args_, Base::memory_, Base::group_, Base::lane_, Base::own_slot_;
  using Base::scores_, Base::products_, Base::exponents_, Base::delta_;
  using Base::tiles_, Base::first_, Base::second_, Base::own_first_;
  static constexpr int kOthers = Form::kOthers;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    uint32_t mask_parity = 0;
    for_mask_tiles<Form>(args_, [&](WorkTile& work, int tile, bool seen, int part) {
      const int of_mask = work.sequence * args_.gradient.share.heads + work.head;
      float sums[kOthers / 2] = {};
      if (seen) {
        memory_.mask_full.wait(mask_parity);
        mask_parity ^= 1;
        for_served(args_, work, part, [&](int sequence, int head, bool is_last) {
          work.sequence = sequence;
          add_weights(work, tile, head, is_last, sums);
        });
      }
      store_sums(work, tile, of_mask, part, sums);
    });
  }

 private:
  __device__ __forceinline__ void add_weights(const WorkTile& work, int tile, int head,
                                              bool is_last, float (&sums)[kOthers / 2]) {
    // One product at a time, as registers are few: the other warpgroup multiplies meanwhile.
    own_slot_ = this->first_slot();
    memory_.first_full[own_slot_].wait(tiles_ / Form::kFirstStages % 2);
    this->multiply(scores_, own_first_, first_, own_slot_);
    const int row = this->row_in_tile(), column = lane_ % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      delta_[r] = memory_.statistics[own_slot_][0][row + 8 * r];
      exponents_[r] = memory_.statistics[own_slot_][1][row + 8 * r];
    }
    wait_products<0>();
    hold(scores_);
    general_scores(
        args_, work, [&] { return head; }, scores_, row, tile * kOthers + column, [] {});
    Form::Mask::template add<false, true>(args_.mask, memory_.mask, row, column,
                                          args_.factor_for_mask, scores_);
    if (is_last) arrive(memory_.mask_empty);
    this->exponentiate();
    if (this->is_cut(work, tile)) this->hide(work, tile);
    this->multiply(products_, this->own_second(), second_, own_slot_);
    wait_products<0>();
    hold(products_);
    this->release(memory_.first_empty[own_slot_]);
    ++tiles_;
    this->subtract_delta();
    // The product of a hidden pair may be a NaN.
#pragma unroll
    for (int i = 0; i < kOthers / 2; ++i) {
      if (scores_[i] != 0) sums[i] = fmaf(scores_[i], products_[i], sums[i]);
    }
  }

  __device__ __forceinline__ void store_sums(const WorkTile& work, int tile, int of_mask, int part,
                                             const float (&sums)[kOthers / 2]) {
    const MaskShare& share = args_.gradient.share;
    const int masks = share.batch * share.heads, columns = work.keys - tile * kOthers;
    const bool in_parts = share.parts > 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work.first + this->row_in_tile() + 8 * r;
      const bool stores = row < work.queries;
      const int64_t at =
          (int64_t{part * masks + of_mask} * work.queries + row) * work.keys + tile * kOthers;
      T* const out = static_cast<T*>(args_.gradient.params.dmask) + at;
      if (!in_parts && work.keys % 8 == 0) {
        store_row<T>(sums, r, 1, stores ? out : nullptr, columns);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kOthers / 2; ++i) {
        const int column = 8 * (i / 4) + lane_ % 4 * 2 + i % 2;
        if (i / 2 % 2 != r || !stores || column >= columns) continue;
        if (in_parts) {
          args_.gradient.mask_sums[at + column] = sums[i];
        } else {
          out[column] = T(sums[i]);
        }
      }
    }
  }
};

}  // namespace fused_norm::hopper
