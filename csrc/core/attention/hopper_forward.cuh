// Forward on Hopper: a block has a warpgroup that copies tiles of keys and values into shared
// memory, and two or three that multiply, 64 queries each. A multiplying warpgroup starts the
// scores of a tile, then the product of the tile before with its values, and takes the exponentials
// of the first while the second runs. Blocks stay, and take tiles of queries until none is left.
#pragma once

#include "core/attention/hopper_producer.cuh"

namespace fused_norm::hopper {

// A multiplying warpgroup.
template <typename Form>
class Consumer {
  using T = typename Form::T;
  using QueryTile = typename Form::QueryTile;
  using KeyTile = typename Form::KeyTile;
  static constexpr int kKeys = Form::kKeys, kDim = Form::kDim;
  static constexpr bool kWide = kDim > 128;
  // The first scores of a tile are started before the tile before it is finished.
  static constexpr bool kEarly = Form::kQueryStages == 2;
  // A warpgroup does nothing for tiles of keys that none of its own queries sees. (With a mask all
  // take part in each.)
  static constexpr bool kPasses = !Form::kMasked;
  // Warpgroups start their products by turns: one multiplies while others exponentiate. A turn ends
  // before its last products, so that the tensor cores go on at once with the next.
  // Named barriers: 4 to 6 for a warpgroup's own, 7 to 9 for its turns; and those of masks.
  static constexpr int kOfGroup = 4, kTurn = 7, kConsumers = 128 * Form::kGroups;
  // Scores far below this weigh 0: such are those that a mask's number hides, times exponent.
  static constexpr float kLowest = Form::kMasked ? kHidingMask : -FLT_MAX;
  static constexpr Moves kMoves = Form::kGeneral ? Moves::kByFloats : Moves::kByIntegers;
  using Weights = uint32_t[kKeys / 4];  // probabilities, rounded
  using Kept = KeptElements<false, kKeys / 2>;

 public:
  __device__ __forceinline__ Consumer(const ForwardArgs& args, ForwardMemory<Form>& memory,
                                      int group)
      : args_(args), memory_(memory), group_(group) {}

  __device__ __forceinline__ void run() {
    if (group_ == Form::kGroups - 1) end_turn();
    bool has_scores = false;
    while (true) {
      const ForwardTile& work = memory_.work[work_place_.slot()];
      work_place_.advance();
      if (!has_scores) {
        memory_.query_full[query_place_.slot()].wait(query_place_.parity());
        if (work.sequence < 0) return;
        open(work);
      }
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) values_[i] = 0;
      rows_ = RowState(kLowest);
      if (Form::kMasked && work.again) {
        mend(work);
      } else if (tiles_.begin < tiles_.end) {
        // Each kind of mask has a loop of its own: one for all kinds waits for its instructions.
        const MaskKind kind = Form::kMasked ? args_.mask_kind : MaskKind::kAny;
        has_scores = kind == MaskKind::kNarrow    ? run_tiles<MaskKind::kNarrow>(work, has_scores)
                     : kind == MaskKind::kBoolean ? run_tiles<MaskKind::kBoolean>(work, has_scores)
                                                  : run_tiles<MaskKind::kAny>(work, has_scores);
        if (has_scores) continue;
        if (Form::kMasked) give_verdict();
      } else {
        __syncwarp();  // all lanes have read `work`
        release(memory_.query_empty[query_place_.slot()]);
        query_place_.advance();
        const int count = work.end_tile - work.first_tile;
        pass(count, count - 1);
        end_rows(work);
      }
      __builtin_expect(work.parts > 1, false) ? store_part(work) : store_rows();
    }
  }

 private:
  __device__ __forceinline__ void open(const WorkTile& work) {
    const Band band = band_of(args_, work);
    const int group_first = min(work.first + 64 * group_, work.queries - 1);
    const int group_last = min(group_first + 64, work.queries) - 1;
    tiles_ = tiles_of(work, band);
    hides_from_ = max(min(work.keys, group_first + band.highest + 1), 0) / kKeys;
    hides_below_ = (max(group_last + band.lowest, 0) + kKeys - 1) / kKeys;
  }

  __device__ __forceinline__ Range tiles_of(const WorkTile& work, const Band& band) const {
    if constexpr (!kPasses) return {work.first_tile, work.end_tile};
    const Range own = key_tiles_of<kKeys>(work, band, work.first + 64 * group_, 64);
    // Of those that are there: a mask leaves some out, and other parts have the rest.
    const int first = max(own.begin, work.first_tile), end = min(own.end, work.end_tile);
    return first < end ? Range{first, end} : Range{};
  }

  // All tiles of keys; `has_scores`: of the first there are scores. True: the tile of queries is
  // finished, and the scores of the next are made.
  template <MaskKind kMask>
  __device__ __forceinline__ bool run_tiles(const PartTile& work, bool has_scores) {
    Weights weights;
    if (!has_scores) {
      pass(work.end_tile - tiles_.end, work.end_tile - tiles_.end);
      // They need no value, but registers of none until here.
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) scores_[i] = 0;
      start_scores();
      end_scores();
    }
    hide<false, kMask>(work, tiles_.end - 1);
    softmax_step<Moves::kFirst>(scores_, rows_, args_.exponent, rescale_);
    round<T>(weights, scores_);
    if constexpr (Form::kDrops) draw(work, tiles_.end - 1).drop(weights);

    for (int tile = tiles_.end - 2; tile >= tiles_.begin; --tile) step<kMask>(work, tile, weights);

    query_place_.advance();
    memory_.value_full[value_place_.slot()].wait(value_place_.parity());
    clear(work, tiles_.begin);
    multiply_values(weights, [] {});
    if (kEarly && tiles_.begin == work.first_tile && next_starts() && work.parts == 1) {
      start_scores();
      end_rows(work);
      open(memory_.work[work_place_.slot()]);
      wait_products<1>();
      leave_value();
      if (Form::kMasked) give_verdict();
      store_rows();
      end_scores();
      return true;
    }
    end_rows(work);
    wait_products<0>();
    leave_value();
    pass(tiles_.begin - work.first_tile, tiles_.begin - work.first_tile);
    return false;
  }

  // The scores of `tile`, while `weights` of the tile after it are multiplied by their values.
  template <MaskKind kMask>
  __device__ __forceinline__ void step(const WorkTile& work, int tile, Weights& weights) {
    Kept kept;
    if constexpr (Form::kDrops) {
      // Before the products: beside them draws are slower, and there are fewer registers.
      kept = draw(work, tile);
      kept.hold();
      forget(scores_);
    }
    memory_.key_full[key_place_.slot()].wait(key_place_.parity());
    begin_turn();
    multiply_keys();
    memory_.value_full[value_place_.slot()].wait(value_place_.parity());
    clear(work, tile + 1);
    multiply_values(weights, [&] { end_turn(); });
    wait_products<1>();
    hold(scores_);
    hide<false, kMask>(work, tile);
    const bool moves = softmax_step<kMoves>(scores_, rows_, args_.exponent, rescale_);
    // The compiler would wait before it takes the exponentials, as nothing orders the two: so here
    // is something that never happens and needs their sums.
    if (rows_.sum[0] < 0 || rows_.sum[1] < 0) asm volatile("nanosleep.u32 1;" ::: "memory");
    wait_products<0>();
    leave_value();
    round<T>(weights, scores_);
    if constexpr (Form::kDrops) kept.drop(weights);
    if (moves) rescale_values();
  }

  // The tile again, step by step (MaskVerdict).
  __device__ __forceinline__ void mend(const PartTile& work) {
#pragma unroll 1
    for (int tile = work.end_tile - 1; tile >= work.first_tile; --tile) {
      Weights weights;
      memory_.key_full[key_place_.slot()].wait(key_place_.parity());
      multiply_keys();
      end_scores();
      hide<true, MaskKind::kAny>(work, tile);
      memory_.value_full[value_place_.slot()].wait(value_place_.parity());
      const int rows = work.queries - work.first - thread_row_;  // of the sequence
      memory_.verdict.template clear_unseen<KeyTile, kConsumers>(
          memory_.value[value_place_.slot()],
          [&](int i) { return scores_[i] != -INFINITY && 8 * (i / 2 % 2) < rows; });
      if (softmax_step<Moves::kByFloats>(scores_, rows_, args_.exponent, rescale_))
        rescale_values();
      round<T>(weights, scores_);
      multiply_values(weights, [] {});
      wait_products<0>();
      leave_value();
    }
    query_place_.advance();
    end_rows(work);
  }

  // Writes lse of the thread's rows, and says what becomes of their values: it needs none of them,
  // so the last product may run meanwhile.
  __device__ __forceinline__ void end_rows(const PartTile& work) {
    const int row = work.first + thread_row_;
    const int rows = args_.packed() ? args_.total_queries : args_.queries;
    int64_t at = (int64_t{work.batch} * args_.heads + work.head) * rows + work.query_begin + row;
    T* const out = row_of<T>(args_.out, work, work.head, row);
    float *to = static_cast<float*>(args_.lse), lse[2];
    // Of a part, the sink is added when the parts are joined.
    const bool of_part = work.parts > 1, adds_sink = work.key_begin >= 0 && !of_part;
    if (of_part) at = work.part_row + row, to = args_.key_parts.lse;
    const auto sink = [&](int of_row) {
      return adds_sink ? sink_of<T>(args_, work.head, of_row) : -INFINITY;
    };
    softmax_end(rows_, {sink(row), sink(row + 8)}, factor_, lse);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (Form::kDrops) factor_[r] *= args_.dropout_scale;
      const bool stores = row + 8 * r < work.queries;
      out_[r] = stores ? out + 8 * r * args_.out.row_stride : nullptr;
      if (stores && lane_ % 4 == 0) to[at + 8 * r] = lse[r];
    }
  }
  // Says whether the sums of the rows that are stored are spoiled.
  __device__ __forceinline__ void give_verdict() {
    memory_.verdict.give(values_, out_[0] != nullptr, out_[1] != nullptr, verdict_turn_);
  }
  __device__ __forceinline__ void store_rows() const {
#pragma unroll
    for (int r = 0; r < 2; ++r) store_row<T>(values_, r, factor_[r], out_[r], args_.value_dim);
  }

  __device__ __forceinline__ void store_part(const PartTile& work) const {
    const int64_t at = work.part_row + work.first + thread_row_;
    float* const to = args_.key_parts.values + at * args_.value_dim;
#pragma unroll
    for (int r = 0; r < 2 && work.first + thread_row_ + 8 * r < work.queries; ++r)
      store_row(values_, r, factor_[r], to + 8 * r * args_.value_dim, args_.value_dim);
  }

  // Whether the warpgroup takes part in the next tile from its first keys on.
  __device__ __forceinline__ bool next_starts() const {
    memory_.query_full[query_place_.slot()].wait(query_place_.parity());
    const ForwardTile& work = memory_.work[work_place_.slot()];
    const Range tiles = tiles_of(work, band_of(args_, work));
    return sees_keys(work) && tiles.end == work.end_tile && !(Form::kMasked && work.again);
  }
  __device__ __forceinline__ void start_scores() {
    memory_.key_full[key_place_.slot()].wait(key_place_.parity());
    multiply_keys();
  }
  __device__ __forceinline__ void end_scores() {
    wait_products<0>();
    hold(scores_);
  }

  __device__ __forceinline__ void multiply_keys() {
    uint64_t queries = query_operand_ + query_place_.slot() * (QueryTile::kBytes / 16);
    // Hides the operand, or the compiler keeps each of its steps in a register.
    if constexpr (Form::kMasked || kWide) asm volatile("" : "+l"(queries));
    const uint64_t keys = key_operand_ + uniform<kWide>(key_place_.slot()) * (KeyTile::kBytes / 16);
    start_product<T, QueryTile, KeyTile>(scores_, queries, keys);
  }
  template <typename Then>
  __device__ __forceinline__ void multiply_values(const Weights& weights, Then then) {
    const uint64_t from =
        value_operand_ + uniform<kWide>(value_place_.slot()) * (KeyTile::kBytes / 16);
    start_sum<T, KeyTile>(values_, weights, from, then);
  }

  // The scores of `tile` are made: its slot is given back, and options, mask and band are applied.
  // What a mask of numbers hides becomes -inf where kMends; else a score of NaN or Inf stays one.
  template <bool kMends, MaskKind kMask>
  __device__ __forceinline__ void hide(const WorkTile& work, int tile) {
    changes_ = Form::kMasksKeys && mask_changes(args_, work, tile);
    if (!changes_) leave_scores(tile);
    const int row = work.first + thread_row_, column = tile * kKeys + lane_ % 4 * 2;
    if (Form::kGeneral && kMask == MaskKind::kAny && args_.general)
      general_scores(
          args_, work, [&] { return work.head; }, scores_, thread_row_, column, [] {});
    if (Form::kMasked && mask_changes(args_, work, tile)) {
      const uint32_t slots = Form::Mask::slots(args_.mask), slot = mask_turn_ % slots;
      memory_.mask_full[slot].wait(mask_turn_++ / slots % 2);
      Form::Mask::template add<false, kMends, kMask>(
          args_.mask, memory_.mask + slot * Form::Mask::kSlotBytes, thread_row_, lane_ % 4 * 2,
          args_.factor_for_mask, scores_);
      arrive(memory_.mask_empty[slot]);
    } else if (Form::kMasked && args_.adds_mask) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) scores_[i] *= args_.factor_for_mask;
    }
    if (changes_) {
      add_key_mask();
      leave_scores(tile);
    }
    if (tile >= hides_from_) hide_after(scores_, band_of(args_, work), work.keys, row, column);
    if (tile < hides_below_) hide_before(scores_, band_of(args_, work), row, column);
  }
  // Makes values zero that no query of the sequence sees, unless the copy did: of such keys the
  // warpgroup's own queries see none.
  __device__ __forceinline__ void clear(const WorkTile& work, int tile) {
    const bool masked = Form::kMasksKeys && changes_;
    if (tile < hides_from_ && tile >= hides_below_ && !masked) return;
    const Band band = band_of(args_, work);
    const int seen_first = max(0, band.lowest) - tile * kKeys;
    const int seen_end = min(work.keys, work.queries + band.highest) - tile * kKeys;
    const bool behind = seen_end + tile * kKeys < work.keys || args_.packed();
    if (seen_first <= 0 && !(behind && seen_end < kKeys) && !masked) return;
    if (masked) meet_at(kOfGroup + group_, 128);  // add_key_mask() has written
    clear_rows<KeyTile>(memory_.value[value_place_.slot()], [&](int key) {
      return key < seen_first || key >= seen_end || (masked && memory_.key_hidden[group_][key]);
    });
    meet_at(kOfGroup + group_, 128);
  }
  // Adds the mask of keys to a tile's scores. That of a hidden key becomes -inf, whatever it was.
  __device__ __forceinline__ void add_key_mask() {
    if constexpr (!Form::kMasksKeys) return;
    const float* added = memory_.key_added[key_place_.slot()];
    add_to_columns(scores_, added + lane_ % 4 * 2);
    const int key = threadIdx.x % 128;
    if (key < kKeys) memory_.key_hidden[group_][key] = added[key] == -INFINITY;
  }
  __device__ __forceinline__ Kept draw(const WorkTile& work, int tile) const {
    Kept kept;
    Dropout dropout = memory_.dropout;
    dropout.row = work.sequence * args_.heads + work.head;
    kept.draw(dropout, work.first + thread_row_, tile * kKeys);
    return kept;
  }
  __device__ __forceinline__ void rescale_values() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) values_[i] *= rescale_[i / 2 % 2];
  }

  // Of every tile of queries each warpgroup has one turn less than there are tiles of keys.
  __device__ __forceinline__ void begin_turn() const { meet_at(kTurn + group_, 256); }
  __device__ __forceinline__ void end_turn() const {
    arrive_at(kTurn + (group_ + 1) % Form::kGroups, 256);
  }

  __device__ __forceinline__ void release(CopyBarrier& barrier) const {
    if (lane_ == 0) arrive(barrier);
  }
  __device__ __forceinline__ void leave_key() {
    // With a mask of keys each lane reads the slot, and so gives it back for itself.
    if (Form::kMasksKeys || lane_ == 0) arrive(memory_.key_empty[key_place_.slot()]);
    key_place_.advance();
  }
  // Gives back a tile's keys; after the last one also the queries.
  __device__ __forceinline__ void leave_scores(int tile) {
    leave_key();
    if (tile == tiles_.begin) release(memory_.query_empty[query_place_.slot()]);
  }
  __device__ __forceinline__ void leave_value() {
    hold(values_);
    release(memory_.value_empty[value_place_.slot()]);
    value_place_.advance();
  }
  // By so many tiles of keys, and turns.
  __device__ __forceinline__ void pass(int count, int turns) {
    for (; kPasses && count > 0; --count) {
      if (turns-- > 0) {
        begin_turn();
        end_turn();
      }
      memory_.key_full[key_place_.slot()].wait(key_place_.parity());
      leave_key();
      memory_.value_full[value_place_.slot()].wait(value_place_.parity());
      release(memory_.value_empty[value_place_.slot()]);
      value_place_.advance();
    }
  }

  const ForwardArgs& args_;
  ForwardMemory<Form>& memory_;
  const int group_, lane_ = threadIdx.x % 32;
  // The thread's first row of the tile; its second is 8 later.
  const int thread_row_ = 64 * group_ + threadIdx.x % 128 / 32 * 16 + lane_ / 4;
  const uint64_t query_operand_ = QueryTile::along_rows(shared_address(memory_.query), 64 * group_);
  const uint64_t key_operand_ = KeyTile::along_rows(shared_address(memory_.key[0]), 0);
  const uint64_t value_operand_ = KeyTile::down_columns(shared_address(memory_.value[0]));
  RingPlace<Form::kKeyStages> key_place_;
  RingPlace<Form::kValueStages> value_place_;
  RingPlace<Form::kQueryStages> query_place_;
  RingPlace<ForwardMemory<Form>::kWorks> work_place_;
  uint32_t mask_turn_ = 0, verdict_turn_ = 0;

  // Of a tile of queries: the warpgroup's tiles of keys, and the thread's sums.
  Range tiles_;
  RowState rows_{kLowest};
  float values_[kDim / 2];
  // What becomes of the thread's two rows of values: times `factor_`, to `out_`; null: nowhere.
  float factor_[2];
  T* out_[2];
  // Tiles from `hides_from_` on, and below `hides_below_`, have keys that a query does not see.
  int hides_from_, hides_below_;
  bool changes_ = false;  // whether a mask of keys changes scores of the last tile
  float scores_[kKeys / 2];
  float rescale_[2];
};

}  // namespace fused_norm::hopper
