// What the kernels of keys' gradients do with a tile of keys before and after they multiply. That
// of all gradients (hopper_fused.cuh) first reads a mask of keys, and makes keys and values zero
// that no query sees, as they may hold a NaN. Both kinds add up the sums of a tile's parts.
#pragma once

#include "core/attention/hopper_backward.cuh"

namespace fused_norm::hopper {

template <typename Form, bool kFirst = true, bool kSecond = true>
class KeysConsumer : public BackwardConsumer<Form, kFirst, kSecond> {
  using Base = BackwardConsumer<Form, kFirst, kSecond>;
  using T = typename Form::T;
  using OwnTile = typename Form::OwnTile;

 protected:
  using Base::args_, Base::memory_, Base::group_, Base::lane_, Base::own_slot_;
  using Base::Base;
  using Base::first_sums_, Base::second_sums_;

  // Makes the group's keys and values zero that no query sees: a NaN there would spoil dquery or W.
  __device__ __forceinline__ void clear_own(const WorkTile& work) {
    const Band band = band_of(args_, work);
    const int first = -band.highest - work.first;
    const int end = min(work.queries, work.keys - band.lowest) - work.first;
    masks_ = args_.masks_keys && read_mask(work);
    const bool has_tiles = Form::has_mask(args_);
    if (has_tiles) find_unseen(work);
    if (first <= 0 && end >= Form::kOwn && !masks_ && !has_tiles) return;
    meet_at(Base::kOfGroup + group_, 128);
    const auto hidden = [&](int row) {
      return row / 64 == group_ && (row < first || row >= end ||
                                    ((masks_ || has_tiles) && memory_.key_mask[row] == -INFINITY));
    };
    clear_rows<OwnTile>(memory_.own_first[own_slot_], hidden);
    clear_rows<OwnTile>(memory_.own_second[own_slot_], hidden);
    meet_at(Base::kOfGroup + group_, 128);
  }
  // Reads what a mask adds to the exponents of the warpgroup's keys; whether it is not 0 for all.
  __device__ __forceinline__ bool read_mask(const WorkTile& work) {
    bool masks = false;
    for (int row = 64 * group_ + lane_; row < 64 * (group_ + 1); row += 32) {
      const int key = work.first + row, head = Form::own_head(args_, work);
      const float value =
          key < work.queries ? key_mask_value(args_.mask, work.sequence, head, key) : 0;
      if (row % 64 / 16 == threadIdx.x % 128 / 32) memory_.key_mask[row] = value * kLog2E;
      masks |= value != 0;
    }
    __syncwarp();  // other lanes read key_mask
    return __any_sync(~0u, masks);
  }
  // With a mask of pairs: notes in key_mask which of the warp's keys no query of these heads sees.
  // Only those are looked for that hold a NaN, an Inf, or numbers whose product may be one: they
  // are rare. (Kernels that walk over keys look at their sums instead: MaskVerdict.)
  __device__ __forceinline__ void find_unseen(const WorkTile& work) {
    constexpr int kParts = OwnTile::kRowBytes / 16;                   // of a row of a panel
    const int first = 16 * (static_cast<int>(threadIdx.x) / 32 - 4);  // 64 keys of a group
    uint32_t spoiled = 0;                                             // a bit a row
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
    const int first = max(0, key + band.lowest), end = min(work.keys, key + band.highest + 1);
    bool seen = false;
    with_mask_reader(args_.mask, [&](auto read) {
#pragma unroll 1
      for (int head = 0; head < args_.group && !seen; ++head) {
        const int64_t corner = work.sequence * args_.mask.batch_stride +
                               (Form::first_head(args_, work) + head) * args_.mask.head_stride +
                               key * args_.mask.key_stride;
#pragma unroll 1
        for (int query = first + lane_; query < end && !seen; query += 32) {
          seen = read(corner + query * args_.mask.row_stride) != -INFINITY;
        }
      }
    });
    return __any_sync(~0u, seen);
  }

  // walk(work) makes the sums of a tile's part.
  template <typename Walk>
  __device__ __forceinline__ void run_parts(Walk walk) {
    // What no query sees has zeros in every part. Rows outside every sequence are among that, and
    // have no chunk of their own.
    Base::run(walk, [&](const WorkTile& work) {
      return args_.parts == 1 || !sees_keys(work) || join_parts(work);
    });
  }
  // Adds the sums of the parts before, which come in their order. The last has them all; another
  // leaves them to the next.
  __device__ __forceinline__ bool join_parts(const WorkTile& work) {
    constexpr int kSums = kFirst + kSecond;
    const ChunkSums& sums = args_.own_sums;
    const uint32_t part = Form::part_of(args_, work);
    const int64_t chunk =
        first_chunk<Form::kOwn>(sums.tiles, work.sequence, Form::own_head(args_, work),
                                work.query_begin, group_) +
        2 * (work.first / Form::kOwn);
    float4* fours = reinterpret_cast<float4*>(sums.chunks) +
                    chunk * kSums * (Form::kDim / 8) * 128 + threadIdx.x % 128;
    const auto each = [&](auto use) {
#pragma unroll
      for (int i = 0; i < Form::kDim / 8; ++i) {
        if constexpr (kFirst) use(fours + 128 * kSums * i, first_sums_ + 4 * i);
        if constexpr (kSecond) use(fours + 128 * (kSums * i + kFirst), second_sums_ + 4 * i);
      }
    };
    const bool leader = threadIdx.x % 128 == 0;
    if (part > 0) {
      if (leader) wait_for_count(sums.counters + chunk, part);
      meet_at(Base::kOfGroup + group_, 128);
      each([](const float4* at, float* sum) {
        const float4 before = *at;
        sum[0] += before.x, sum[1] += before.y, sum[2] += before.z, sum[3] += before.w;
      });
    }
    if (part + 1 == args_.parts) return true;
    each([](float4* at, const float* sum) { *at = make_float4(sum[0], sum[1], sum[2], sum[3]); });
    meet_at(Base::kOfGroup + group_, 128);
    if (leader) count_up(sums.counters + chunk);
    return false;
  }

  bool masks_ = false;  // a mask of keys changes the exponents of the group's keys
};

// dkey and dvalue of heads of more than 128 columns. The sums of both do not fit in a warpgroup's
// registers, so each of two warpgroups has the sums of one, for the same keys. The group of dvalue
// makes S and P, and hands P over in shared memory. The group of dkey makes D, and W of D and P.
template <typename Form, bool kOfKey>
class ApartConsumer : public KeysConsumer<Form, kOfKey, !kOfKey> {
  using Base = KeysConsumer<Form, kOfKey, !kOfKey>;
  using T = typename Form::T;
  static constexpr bool kGeneral = Form::kGeneral;
  static constexpr int kOthers = Form::kOthers, kWeightStages = Form::kWeightStages;
  using Base::args_, Base::memory_, Base::own_slot_, Base::tiles_, Base::first_, Base::second_;
  using Base::first_sums_, Base::second_sums_;
  using Base::scores_, Base::products_, Base::first_weights_, Base::second_weights_;
  using typename Base::Weights;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    this->run_parts([&](const WorkTile& work) { walk(work); });
  }

 private:
  // All tiles of others, of all heads of the group. A tile's product runs behind the sum of the
  // tile before.
  __device__ __forceinline__ void walk(const WorkTile& work) {
    auto steps = Form::begin_steps(args_, work);
    int& tile = steps.tile;
    bool cut = this->is_cut(work, tile);
    start(work, tile, cut);
    weigh(work, tile, steps.heads, cut);
#pragma unroll 1
    while (Form::advance(args_, work, steps)) {
      add_tile();
      const uint32_t last = tiles_++;
      cut = this->is_cut(work, tile);
      start(work, tile, cut);
      wait_products<1>();
      end_tile(last);
      weigh(work, tile, steps.heads, cut);
    }
    this->release(memory_.own_empty[own_slot_]);
    add_tile();
    wait_products<0>();
    end_tile(tiles_++);
  }

  __device__ __forceinline__ void start(const WorkTile& work, int tile, bool cut) {
    if constexpr (kOfKey) {
      this->start_products(work, tile, cut);
    } else {
      this->start_scores(work, tile, cut);
    }
  }
  // Makes the weights of a tile's sum, and gives back what its product has read.
  __device__ __forceinline__ void weigh(const WorkTile& work, int tile, int heads, bool cut) {
    wait_products<0>();
    if constexpr (kOfKey) {
      hold(products_);
      this->leave_second();
      const int slot = this->first_slot();
      memory_.first_full[slot].wait(tiles_ / Form::kFirstStages % 2);
      if (cut) this->clear(work, tile, memory_.first[slot]);
      receive();
      this->differentiate(cut || Form::has_mask(args_));
      round<T>(first_weights_, products_);
    } else {
      hold(scores_);
      Weights slopes;  // of tanh, rounded
      if constexpr (kGeneral) {
        this->apply_options(work, tile, heads, [&] {
#pragma unroll
          for (int i = 0; i < kOthers / 4; ++i) slopes[i] = rounded(slope(2 * i), slope(2 * i + 1));
        });
      }
      this->exponentiate();
      this->release(memory_.first_empty[this->first_slot()]);
      if (cut) this->hide(work, tile);
      round<T>(second_weights_, scores_);
      if (kGeneral && args_.softcap > 0) {
#pragma unroll
        for (int i = 0; i < kOthers / 4; ++i) {
          slopes[i] = rounded(sloped(2 * i, slopes[i]), sloped(2 * i + 1, slopes[i] >> 16));
        }
        send(slopes);
      } else {
        send(second_weights_);
      }
      const int slot = this->second_slot();
      memory_.second_full[slot].wait(tiles_ / Form::kSecondStages % 2);
      if (cut) this->clear(work, tile, memory_.second[slot]);
    }
  }
  __device__ __forceinline__ float slope(int i) const { return 1 - scores_[i] * scores_[i]; }
  // P times the slope; of a hidden pair, whose slope may be a NaN, zero.
  __device__ __forceinline__ float sloped(int i, uint32_t slope) const {
    return scores_[i] == 0 ? 0 : scores_[i] * value_of<T>(slope);
  }
  static __device__ __forceinline__ uint32_t rounded(float first, float second) {
    return round_pair(first, second, T());
  }

  __device__ __forceinline__ void add_tile() {
    if constexpr (kOfKey) {
      this->add(first_sums_, first_weights_, first_, this->first_slot());
    } else {
      this->add(second_sums_, second_weights_, second_, this->second_slot(),
                this->values_are_narrow());
    }
  }
  __device__ __forceinline__ void end_tile(uint32_t tiles) {
    if constexpr (kOfKey) {
      hold(first_sums_);
      this->release(memory_.first_empty[tiles % Form::kFirstStages]);
    } else {
      hold(second_sums_);
      this->release(memory_.second_empty[tiles % Form::kSecondStages]);
    }
  }

  // Hands a tile's P over to the same thread of the other group. Each thread arrives for itself:
  // racecheck does not see that a warp's barrier orders the others before its first. Where scores
  // are capped it is P times the slopes of tanh.
  __device__ __forceinline__ void send(const Weights& weights) {
    const uint32_t slot = tiles_ % kWeightStages;
    memory_.weights_empty[slot].wait(tiles_ / kWeightStages % 2 ^ 1);
#pragma unroll
    for (int i = 0; i < kOthers / 16; ++i) {
      const uint32_t* four = weights + 4 * i;
      memory_.weights[slot][i][threadIdx.x % 128] = make_uint4(four[0], four[1], four[2], four[3]);
    }
    arrive(memory_.weights_full[slot]);
  }
  __device__ __forceinline__ void receive() {
    const uint32_t slot = tiles_ % kWeightStages;
    memory_.weights_full[slot].wait(tiles_ / kWeightStages % 2);
#pragma unroll
    for (int i = 0; i < kOthers / 16; ++i) {
      const uint4 four = memory_.weights[slot][i][threadIdx.x % 128];
      second_weights_[4 * i] = four.x, second_weights_[4 * i + 1] = four.y;
      second_weights_[4 * i + 2] = four.z, second_weights_[4 * i + 3] = four.w;
    }
    arrive(memory_.weights_empty[slot]);
  }
};

}  // namespace fused_norm::hopper
