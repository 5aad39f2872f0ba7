// The work of a Hopper kernel: tiles of queries, dense or packed, handed out to blocks that stay.
// Tiles that a mask hides are left out, and only tiles of which it changes a score are masked: a
// kernel before notes which these are.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/attention/plan.h"
#include "core/attention/scores.cuh"

namespace fused_norm::hopper {

// What a mask of keys adds to the score of one.
__device__ __forceinline__ float key_mask_value(const AttentionMask& mask, int sequence, int head,
                                                int key) {
  const int64_t at = sequence * mask.batch_stride + head * mask.head_stride + key * mask.key_stride;
  float value;
  with_mask_reader(mask, [&](auto read) { value = read(at); });
  return value;
}

// A mask, if there is one, and its map: for every kQueriesOfBit queries by kKeysOfBit keys a bit
// says whether one of the scores is seen, and one of another array whether one is changed. Null
// bits: there is no map.
struct MappedMask : AttentionMask {
  uint32_t* bits;
  int32_t heads, blocks, words;  // of a sequence; of queries of a head; of a block's arrays

  // Where the arrays of a head's queries begin: for each block who is seen, then who is changed.
  __device__ __forceinline__ uint32_t begin(int sequence, int head) const {
    const int row = (batch_stride == 0 ? 0 : sequence) * heads + (head_stride == 0 ? 0 : head);
    return static_cast<uint32_t>(row) * blocks * 2 * words;
  }
  // Whether one of kKeys keys from `key` on is seen by one of `queries` from `query` on, of those
  // whose arrays begin there, and whether one of their scores is changed.
  struct Tile {
    bool seen, changed;
  };
  template <int kKeys>
  __device__ __forceinline__ Tile tile(uint32_t begin, int query, int queries, int key) const {
    static_assert(kKeys % kKeysOfBit == 0 && kKeys / kKeysOfBit < 32);
    const int bit = key / kKeysOfBit, first = min(query / kQueriesOfBit, blocks - 1);
    int more = min((query + queries - 1) / kQueriesOfBit, blocks - 1) - first;
    const uint32_t* at = bits + (begin + first * 2 * words + bit / 32);
    uint32_t seen = 0, changed = 0;
#pragma unroll 1  // registers are few
    do {
      seen |= __funnelshift_r(at[0], at[1], bit % 32);
      changed |= __funnelshift_r(at[words], at[words + 1], bit % 32);
      at += 2 * words;
    } while (--more >= 0);
    constexpr uint32_t kBits = (1u << kKeys / kKeysOfBit) - 1;
    return {(seen & kBits) != 0, (changed & kBits) != 0};
  }
  // How many of the tiles of kKeys keys in [first, end) one of these queries sees. By a warp.
  template <int kKeys>
  __device__ __forceinline__ int count_seen(uint32_t begin, int query, int queries, int first,
                                            int end) const {
    static_assert(kKeys == 8 * kKeysOfBit);  // a byte of the array
    const int block = min(query / kQueriesOfBit, blocks - 1);
    const int last = min((query + queries - 1) / kQueriesOfBit, blocks - 1);
    int count = 0;
#pragma unroll 1
    for (int word = first / 4 + threadIdx.x % 32; 4 * word < end; word += 32) {
      const uint32_t* at = bits + (begin + block * 2 * words + word);
      uint32_t seen = at[0];
      if (last > block) seen |= at[2 * words];
      if (4 * word < first) seen &= ~0u << 8 * (first - 4 * word);
      if (4 * word + 4 > end) seen &= ~0u >> 8 * (4 * word + 4 - end);
      count += __popc(__vcmpne4(seen, 0)) / 8;
    }
    return __reduce_add_sync(~0u, count);
  }
};

// A call's mask. Its map, if it has one, lies in the call's scratch memory.
inline MappedMask mapped_mask(const AttentionParams& params, bool backward, void* scratch) {
  if (!attention_maps_mask(params)) return {params.mask};
  const MaskMapSize size = mask_map_size(params);
  char* bits = static_cast<char*>(scratch) + hopper_scratch(params, backward).mask_map;
  return {params.mask, reinterpret_cast<uint32_t*>(bits), size.heads, size.blocks, size.words};
}

constexpr int32_t kNoLimit = kMaxAttentionRows;

// The call, and what sets the tiles. Windows are at most kNoLimit here, and never negative.
struct WorkArgs : AttentionParams {
  int32_t query_tiles;  // of a dense sequence
  int32_t section;      // so many (batch, head) pairs share the second-level cache
  int32_t heads_per_kv;
  bool longest_first, batch_first;
  uint32_t* ticket;  // 0 at first: tiles are handed out as blocks come; null: in turn
  MappedMask mask;   // the call's, with its map
  // Forward, where the keys of few queries come in parts: how many a dense sequence has, and where
  // their sums are.
  int32_t dense_parts;
  KeyParts key_parts;
};

// A block notes of its first so many tiles of keys which a mask changes.
constexpr int kKnownTiles = 256;

// A tile of queries, and the tiles of keys that one of them sees.
struct WorkTile {
  int32_t sequence;  // -1: there is none left
  int32_t head, kv_head, batch;
  int32_t first;                       // query of the tile, counted in its sequence
  int32_t query_begin, queries;        // the sequence's rows in the tensor
  int32_t key_begin, keys;             // -1 and 0 of rows outside every sequence
  int32_t first_tile, end_tile;        // alike where there is no tile left
  uint32_t changed[kKnownTiles / 32];  // a bit for each tile of keys: a mask changes its scores
};
// One of its sequence's parts of keys, and the first row of its sums.
struct PartTile : WorkTile {
  int32_t part, parts;
  int64_t part_row;
};
__device__ __forceinline__ bool sees_keys(const WorkTile& work) {
  return work.first_tile < work.end_tile;
}
// Whether a mask changes scores of a tile of keys, as far as is known.
__device__ __forceinline__ bool mask_changes(const WorkArgs& args, const WorkTile& work, int tile) {
  if (args.mask.data == nullptr) return false;
  return args.mask.bits == nullptr || tile >= kKnownTiles ||
         (work.changed[tile / 32] >> tile % 32 & 1) != 0;
}

// The first of the 32 packed sequences that were looked at last, and the tiles before it.
struct ListPlace {
  int32_t sequence;
  uint32_t tiles_before;
};

// What a list leaves out for a mask's map: nothing, where it has none; or tiles of keys, or of
// queries, before the first and behind the last that the own side sees.
enum class Hidden { kNone, kKeys, kQueries };

// Where a ring of kStages slots stands, in one register: a copying warp's are few.
template <int kStages>
struct RingPlace {
  uint32_t count = 0;  // of slots before this one
  __device__ __forceinline__ int slot() const { return count % kStages; }
  __device__ __forceinline__ uint32_t parity() const { return count / kStages % 2; }
  __device__ __forceinline__ void advance() { ++count; }
};

// The block's next tile, behind `index`, for a warp's first lane; its first is that of its own
// index. A ticket is taken so many tiles of the other side before the copies of the present tile
// end. Earlier, a block with a long tile would hold one that idle blocks could compute.
constexpr int kTicketSteps = 8;
__device__ __forceinline__ uint32_t next_index(const WorkArgs& args, uint32_t index) {
  // From round to round a block moves on by one place: else it might have the last tile of every
  // head, which is often cut.
  if (args.ticket == nullptr)
    return index + 1 + (index % gridDim.x == gridDim.x - 1 ? 0 : gridDim.x);
  return threadIdx.x % 32 == 0 ? gridDim.x + atomicAdd(args.ticket, 1) : 0;
}

// Of a tile's sequence.
__device__ __forceinline__ Band band_of(const WorkArgs& args, const WorkTile& work) {
  const int shift = args.top_left ? 0 : work.keys - work.queries;
  return {shift - args.window_left, shift + args.window_right};
}

// The tiles of kKeys keys of which one of `rows` queries from `query` on sees some.
template <int kKeys>
__device__ __forceinline__ Range key_tiles_of(const WorkTile& work, const Band& band, int query,
                                              int rows) {
  const int last = min(query + rows, work.queries) - 1;
  const int end = min(work.keys, last + band.highest + 1), first = max(0, query + band.lowest);
  if (last < query || end <= first) return {};
  return {first / kKeys, (end + kKeys - 1) / kKeys};
}

// The tiles of kRows queries, against tiles of kKeys keys: all of them, or those of a part.
template <int kRows, int kKeys, Hidden kHidden, bool kInParts = false>
class WorkList {
  using Tile = std::conditional_t<kInParts, PartTile, WorkTile>;

 public:
  // `place` lies in shared memory, zeros at first.
  __device__ WorkList(const WorkArgs& args, ListPlace* place) : args_(args), place_(place) {}

  // Says in shared memory what tile `index` is, which of packed sequences grows from call to call;
  // false: there is none. By all threads of a warp, of which the first writes.
  __device__ bool tile(uint32_t index, Tile* work) {
    const bool found = args_.packed() ? packed(index, work) : dense(index, work);
    if (threadIdx.x % 32 == 0) begin(found, work);
    if constexpr (kHidden != Hidden::kNone) {
      if (found && args_.mask.bits != nullptr) leave_out_hidden(work);
    }
    return found;
  }

 private:
  __device__ void begin(bool found, Tile* work) const {
    if (!found) {
      work->sequence = -1;
      work->first_tile = work->end_tile = 0;
      return;
    }
    work->kv_head = work->head / args_.heads_per_kv;
    const Range tiles = key_tiles_of<kKeys>(*work, band_of(args_, *work), work->first, kRows);
    work->first_tile = tiles.begin;
    work->end_tile = tiles.end;
    if constexpr (kInParts) {
      if (work->parts == 1) return;
      const KeyParts& parts = args_.key_parts;
      work->part_row = parts.row(work->sequence, work->head, work->key_begin, work->part);
      const int of_part = parts.keys / kKeys;
      work->first_tile = max(tiles.begin, work->part * of_part);
      work->end_tile = max(work->first_tile, min(tiles.end, (work->part + 1) * of_part));
    }
  }

  // By all threads of a warp.
  __device__ void leave_out_hidden(WorkTile* work) const {
    const int lane = threadIdx.x % 32;
    constexpr int kMapped = kHidden == Hidden::kKeys ? kKeys : kRows;  // keys of a tile
    const auto of_map = [&](int query, int queries, int key) {
      const uint32_t begin = args_.mask.begin(work->sequence, work->head);
      return args_.mask.template tile<kMapped>(begin, query, queries, key);
    };
    __syncwarp();  // the first has written
    const int first = work->first_tile, end = work->end_tile;
    __syncwarp();  // all have read
    if (lane == 0) work->end_tile = first;
#pragma unroll 1  // registers are few
    for (int from = first / 32 * 32; from < end; from += 32) {
      const int tile = from + lane;
      MappedMask::Tile found{};
      if (tile >= first && tile < end) {
        found = kHidden == Hidden::kKeys ? of_map(work->first, kRows, tile * kKeys)
                                         : of_map(tile * kKeys, kKeys, work->first);
      }
      const uint32_t seen = __ballot_sync(~0u, found.seen);
      const uint32_t changed = __ballot_sync(~0u, found.changed);
      if (lane != 0) continue;
      if (from < kKnownTiles) work->changed[from / 32] = changed;
      if (seen == 0) continue;
      if (work->end_tile == first) work->first_tile = from + __ffs(seen) - 1;
      work->end_tile = from + 32 - __clz(seen);
    }
  }

  __device__ bool dense(uint32_t index, Tile* work) const {
    const uint32_t pairs = args_.heads * args_.batch, tiles = args_.query_tiles;
    if (index >= pairs * tiles) return false;
    if (threadIdx.x % 32 != 0) return true;
    const uint32_t first_pair = index / (args_.section * tiles) * args_.section;
    const uint32_t rest = index - first_pair * tiles;
    const uint32_t width = min(static_cast<uint32_t>(args_.section), pairs - first_pair);
    const uint32_t pair = first_pair + rest % width;
    uint32_t tile = args_.longest_first ? tiles - 1 - rest / width : rest / width;
    if constexpr (kInParts) tile = take_part(tile, args_.dense_parts, work);
    work->first = tile * kRows;
    work->sequence = work->batch = args_.batch_first ? pair % args_.batch : pair / args_.heads;
    work->head = args_.batch_first ? pair / args_.batch : pair % args_.heads;
    work->query_begin = work->key_begin = 0;
    work->queries = args_.queries;
    work->keys = args_.keys;
    return true;
  }

  static __device__ uint32_t take_part(uint32_t index, int parts, PartTile* work) {
    work->parts = parts;
    work->part = parts == 1 ? 0 : index % parts;
    return parts == 1 ? index : index / parts;
  }

  struct Keys {
    int begin, count;
  };
  // Of packed sequence `number`, counted from 1.
  __device__ Keys keys_of(int number) const {
    if (number < 1 || number > args_.batch) return {-1, 0};
    const int begin = clamp_offset(args_.key_offsets[number - 1], 0, args_.total_keys);
    return {begin, max(clamp_offset(args_.key_offsets[number], 0, args_.total_keys) - begin, 0)};
  }

  // Sequences are counted from 1. Numbers 0 and batch + 1 are the rows before and behind all, which
  // see no keys.
  __device__ bool packed(uint32_t index, Tile* work) {
    const int lane = threadIdx.x % 32;
    int first_sequence = place_->sequence;
    uint32_t tiles_before = place_->tiles_before;
    while (first_sequence <= args_.batch + 1) {
      const int number = first_sequence + lane;
      int begin = 0, end = 0;
      if (number <= args_.batch + 1) {
        begin =
            number == 0 ? 0 : clamp_offset(args_.query_offsets[number - 1], 0, args_.total_queries);
        end = number > args_.batch
                  ? args_.total_queries
                  : clamp_offset(args_.query_offsets[number], 0, args_.total_queries);
        end = max(end, begin);
      }
      int parts = 1;
      if constexpr (kInParts) {
        if (args_.key_parts.few >= 0)
          parts = args_.key_parts.count(end - begin, keys_of(number).count);
      }
      const uint32_t tiles = (end - begin + kRows - 1) / kRows * args_.heads * parts;
      uint32_t sum = tiles;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
      }
      const uint32_t here = __ballot_sync(~0u, index < tiles_before + sum);
      if (here == 0) {
        tiles_before += __shfl_sync(~0u, sum, 31);
        first_sequence += 32;
        *place_ = {first_sequence, tiles_before};
        continue;
      }
      const int from = __ffs(here) - 1;
      const uint32_t rest = index - tiles_before - __shfl_sync(~0u, sum - tiles, from);
      begin = __shfl_sync(~0u, begin, from);
      end = __shfl_sync(~0u, end, from);
      if constexpr (kInParts) parts = __shfl_sync(~0u, parts, from);
      if (lane != 0) return true;
      const int found = first_sequence + from;
      const uint32_t count = (end - begin + kRows - 1) / kRows;
      // Heads by turns: in the kernel of all gradients few tiles then wait for the one before.
      uint32_t turn = rest / args_.heads;
      work->head = rest % args_.heads;
      if constexpr (kInParts) turn = take_part(turn, parts, work);
      work->first = (args_.longest_first ? count - 1 - turn : turn) * kRows;
      work->sequence = max(min(found, args_.batch) - 1, 0);
      work->batch = 0;
      work->query_begin = begin;
      work->queries = end - begin;
      const Keys keys = keys_of(found);
      work->key_begin = keys.begin;
      work->keys = keys.count;
      return true;
    }
    return false;
  }

  const WorkArgs& args_;
  ListPlace* place_;
};

}  // namespace fused_norm::hopper
