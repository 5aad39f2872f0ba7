// Which kernels a call of attention takes, and their tiles. Pure host functions of the call and the
// chip. A sum's tiles follow from head dimension and options alone, never from the batch or the
// number of multiprocessors; its parts (KeyParts) from the sequence's own lengths too: a row's sums
// have one order.
#pragma once

#include <cstddef>

#include "core/attention/params.h"
#include "core/common/types.h"

namespace fused_norm {

// The bounds on head dimensions of the plain tier, and of the portable one.
constexpr int kMaxHeadDim = 512, kMaxPortableHeadDim = 256;

// Queries of all heads: the rows of the log-sum-exp.
int64_t attention_rows(const AttentionParams& params);

// Whether a tier has kernels for the call, whatever the tensors' alignment.
bool attention_tier_takes(AttentionTier tier, const AttentionParams& params,
                          const DeviceProperties& device);

// From this scale on kernels multiply after they take the maximum: -inf times it is -inf.
constexpr float kSmallestPlainScale = 1e-30f;

// The same forward pass, with few_queries set. Heads that share keys and have one query each, as in
// decoding, become the queries of one head, so that its keys are read once; if no option but sinks
// tells heads or places apart.
constexpr int kFewQueries = 8;
AttentionParams with_group_as_queries(AttentionParams params);

// Whether all that a score needs is its scale, which is positive, and the band of visible keys.
// Sinks come after the scores.
bool attention_scores_are_plain(const AttentionParams& params);
// Whether there is a mask of dense keys alone, as of padding: the same for every query, and for all
// query heads that share keys.
bool attention_masks_keys(const AttentionParams& params);
// Whether Hopper's kernels have a map of the mask, by which they leave out tiles that it hides: of
// masks of keys, and of those that all heads share, as causal ones with padding are.
bool attention_maps_mask(const AttentionParams& params);

// Tiles of a kernel of the portable tier: a block has 16 `fragments` rows for each of its warps and
// walks the other side, `others` rows at a time, in `stages` tiles of shared memory.
struct AttentionTiles {
  int dim;  // head dimensions up to this; columns beyond the tensor's are zeros
  int warps, fragments, others, stages;

  constexpr int own() const { return warps * fragments * 16; }
  constexpr int threads() const { return warps * kWarpSize; }
};

constexpr int kPortableDims = 3;
constexpr int attention_tiles_index(int head_dim, int value_dim) {
  const int dim = head_dim > value_dim ? head_dim : value_dim;
  return dim <= 64 ? 0 : dim <= 128 ? 1 : 2;
}

enum class PortableKernel { kForward, kQueryGradient, kKeyGradient, kMaskGradient };

// Registers set the tiles (255 a thread; two blocks of four warps fill a multiprocessor's): the
// accumulators of a thread are fragments / 2 x (columns of outputs + `others`), and
// everything must fit in the 99 KB of the smallest chips. Two fragments read each row of the other
// side once for 32 rows.
// `general`: scores are not plain, and need registers for their options. Always of a mask's
// gradient.
constexpr AttentionTiles portable_tiles(PortableKernel kernel, bool general, int index) {
  constexpr AttentionTiles kTiles[4][2][kPortableDims] = {
      {{{64, 4, 2, 128, 1}, {128, 4, 2, 64, 1}, {256, 4, 1, 64, 1}},
       {{64, 4, 2, 64, 1}, {128, 4, 2, 32, 1}, {256, 4, 1, 32, 1}}},
      {{{64, 4, 2, 64, 2}, {128, 4, 2, 32, 2}, {256, 4, 1, 32, 1}},
       {{64, 4, 2, 32, 2}, {128, 4, 1, 64, 2}, {256, 4, 1, 32, 1}}},
      {{{64, 4, 2, 32, 2}, {128, 4, 1, 64, 2}, {256, 4, 1, 32, 1}},
       {{64, 4, 2, 32, 2}, {128, 4, 1, 32, 2}, {256, 4, 1, 32, 1}}},
      {{}, {{64, 8, 1, 64, 1}, {128, 8, 1, 64, 1}, {256, 4, 1, 32, 1}}},
  };
  return kTiles[static_cast<int>(kernel)][general][index];
}

// Short dense sequences, as windows of an image, have kernels of their own on every chip
// (one_tile.cu): of up to so many queries, keys and columns, with plain scores but for a mask.
constexpr int kOneTileRows = 64, kOneTileColumns = 64;
constexpr int one_tile_columns(const AttentionParams& params) {  // of a tile
  return params.head_dim <= 32 && params.value_dim <= 32 ? 32 : 64;
}
// Blocks of a multiprocessor, by the registers of a thread.
constexpr int one_tile_blocks(int columns, bool backward) {
  return (columns == 32 ? 4 : 3) - backward;
}
bool attention_is_one_tile(const AttentionParams& params);
// Without a mask, or with one of booleans or of pairs, whether it needs a gradient or not.
bool one_tile_takes_backward(const AttentionParams& params);

// The (sequence, head) pairs that have a mask in common. Its gradient is a sum over them. Where
// there are few tiles of masks, the pairs come in parts, a block each, and one more kernel adds up
// the parts' fp32 sums. Blocks of the kernels of one tile walk over such pairs too.
struct MaskShare {
  int32_t batch, heads;  // of masks: 1 where one serves all
  int32_t served;        // pairs that have a mask in common
  int32_t parts, pairs;  // parts of these, and pairs of a part

  // `*of_batch`, `*head`: on entry the mask's; on return those of the pair `i` that has it.
  FUSED_NORM_HOST_DEVICE void set_pair(int i, int all_heads, int* of_batch, int* head) const {
    if (heads == 1) *head = i % all_heads;
    if (batch == 1) *of_batch = heads == 1 ? i / all_heads : i;
  }
};
// Work is dealt out as for so many multiprocessors on every chip: the order of sums follows from
// it.
constexpr int kSharedBy = 132;
constexpr int64_t kMostMaskSums = 32 << 20;  // bytes, of more than one part
MaskShare one_tile_share(const AttentionParams& params, int blocks);
MaskShare mask_share(const AttentionBackwardParams& params);
size_t mask_sums_bytes(const AttentionBackwardParams& params, const MaskShare& share);

// Forward a tile of queries, and one of keys and of values. Backward two tensors of each side; the
// log-sum-exp and delta of queries on the other side.
constexpr int portable_shared_bytes(PortableKernel kernel, const AttentionTiles& tiles) {
  return kernel == PortableKernel::kForward
             ? (tiles.own() + 2 * tiles.others) * tiles.dim * 2
             : 2 * tiles.own() * tiles.dim * 2 + tiles.stages * tiles.others * (4 * tiles.dim + 8);
}

// The tier for Hopper (compute capability 9.0): columns of tiles; a head dimension takes the
// first that holds it.
constexpr int kHopperDims[] = {64, 96, 128, 192, 256};
constexpr int hopper_dim_index(int dim) {
  int index = 0;
  while (kHopperDims[index] < dim) ++index;
  return index;
}

// Tiles by kHopperDims, as large as registers and shared memory allow: rows of one side, a block's
// own, against tiles of `others` rows of the other. Shared memory has so many tiles (stages) of the
// own side, and of the other side's first tensor (key or query) and second (value or dout).
struct HopperTiles {
  int others, own_stages, first_stages, second_stages;
};
// Forward: of calls without a mask of pairs, and with one.
constexpr HopperTiles kHopperForwardTiles[2][5] = {
    {{128, 2, 4, 4}, {96, 2, 4, 4}, {128, 2, 2, 3}, {112, 1, 2, 2}, {80, 1, 2, 2}},
    {{128, 2, 2, 2}, {80, 2, 2, 2}, {112, 1, 2, 2}, {80, 1, 2, 2}, {64, 1, 2, 2}},
};
// The most warpgroups of a block, of 64 queries each: three up to 96 columns, if masked from 65 on.
constexpr int hopper_most_groups(int dim, bool masks = false) {
  return dim <= 96 && (dim == 96 || !masks) ? 3 : 2;
}
// Whether there are kernels with dropout for so many columns of a tile. A call of up to 128 columns
// takes the next width that has them.
constexpr bool hopper_drops(int dim) { return dim == 64 || dim == 128; }
// Plain scores: two where fewer rows or blocks idle. No sum depends on how many there are.
int hopper_forward_groups(const AttentionParams& params, const DeviceProperties& device);
constexpr int kHopperOwnRows = 128;  // backward
// Whether a tile of keys is the only one of its sequence, and meets few tiles of queries: what it
// gives to dquery is then the sum, and is rounded and stored by that kernel. (Of many tiles, the
// one warp that does so would be slower than a kernel for it.)
constexpr bool hopper_stores_dquery(int keys, int queries) {
  return keys <= kHopperOwnRows && queries <= 4 * kHopperOwnRows;
}
// Of the kernel that makes all three gradients, where there is one: for plain scores, and for
// others. `others` are queries, in chunks of 64.
constexpr HopperTiles kHopperFusedTiles[2][5] = {
    {{128, 2, 2, 2}, {64, 2, 3, 2}, {64, 1, 3, 2}, {}, {}},
    {{128, 1, 2, 1}, {64, 1, 3, 2}, {64, 1, 2, 2}, {}, {}},
};
constexpr bool hopper_has_fused(int dim) {
  return kHopperFusedTiles[0][hopper_dim_index(dim)].others > 0;
}
// Above that, of the kernel that makes dquery. Then of the one that makes dkey and dvalue, whose
// own tiles have kHopperApartRows keys: for plain scores, and for others, as a mask's tile takes
// room.
constexpr HopperTiles kHopperQueryGradientTiles[] = {{}, {}, {}, {64, 1, 2, 2}, {64, 1, 2, 1}};
constexpr HopperTiles kHopperKeyGradientTiles[2][5] = {
    {{}, {}, {}, {96, 1, 2, 2}, {64, 1, 2, 2}},
    {{}, {}, {}, {64, 1, 2, 2}, {64, 1, 2, 2}},
};
constexpr int kHopperApartRows = 64;

// Of the kernel of an additive mask's gradient, of up to 64 columns and of 128: tiles of both sides
// change together.
constexpr HopperTiles kHopperMaskGradientTiles[] = {{128, 2, 2, 2}, {}, {64, 2, 2, 2}, {}, {}};

// How a call runs on Hopper. What a row's bits depend on, dim, general and key_parts, is a function
// of the call's options alone; the rest is the order of the work.
struct HopperPlan {
  int dim;           // columns of a tile: both head dimensions, rounded up
  bool general;      // backward: scores need more than a positive scale, a band, a mask of keys
  bool uneven;       // tiles take unlike times: they go to the next block that is free
  bool batch_first;  // (batch, head) pairs of a head follow each other, else of a sequence
  int key_parts;     // a head of keys' query heads come in so many parts, each to a block
  // So many pairs at once share the second-level cache: of queries' heads in the forward and the
  // backward pass, and of keys' parts.
  int forward_section, query_section, key_section;
};
HopperPlan hopper_plan(const AttentionParams& params);

// Whether one kernel makes all gradients of the call.
bool hopper_fuses(const AttentionParams& params);
// A group of more query heads than this comes in parts, as one block for all of them leaves many
// without work. Above 128 columns parts are larger, as their sums are.
int most_heads_of_part(const AttentionParams& params);

// The call whose queries are this one's keys, each head as often as it has parts.
AttentionParams with_sides_changed(AttentionParams params, int parts);

// Dense and packed, 16 bit, head dimensions that are multiples of 8 up to 256, with dropout up to
// 128; whatever the tensors' alignment (attention_is_aligned()). Nothing where the kernels were not
// compiled.
bool hopper_takes(const AttentionParams& params, const DeviceProperties& device);
// What Hopper takes, but for dropout beside a mask of queries and keys.
bool hopper_takes_forward(const AttentionParams& params, const DeviceProperties& device);
// What Hopper takes, if the queries' statistics have indices of 32 bits. A mask has to be
// of 16 bit or boolean, and the head dimension at most this, as shared memory has no room for other
// tiles; but the kernel of all gradients takes any mask of keys, which needs no tiles.
constexpr int kMaxMaskedBackwardDim = 192;
bool hopper_takes_backward(const AttentionParams& params, const DeviceProperties& device);
// Of these the mask's gradient: of dense 16-bit masks of all queries and keys, up to 128 columns,
// without dropout.
bool hopper_makes_mask_gradient(const AttentionBackwardParams& params,
                                const DeviceProperties& device);

// A layout in which every sequence of a head begins with a part of so many rows. Packed, sequence s
// does with part offset / rows + s + 1: no two share one, as n queries have at most
// (offset + n) / rows - offset / rows + 1 parts. The rows before the first are a sequence -1.
struct QueryParts {
  int64_t of_head, all;  // of a head of a dense sequence, or of all packed ones; of all heads
  int32_t heads;
  bool packed;

  // The first of a sequence, for which offset / rows is `begin`.
  FUSED_NORM_HOST_DEVICE int64_t first(int sequence, int head, int begin) const {
    return packed ? head * of_head + begin + sequence + 1
                  : (int64_t{sequence} * heads + head) * of_head;
  }
};
QueryParts query_parts(const AttentionParams& params, int rows);
// Statistics of queries (tiers.h) come in parts that copies in bulk can begin with. How many there
// are, and the first of a sequence whose first query is row `begin` of all.
constexpr int kStatisticRows = 4;
FUSED_NORM_HOST_DEVICE constexpr int64_t query_statistics(const QueryParts& parts) {
  return parts.all * kStatisticRows;
}
FUSED_NORM_HOST_DEVICE int64_t first_statistic(const QueryParts& parts, int sequence, int head,
                                               int begin) {
  return parts.first(sequence, head, begin / kStatisticRows) * kStatisticRows;
}

// Forward on Hopper, the keys of a sequence of few queries come in parts of `keys`, each to a
// block, as one block for all would leave others without work. A part of a head has `rows` rows of
// sums, of value_dim columns: its own softmax's results in fp32, and their log-sum-exps. How many
// parts there are follows from the sequence alone, as do its bits. Packed, the first one of a
// sequence is number 2 (first key / keys) of its head: no two share one, as n keys in parts have at
// most 2 (n / keys).
constexpr int kKeysOfPart = 1024;
struct KeyParts {
  int64_t of_head;  // of a head of a dense sequence, or of all packed ones
  int32_t heads, few, rows, keys;
  bool packed;
  float *values, *lse;

  FUSED_NORM_HOST_DEVICE int count(int queries, int sequence_keys) const {
    return queries > few || sequence_keys <= keys ? 1 : (sequence_keys - 1) / keys + 1;
  }
  // The first of a part's rows.
  FUSED_NORM_HOST_DEVICE int64_t row(int sequence, int head, int key_begin, int part) const {
    const int64_t first = packed ? head * of_head + 2 * (key_begin / keys)
                                 : (int64_t{sequence} * heads + head) * of_head;
    return (first + part) * rows;
  }
  int64_t all_rows(int batch) const { return of_head * heads * (packed ? 1 : batch) * rows; }
};

// A mask's map has for each block of kQueriesOfBit queries of a head of the mask two arrays of
// bits, each bit for kKeysOfBit keys. Masks of keys have one block. Two neighbouring words are read
// at once, so an array has a word more than it has bits for.
constexpr int kKeysOfBit = 16, kQueriesOfBit = 64;
struct MaskMapSize {
  int32_t sequences, heads, blocks, words;

  constexpr int64_t arrays() const { return int64_t{2} * sequences * heads * blocks; }
};
MaskMapSize mask_map_size(const AttentionParams& params);

// Scratch memory of a pass: bytes of it all, of which `zeros` at the beginning are to be zero, and
// where things begin. First is a ticket for each kernel by which tiles are handed out as blocks
// come. Where one kernel makes all gradients, each tile of queries has two chunks of 64 x 64
// elements of dquery: there is a counter for each, behind the tickets, and sums. Where a head of
// keys has parts, the two warpgroups of each tile of keys have a chunk of their sums too,
// whose counters follow.
struct HopperScratch {
  size_t zeros, mask_map, chunks, key_counters, key_chunks, key_part_sums, all;
  QueryParts tiles, key_tiles;
};
constexpr size_t kHopperTicketBytes = 16;
HopperScratch hopper_scratch(const AttentionParams& params, bool backward);
// Without their sums; no parts where `few` is negative.
KeyParts key_parts(const AttentionParams& params);

}  // namespace fused_norm
