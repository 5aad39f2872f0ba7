// Backward on Hopper: a block has a tile of one side, its own, and walks the tiles of the other
// side that see it in a fixed order. No block adds to another's result, but for dquery in the
// kernel of all gradients (hopper_fused.cuh, which also has the kernels' entry) and for heads of
// keys that have parts. With own rows X and X', others Y and Y', a warpgroup makes
//   S = X Y^T      P = exp2(S - exponents)
//   D = X' Y'^T    W = P (D - delta)
//   first += W Y   second += P Y'
// which for X = queries, X' = dout gives dquery, and for X = keys, X' = values, with all
// transposed, dkey and dvalue. The sums' left factors, W and P, are registers.
#pragma once

#include "core/attention/hopper_backward_producer.cuh"

namespace fused_norm::hopper {

// A multiplying warpgroup, which has a first sum, a second, or both.
template <typename Form, bool kFirst = true, bool kSecond = Form::kOfKeys>
class BackwardConsumer {
 protected:
  using T = typename Form::T;
  using OwnTile = typename Form::OwnTile;
  using OtherTile = typename Form::OtherTile;
  static constexpr int kOthers = Form::kOthers, kDim = Form::kDim;
  static constexpr bool kGeneral = Form::kGeneral;
  static constexpr int kOfGroup = 4;  // named barriers, from this one on
  static constexpr int kConsumers = 128 * Form::kGroups;
  using Scores = float[kOthers / 2];
  using Weights = uint32_t[kOthers / 4];
  using Sums = float[kDim / 2];

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardArgs& args,
                                              BackwardMemory<Form>& memory, int group)
      : args_(args), memory_(memory), group_(group) {}

  __device__ __forceinline__ void run() {
    run([&](const WorkTile& work) { walk(work); }, [](const WorkTile&) { return true; });
  }

 protected:
  // join(work): whether a tile's sums, once walk(work) has made them, are to be stored.
  template <typename Walk, typename Join>
  __device__ __forceinline__ void run(Walk walk, Join join) {
#pragma unroll 1
    for (;; add_to_count(1)) {
      own_slot_ = count() % Form::kOwnStages;
      memory_.own_full[own_slot_].wait(count() / Form::kOwnStages % 2);
      const WorkTile& work = memory_.work[count() % BackwardMemory<Form>::kWorks];
      if (work.sequence < 0) return;
      open(work);
      if (sees_keys(work)) {
#pragma unroll 1
        do {
          clear_sums();
          walk(work);
        } while (is_spoiled(work));
        // A walk that may come again needs the own tile until here.
        if (may_come_again()) release(memory_.own_empty[own_slot_]);
      } else {
        clear_sums();
        release(memory_.own_empty[own_slot_]);
      }
      if (!join(work)) continue;
      const AttentionBackwardParams& of = args_.gradient.params;
      if constexpr (kFirst)
        store(work, Form::kOfKeys ? of.dkey : of.dquery, first_sums_, args_.gradient_scale,
              args_.head_dim);
      const float scale = Form::kDrops ? args_.dropout_scale : 1;
      if constexpr (kSecond) store(work, of.dvalue, second_sums_, scale, args_.value_dim);
    }
  }

  // The own tiles that the warp has done; the highest bit is the parity of the mask's barrier.
  // With options it lies in shared memory, as registers are few.
  __device__ __forceinline__ uint32_t& count() {
    if constexpr (!kGeneral) return count_;
    int warp = threadIdx.x / 32 - 4;
    asm volatile("" : "+r"(warp));  // or the compiler keeps the address
    return memory_.count[warp];
  }
  __device__ __forceinline__ void add_to_count(uint32_t number) {
    const uint32_t sum = count() + number;
    __syncwarp();
    count() = sum;
    __syncwarp();
  }
  __device__ __forceinline__ int first_row() const { return Form::kApart ? 0 : 64 * group_; }
  __device__ __forceinline__ int row_in_tile() const {
    return first_row() + threadIdx.x % 128 / 32 * 16 + lane_ / 4;
  }

  __device__ __forceinline__ void open(const WorkTile& work) {
    const int row = work.first + row_in_tile();
    if constexpr (!kGeneral) whole_ = whole_of(work);
    if constexpr (!Form::kOfKeys) {
      const QueryParts& parts = args_.gradient.of_statistics;
      const float* delta = static_cast<const float*>(args_.gradient.statistics) +
                           first_statistic(parts, work.sequence, work.head, work.query_begin);
      const float* exponents = delta + query_statistics(parts);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool inside = row + 8 * r < work.queries;
        exponents_[r] = inside ? exponents[row + 8 * r] : INFINITY;
        delta_[r] = inside ? delta[row + 8 * r] : 0;
      }
    }
  }
  // Whether one of the thread's two own rows is the sequence's.
  __device__ __forceinline__ bool is_inside(const WorkTile& work, int r) const {
    return work.first + row_in_tile() + 8 * r < work.queries;
  }
  // Whether a tile's sums may have to be made again, and whether they have to.
  __device__ __forceinline__ bool may_come_again() const {
    return Form::kMends && Form::has_mask(args_);
  }
  __device__ __forceinline__ bool is_spoiled(const WorkTile& work) {
    if constexpr (Form::kMends) {
      again_ = !again_ && may_come_again();
      const bool first = is_inside(work, 0), second = is_inside(work, 1);
      if (again_) memory_.verdict.give(first_sums_, first, second, verdict_turn_);
      again_ = again_ && memory_.verdict.template given<kConsumers>(verdict_turn_);
    }
    return again_;
  }
  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) {
      if constexpr (kFirst) first_sums_[i] = 0;
      if constexpr (kSecond) second_sums_[i] = 0;
    }
  }

  // All tiles of keys: a tile's S and D run while the sum of the tile before does. No product is
  // under way from one turn to the next, as the compiler would lose sight of it.
  __device__ __forceinline__ void walk(const WorkTile& work) {
    int tile = work.first_tile;
    const int end = work.end_tile;
    bool cut = is_cut(work, tile);
    start_scores(work, tile, cut);
    start_products(work, tile, cut);
    weigh(work, tile, cut);
#pragma unroll 1
    while (++tile < end) {
      add_tile(work);
      const int slot = first_slot();
      ++tiles_;
      cut = is_cut(work, tile);
      start_scores(work, tile, cut);
      wait_products<1>();
      end_tile(slot);
      start_products(work, tile, cut);
      weigh(work, tile, cut);
    }
    if (!may_come_again()) release(memory_.own_empty[own_slot_]);
    add_tile(work);
    wait_products<0>();
    end_tile(first_slot());
    ++tiles_;
  }
  // Waits for a tile's products, and turns S into P meanwhile, and D into W.
  __device__ __forceinline__ void weigh(const WorkTile& work, int tile, bool cut) {
    wait_products<1>();
    hold(scores_);
    if constexpr (kGeneral) apply_options(work, tile, 1);
    exponentiate();
    if (cut) hide(work, tile);
    wait_products<0>();
    hold(products_);
    leave_second();
    differentiate(cut || Form::has_mask(args_));
    round<T>(first_weights_, products_);
  }
  __device__ __forceinline__ void add_tile(const WorkTile& work) {
    if constexpr (Form::kMends) {
      if (again_) {
        memory_.verdict.template clear_unseen<OtherTile, kConsumers>(
            memory_.first[first_slot()], [&](int i) {
              return is_inside(work, i / 2 % 2) &&
                     (first_weights_[i / 2] >> i % 2 * 16 & 0x7FFF) != 0;
            });
      }
    }
    add(first_sums_, first_weights_, first_, first_slot());
  }
  // Gives back what a tile's sum, which is made, has read.
  __device__ __forceinline__ void end_tile(int slot) {
    hold(first_sums_);
    release(memory_.first_empty[slot]);
  }
  __device__ __forceinline__ void leave_second() { release(memory_.second_empty[second_slot()]); }

  __device__ __forceinline__ int first_slot() const { return tiles_ % Form::kFirstStages; }
  __device__ __forceinline__ int second_slot() const { return tiles_ % Form::kSecondStages; }
  __device__ __forceinline__ void start_scores(const WorkTile& work, int tile, bool cut) {
    memory_.first_full[first_slot()].wait(tiles_ / Form::kFirstStages % 2);
    if (cut) clear(work, tile, memory_.first[first_slot()]);
    multiply(scores_, own_first_, first_, first_slot());
  }
  __device__ __forceinline__ void start_products(const WorkTile& work, int tile, bool cut) {
    memory_.second_full[second_slot()].wait(tiles_ / Form::kSecondStages % 2);
    if (cut) clear(work, tile, memory_.second[second_slot()]);
    multiply<Form::kOwnBlocks>(products_, own_second(), second_, second_slot(),
                               values_are_narrow());
  }

  // Tiles of which every row of the warpgroup sees all. Rows beyond the sequence see nothing, which
  // matters where the sums of all rows are added up.
  __device__ __forceinline__ Range whole_of(const WorkTile& work) const {
    const Band band = band_of(args_, work);
    const int first = work.first + first_row(), last = min(first + 64, work.queries) - 1;
    if (Form::kAll && last - first != 63) return {INT32_MAX, 0};
    return {(max(last + band.lowest, 0) + kOthers - 1) / kOthers,
            max(min(work.keys, first + band.highest + 1), 0) / kOthers};
  }
  __device__ __forceinline__ bool is_cut(const WorkTile& work, int tile) const {
    const Range whole = kGeneral ? whole_of(work) : whole_;
    return tile < whole.begin || tile >= whole.end;
  }
  // As in DeepSeek's models: queries and keys of 192 columns, values of 128.
  __device__ __forceinline__ bool values_are_narrow() const {
    return kDim > kNarrow && args_.value_dim <= kNarrow;
  }
  template <int kBlocks = 0>
  __device__ __forceinline__ void multiply(Scores& to, uint64_t own, uint32_t tiles, int slot,
                                           bool narrow = false) {
    own += own_slot_ * (OwnTile::kBytes / 16);
    const int at = uniform<(kDim > 192)>(slot) * OtherTile::kBytes;
    const uint64_t others = OtherTile::along_rows(tiles + at, 0);
    start_product<T, OwnTile, OtherTile, kBlocks>(to, own, others, narrow, own_blocks_);
  }
  __device__ __forceinline__ void add(Sums& sums, const Weights& weights, uint32_t tiles, int slot,
                                      bool narrow = false) {
    const uint64_t others = OtherTile::down_columns(tiles + slot * OtherTile::kBytes);
    const auto nothing = [] {};
    start_sum<T, OtherTile>(sums, weights, others, nothing, narrow);
  }
  // own_second's operand; the tiles follow those of own_first. (A member would spill.)
  __device__ __forceinline__ uint64_t own_second() const {
    return own_first_ + Form::kOwnStages * (OwnTile::kBytes / 16);
  }

  // Makes the probabilities of hidden pairs zero, whatever their scores and statistics were.
  __device__ __forceinline__ void hide(const WorkTile& work, int tile) {
    const Band band = band_of(args_, work);
    const int row = work.first + row_in_tile(), column = tile * kOthers + lane_ % 4 * 2;
    hide_after(scores_, band, work.keys, row, column, 0);
    hide_before(scores_, band, row, column, 0);
#pragma unroll
    for (int i = 0; Form::kAll && i < kOthers / 2; ++i) {
      if (row + 8 * (i / 2 % 2) >= work.queries) scores_[i] = 0;
    }
  }
  // S becomes scores, D - delta what P is multiplied by; the last `heads` of the group are left.
  __device__ __forceinline__ void apply_options(const WorkTile& work, int tile, int heads) {
    apply_options(work, tile, heads, [&] {
      wait_products<0>();
      hold(products_);
      subtract_delta();
#pragma unroll
      for (int i = 0; i < kOthers / 2; ++i) products_[i] *= 1 - scores_[i] * scores_[i];
    });
  }
  // capped(): when scores are tanh(s / softcap).
  template <typename Capped>
  __device__ __forceinline__ void apply_options(const WorkTile& work, int tile, int heads,
                                                Capped capped) {
    general_scores(
        args_, work, [&] { return Form::query_head(args_, work, heads); }, scores_, row_in_tile(),
        tile * kOthers + lane_ % 4 * 2, capped);
    if constexpr (Form::kMasks) {
      if (!Form::has_mask(args_)) return;
      if (!mask_changes(args_, work, tile)) {
        if (!args_.adds_mask) return;
#pragma unroll
        for (int i = 0; i < kOthers / 2; ++i) scores_[i] *= args_.factor_for_mask;
        return;
      }
      memory_.mask_full.wait(count() >> 31);
      add_to_count(1u << 31);
      Form::Mask::template add<Form::kOfKeys, !Form::kAll>(
          args_.mask, memory_.mask, row_in_tile(), lane_ % 4 * 2, args_.factor_for_mask, scores_);
      arrive(memory_.mask_empty);
    }
  }
  // Makes the rows of a tile zero that no own row of the sequence sees: they may hold a NaN. The
  // copy has done so with those beyond a dense tensor.
  __device__ __forceinline__ void clear(const WorkTile& work, int tile, char* others) {
    const Band band = band_of(args_, work);
    const int first = max(0, band.lowest) - tile * kOthers;
    const int end = min(work.keys, work.queries + band.highest) - tile * kOthers;
    const bool behind = end < kOthers && (args_.packed() || end + tile * kOthers < work.keys);
    if (first <= 0 && !behind) return;
    clear_rows<OtherTile>(others, [&](int row) { return row < first || row >= end; });
    meet_at(kOfGroup + group_, 128);
  }

  // A statistic of element i's column and its neighbour's.
  enum { kDelta, kExponent };
  __device__ __forceinline__ float2 statistics_of_columns(int which, int i) const {
    return *reinterpret_cast<const float2*>(memory_.statistics[first_slot()][which] + 2 * i +
                                            lane_ % 4 * 2);
  }
  // Reads early what with_statistics() will use: to read shared memory beside products is slow.
  __device__ __forceinline__ void read_ahead(int which) {
#pragma unroll
    for (int i = 0; i < Form::kReadAhead; ++i) columns_[i] = statistics_of_columns(which, 4 * i);
  }
  // use(i, the statistic of element i: of its row, or of its column).
  template <typename Use>
  __device__ __forceinline__ void with_statistics(const float (&rows)[2], int which, Use use) {
#pragma unroll
    for (int i = 0; i < kOthers / 2; i += 4) {
      if constexpr (Form::kOfKeys) {
        const float2 two =
            i / 4 < Form::kReadAhead ? columns_[i / 4] : statistics_of_columns(which, i);
        use(i, two.x), use(i + 1, two.y), use(i + 2, two.x), use(i + 3, two.y);
      } else {
        use(i, rows[0]), use(i + 1, rows[0]), use(i + 2, rows[1]), use(i + 3, rows[1]);
      }
    }
  }
  // `first`, `second`: what is added to the exponents of the thread's rows.
  __device__ __forceinline__ void exponentiate(float first = 0, float second = 0) {
    with_statistics(exponents_, kExponent, [&](int i, float exponent) {
      exponent -= i / 2 % 2 == 0 ? first : second;
      scores_[i] = exp2_fast(fmaf(scores_[i], args_.exponent, -exponent));
    });
  }
  // D becomes W.
  __device__ __forceinline__ void differentiate(bool hides) {
    if (!kGeneral || Form::kApart || !(args_.softcap > 0)) subtract_delta();
    if (hides) {
      // A hidden pair's product may be a NaN, and so may the delta of a query that sees nothing.
#pragma unroll
      for (int i = 0; i < kOthers / 2; ++i) products_[i] = weight(i) == 0 ? 0 : products_[i];
    }
#pragma unroll
    for (int i = 0; i < kOthers / 2; ++i) products_[i] *= weight(i);
  }
  __device__ __forceinline__ void subtract_delta() {
    if constexpr (Form::kDrops) kept_.apply(products_, args_.dropout_scale);
    with_statistics(delta_, kDelta, [&](int i, float delta) { products_[i] -= delta; });
  }
  // Of a tile's probabilities, rounded where the other group made them.
  __device__ __forceinline__ float weight(int i) const {
    if constexpr (!Form::kApart) return scores_[i];
    const uint32_t two = second_weights_[i / 2];
    return value_of<T>(i % 2 ? two >> 16 : two);
  }

  __device__ __forceinline__ void store(const WorkTile& work, const AttentionTensor& tensor,
                                        const Sums& sums, float factor, int columns) {
    const int row = work.first + row_in_tile();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool stores = tensor.data != nullptr && row + 8 * r < work.queries;
      T* out = stores ? row_of<T>(tensor, work, Form::own_head(args_, work), row + 8 * r) : nullptr;
      store_row<T>(sums, r, factor, out, columns);
    }
  }

  // A warp's lanes have read the slot before lane 0 gives it back for all of them.
  __device__ __forceinline__ void release(CopyBarrier& barrier) const {
    __syncwarp();
    if (lane_ == 0) arrive(barrier);
  }

  const BackwardArgs& args_;
  BackwardMemory<Form>& memory_;
  const int group_, lane_ = threadIdx.x % 32;
  const uint64_t own_first_ =
      OwnTile::along_rows(shared_address(memory_.own_first[0]), first_row());
  int own_slot_;
  uint32_t count_ = 0, verdict_turn_ = 0;  // count_: count() without options
  bool again_ = false;                     // the tile's sums were spoiled (MaskVerdict)
  const uint32_t first_ = shared_address(memory_.first[0]);
  const uint32_t second_ = shared_address(memory_.second[0]);
  uint32_t tiles_ = 0;  // of others, done before the one at hand

  Range whole_;  // of a tile of the own side; options leave no registers for it
  float exponents_[2], delta_[2];
  float2 columns_[Form::kReadAhead ? Form::kReadAhead : 1];          // a statistic, read ahead
  uint32_t own_blocks_[Form::kOwnBlocks ? Form::kOwnBlocks : 1][4];  // of the own second tile
  KeptElements<true, kOthers / 2> kept_;                             // of kDrops
  Scores scores_, products_;
  Weights first_weights_, second_weights_;  // W and P, rounded
  Sums first_sums_, second_sums_;
};

}  // namespace fused_norm::hopper
