// dkey and dvalue of heads of more than 128 columns. The sums of both do not fit in a warpgroup's
// registers, so each of two warpgroups has the sums of one, for the same keys. The group of dvalue
// makes S and P, and hands P over in shared memory. The group of dkey makes D, and W of D and P.
#pragma once

#include "core/attention/hopper_own_keys.cuh"

namespace fused_norm::hopper {

// The warpgroup of dkey, or that of dvalue.
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

  // Starts S, or D.
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

  // Starts a tile's sum; gives back what it has read.
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
