// All gradients in one kernel: the backward kernel of a tile of keys (see hopper_backward.cuh),
// whose W also gives the tile's part of dquery, W^T times the keys. W goes through shared memory,
// as the sum runs over the keys of both warpgroups. They make that part by turns, tile by tile: one
// multiplies for it while the other takes exponentials.
//
// Tiles of keys add to dquery in the order of the keys, so that its bits are always the same. A
// tile of queries has fp32 sums in two chunks, each of 64 queries and at most 64 columns as the
// threads of a warpgroup have them, and each chunk a counter of the tiles of keys that it has. A
// warp adds a chunk when the counter has come to its tile. It waits only for a tile of keys that an
// earlier ticket handed out, and so never for a block that has not begun. Blocks go through the
// tiles of queries in step, and at each through the heads that share the keys.
#pragma once

#include "core/attention/hopper_keys.cuh"
#include "core/attention/hopper_mask_gradient.cuh"
#include "core/attention/mma.cuh"

namespace fused_norm::hopper {

// Named barriers; a chunk adds its index. Its warp says that a group may write the chunk, the group
// that the chunk is there.
constexpr int kChunkIsFree = 6, kChunkIsThere = 8;
constexpr int kChunkThreads = 128 + 32;

// Whether a mask's map lets a tile of queries see the own tile of keys.
template <typename Form>
__device__ __forceinline__ bool is_seen(const BackwardArgs& args, const WorkTile& work, int tile) {
  if (args.mask.bits == nullptr) return true;
  return args.mask
      .template tile<Form::kOwn>(args.mask.begin(work.sequence, work.head), tile * Form::kOthers,
                                 Form::kOthers, work.first)
      .seen;
}

// Of a tile of keys that has all of a sequence: its chunks need no sums. They are scaled, rounded
// and stored as rows of dquery. One warp, whose registers are few: so eight rows and 32 columns at
// a time.
template <typename Form>
__device__ __forceinline__ void store_chunks(const BackwardArgs& args,
                                             const BackwardMemory<Form>& memory,
                                             const WorkTile& work, int half) {
  using T = typename Form::T;
  const AttentionTensor& dquery = args.dquery;
  const int lane = threadIdx.x % 32, first_column = Form::kByQueries ? 0 : 64 * half;
  const int first_query = (Form::kByQueries ? 64 * half : 0) + lane / 4;
  T* const rows = static_cast<T*>(dquery.data) + work.batch * dquery.batch_stride +
                  Form::first_head(args, work) * dquery.head_stride +
                  int64_t{work.key_begin} * dquery.row_stride + first_column;
  auto steps = Form::begin_steps(args, work);
#pragma unroll 1
  do {
    meet_at(kChunkIsThere + half, kChunkThreads);
    const int query = steps.tile * Form::kOthers + first_query, head = args.group - steps.heads;
    const bool stores = dquery.data != nullptr && is_seen<Form>(args, work, steps.tile);
#pragma unroll 1
    for (int i = 0; stores && i < Form::chunk_elements(half) / 256; ++i) {
      const int row = 8 * (i % 8), block = i / 8;
      const float4* of_thread = memory.chunk[half] + 512 * block + 32 * (row / 16) + lane;
      float values[16];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = reinterpret_cast<const float2*>(of_thread + 128 * j)[row / 8 % 2];
        values[4 * j] = two.x, values[4 * j + 1] = two.y;
      }
      T* const out =
          rows + head * dquery.head_stride + int64_t{query + row} * dquery.row_stride + 32 * block;
      store_row<T>(values, 0, args.gradient_scale, query + row < work.keys ? out : nullptr,
                   args.head_dim - first_column - 32 * block);
    }
    __syncwarp();
    arrive_at(kChunkIsFree + half, kChunkThreads);
  } while (Form::advance(args, work, steps));
}

// Adds one of each tile's two chunks to dquery's sums. One warp.
template <typename Form>
__device__ __forceinline__ void add_chunks(const BackwardArgs& args, BackwardMemory<Form>& memory,
                                           int half) {
  const bool leader = threadIdx.x % 32 == 0;
  arrive_at(kChunkIsFree + half, kChunkThreads);
  for (uint32_t count = 0;; ++count) {
    const uint32_t slot = count % Form::kOwnStages;
    memory.own_full[slot].wait(count / Form::kOwnStages % 2);
    const WorkTile work = memory.work[count % BackwardMemory<Form>::kWorks];
    __syncwarp();
    if (leader) arrive(memory.own_empty[slot]);
    if (work.sequence < 0) return;
    if (!sees_keys(work)) continue;
    asm volatile("" : "+r"(half));  // or the compiler keeps what follows from it
    const int bytes = 4 * Form::chunk_elements(half);
    if (hopper_stores_dquery(work.queries, work.keys)) {  // the own side are keys
      store_chunks(args, memory, work, half);
      continue;
    }
    const int own_tile = work.first / Form::kOwn, right = band_of(args, work).highest;
    const uint32_t first = first_chunk<Form::kOthers>(
        args.sums.tiles, work.sequence, Form::first_head(args, work), work.key_begin, half);
    auto steps = Form::begin_steps(args, work);
    uint32_t known = 0;  // the counter of the step's chunk, as it was in the step before
    uint32_t chunk, next = first + 2 * steps.tile;
    bool more;
#pragma unroll 1
    do {
      chunk = next;
      // The tiles of keys before this one, from the first on that sees the queries: all between see
      // them too, but for those that a mask hides. Mostly they have all added to the chunk for
      // long.
      const int query = steps.tile * Form::kOthers;
      const int first_own = max(0, query - right) / Form::kOwn;
      uint32_t before = own_tile - first_own;
      bool adds = true;
      if (args.mask.bits != nullptr) {
        const uint32_t map = args.mask.begin(work.sequence, work.head);
        before = args.mask.template count_seen<Form::kOwn>(map, query, Form::kOthers, first_own,
                                                           own_tile);
        adds = is_seen<Form>(args, work, steps.tile);
      }
      more = Form::advance(args, work, steps);
      next = first + 2 * ((args.group - steps.heads) * args.sums.tiles.of_head + steps.tile);
      if (leader && adds && known < before) wait_for_count(args.sums.counters + chunk, before);
      known = 0;
      meet_at(kChunkIsThere + half, kChunkThreads);
      if (leader && adds) {
        float* sum = args.sums.chunks + int64_t{chunk} * kChunkElements;
        before > 0 ? add_bulk(sum, memory.chunk[half], bytes)
                   : store_bulk(sum, memory.chunk[half], bytes);
        commit_bulk_stores();
        wait_for_bulk_reads<0>();
      }
      __syncwarp();
      arrive_at(kChunkIsFree + half, kChunkThreads);
      if (leader && adds) {
        if (more) known = read_count(args.sums.counters + next);
        wait_for_bulk_stores();
        count_up(args.sums.counters + chunk);
      }
    } while (more);
  }
}

template <typename Form>
class FusedConsumer : public KeysConsumer<Form> {
  using Base = KeysConsumer<Form>;
  using T = typename Form::T;
  using OwnTile = typename Form::OwnTile;
  using WeightTile = typename BackwardMemory<Form>::WeightTile;
  static constexpr int kWeightStages = Form::kWeightStages;
  static constexpr bool kByQueries = Form::kByQueries, kGeneral = Form::kGeneral;
  using Base::args_, Base::memory_, Base::group_, Base::lane_, Base::own_slot_;
  using Base::first_sums_, Base::second_sums_;
  using Base::kept_, Base::tiles_, Base::first_, Base::second_;
  using Base::masks_, Base::scores_, Base::products_, Base::first_weights_, Base::second_weights_;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    this->run_parts([&](const WorkTile& work) { walk(work); });
  }

 private:
  // All tiles of others, of all heads of the group. Products run in the order
  //   S and D   second += P Y'   first += W Y
  // P's exponentials are taken under D. The group that makes the chunks W^T X has one before its
  // last product and one behind. None is under way from one turn to the next, as the compiler would
  // lose sight of it.
  __device__ __forceinline__ void walk(const WorkTile& work) {
    this->clear_own(work);
    if constexpr (Form::kOwnBlocks > 0) load_own_blocks();
    auto steps = Form::begin_steps(args_, work);
#pragma unroll 1
    do {
      const int tile = steps.tile;
      const bool cut = this->is_cut(work, tile);
      if constexpr (Form::kDrops) draw(work, tile, steps.heads);
      this->start_scores(work, tile, cut);
      this->read_ahead(Base::kExponent);
      this->start_products(work, tile, cut);
      weigh(work, tile, steps.heads, cut);
      add_tile();
    } while (Form::advance(args_, work, steps));
    this->release(memory_.own_empty[own_slot_]);
  }
  // A warp moves 16 x 16 elements at once, of which each lane has the address of a row of 8. Its
  // row in the own tile:
  __device__ __forceinline__ int row_of_address() const {
    return this->row_in_tile() - lane_ / 4 + lane_ % 16;
  }
  __device__ __forceinline__ void load_own_blocks() {
    using Panel = mma::Tile<OwnTile::kPanelColumns>;
    const int row = row_of_address();
    const uint32_t tile = shared_address(memory_.own_second[own_slot_]);
#pragma unroll
    for (int i = 0; i < Form::kOwnBlocks; ++i) {
      const uint32_t panel = tile + 2 * i / Panel::kChunks * OwnTile::kPanelBytes;
      mma::load_matrices(this->own_blocks_[i],
                         Panel::at(panel, row, 2 * i % Panel::kChunks + lane_ / 16));
    }
  }
  // Which probabilities dropout keeps. Before a tile's products: beside them draws are slower, and
  // there are fewer registers.
  __device__ __forceinline__ void draw(const WorkTile& work, int tile, int heads) {
    Dropout dropout = memory_.dropout;
    dropout.row =
        work.sequence * args_.gradient.params.forward.heads + Form::query_head(args_, work, heads);
    kept_.draw(dropout, work.first + this->row_in_tile(), tile * Form::kOthers + lane_ % 4 * 2);
    kept_.hold();
    forget(scores_);
    forget(products_);
  }
  // Turns S into P while D is made, and D into W.
  __device__ __forceinline__ void weigh(const WorkTile& work, int tile, int heads, bool cut) {
    wait_products<1>();
    hold(scores_);
    if constexpr (kGeneral) this->apply_options(work, tile, heads);
    // With options there is no register for masks_: a mask is added even if it is 0 everywhere.
    if (kGeneral ? args_.masks_keys : masks_) {
      const float* mask = memory_.key_mask + this->row_in_tile();
      this->exponentiate(mask[0], mask[8]);
    } else {
      this->exponentiate(0, 0);
    }
    if (cut) this->hide(work, tile);
    this->read_ahead(Base::kDelta);
    wait_products<0>();
    hold(products_);
    this->differentiate(cut);
    store_weights();
  }
  __device__ __forceinline__ void add_tile() {
    CopyBarrier::order_writes();
    // Every thread arrives. Racecheck does not follow one that arrives for its warp, nor the named
    // barriers of the chunks: by this one it sees that the groups write chunks by turns.
    arrive(memory_.weights_full[stage()]);
    this->add(second_sums_, second_weights_, second_, this->second_slot());
    if (tiles_ % 2 == group_) {
      add_and_make_chunks();
    } else {
      this->add(first_sums_, first_weights_, first_, this->first_slot());
      wait_products<1>();
      hold(second_sums_);
      this->leave_second();
      wait_products<0>();
      hold(first_sums_);
    }
    this->release(memory_.first_empty[this->first_slot()]);
    ++tiles_;
  }
  // Where the tile's W lies. Two tiles later nobody multiplies it any more: a group comes there
  // only after chunks of its own, for which it waited for the other's W of a later tile.
  __device__ __forceinline__ int stage() const { return tiles_ % kWeightStages; }
  static_assert(Form::kGroups == 2 && kWeightStages == 2);

  // Rounds a tile's P and W, and stores W where both groups read it.
  __device__ __forceinline__ void store_weights() {
    const uint32_t row =
        shared_address(memory_.weights[stage()]) + row_of_address() * WeightTile::kRowBytes;
#pragma unroll
    for (int block = 0; block < Form::kOthers / 16; ++block) {
#pragma unroll
      for (int i = 4 * block; i < 4 * block + 4; ++i) {
        second_weights_[i] = round_pair(scores_[2 * i], scores_[2 * i + 1], T());
        if (Form::kDrops) second_weights_[i] = kept_.of_pair(second_weights_[i], i);
        first_weights_[i] = round_pair(products_[2 * i], products_[2 * i + 1], T());
      }
      const uint32_t part = (2 * block % 8 + lane_ / 16) ^ (lane_ % 8);
      store_matrices(row + block / 4 * WeightTile::kPanelBytes + 16 * part,
                     first_weights_ + 4 * block);
    }
  }
  __device__ __forceinline__ void add_and_make_chunks() {
    float first[kChunkElements / 128], second[Form::chunk_elements(1) / 128];
    memory_.weights_full[stage()].wait(tiles_ / kWeightStages % 2);
    wait_products<0>();
    hold(second_sums_);
    this->leave_second();
    start_chunk<0>(first);
    this->add(first_sums_, first_weights_, first_, this->first_slot());
    wait_products<1>();
    store_chunk(first, 0);
    start_chunk<1>(second);
    wait_products<1>();
    hold(first_sums_);
    wait_products<0>();
    store_chunk(second, 1);
  }
  template <int kHalf, int kCount>
  __device__ __forceinline__ void start_chunk(float (&chunk)[kCount]) {
    constexpr int kOwn = 64 / OwnTile::kPanelColumns * OwnTile::kPanelBytes;  // of 64 columns
    start_product_down<T, WeightTile, OwnTile>(
        chunk,
        WeightTile::down_columns(shared_address(memory_.weights[stage()]) +
                                 (kByQueries ? kHalf * WeightTile::kPanelBytes : 0)),
        OwnTile::down_columns(shared_address(memory_.own_first[own_slot_]) +
                              (kByQueries ? 0 : kHalf * kOwn)));
  }
  template <int kCount>
  __device__ __forceinline__ void store_chunk(float (&chunk)[kCount], int half) {
    hold(chunk);
    meet_at(kChunkIsFree + half, kChunkThreads);
    float4* to = memory_.chunk[half] + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      to[32 * i] = make_float4(chunk[i], chunk[i + 1], chunk[i + 2], chunk[i + 3]);
    }
    CopyBarrier::order_writes();
    arrive_at(kChunkIsThere + half, kChunkThreads);
  }
};

template <typename Form>
__global__ void __launch_bounds__(Form::kThreads, 1)
    attention_backward_hopper(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) char shared[];
  auto& memory = *reinterpret_cast<BackwardMemory<Form>*>(shared);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be the warp's
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Form::kGroups;  // a warp of a consumer arrives once
    init_ring(
        memory.own_full, memory.own_empty, 1,
        kWarps + (Form::kAll ? kChunkWarps : 0) + (Form::has_mask(args) ? Form::kMaskWarps : 0));
    memory.mask_full.init(Form::Mask::kThreads);
    memory.mask_empty.init(Form::kApart ? 128 : 32 * kWarps);  // those that add it to scores
    memory.verdict.init(kWarps);
    memory.place = {};
    for (uint32_t& count : memory.count) count = 0;
    if constexpr (Form::kDrops) memory.dropout = dropout_of(args, 0);
    init_ring(memory.first_full, memory.first_empty, 1, kWarps);
    init_ring(memory.second_full, memory.second_empty, 1, kWarps);
    // W of both groups, or of kApart one group's P.
    init_ring(memory.weights_full, memory.weights_empty, Form::kApart ? 128 : 256, 128);
    CopyBarrier::order_inits();
  }
  __syncthreads();
  if (group == 0) {
    shrink_registers<Form::kProducerRegisters>();
    if constexpr (Form::kOfMask) {
      if (threadIdx.x == 0) copy_sides(args, memory);
      if (threadIdx.x >= 32) copy_served_masks(args, memory);
    } else if (threadIdx.x < 32) {
      BackwardProducer<Form>(args, memory).run();
    } else if (Form::kAll && threadIdx.x / 32 <= kChunkWarps) {
      if constexpr (Form::kAll) add_chunks(args, memory, threadIdx.x / 32 - 1);
    } else if (Form::has_mask(args)) {
      copy_masks(args, memory);
    }
  } else {
    grow_registers<Form::kConsumerRegisters>();
    if constexpr (Form::kOfMask) {
      MaskGradientConsumer<Form>(args, memory, group - 1).run();
    } else if constexpr (Form::kAll) {
      FusedConsumer<Form>(args, memory, group - 1).run();
    } else if constexpr (!Form::kApart) {
      BackwardConsumer<Form>(args, memory, group - 1).run();
    } else if (group == 1) {
      ApartConsumer<Form, /*kOfKey=*/false>(args, memory, 0).run();
    } else {
      ApartConsumer<Form, /*kOfKey=*/true>(args, memory, 1).run();
    }
  }
}

}  // namespace fused_norm::hopper
