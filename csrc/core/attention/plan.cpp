#include "core/attention/plan.h"

#include <algorithm>
#include <utility>

namespace fused_norm {
namespace {

// Keys and values of so many bytes stay in the second-level cache (50 MB) while their queries pass.
constexpr int64_t kCachedBytes = 32 << 20;
// Of short sequences no more heads than this, half of the blocks: the longest tiles of all of them
// come first and read their keys from memory; with more, all blocks would first read, then compute.
constexpr int64_t kMostHeads = 64;
// Queries, dout and fp32 sums of dquery of so many bytes do so while tiles of keys add to the sums;
// of more where tiles of keys meet unlike numbers of queries, and so wait for each other.
constexpr int64_t kSummedBytes = 17 << 20, kUnevenSummedBytes = 25 << 20;

int dim_of(const AttentionParams& params) {
  const int columns = std::min(std::max(params.head_dim, params.value_dim), kHopperDims[4]);
  int index = hopper_dim_index(columns);
  if (params.dropout_threshold > 0 && columns <= 128 && !hopper_drops(kHopperDims[index])) ++index;
  return kHopperDims[index];
}

bool is_uneven(const AttentionParams& params) {
  return params.packed() || params.window_left >= 0 || params.window_right >= 0 ||
         (attention_maps_mask(params) && !attention_masks_keys(params));
}

// Heads of `rows` rows of two tensors that the cache holds.
int cached_heads(const AttentionParams& params, int64_t rows) {
  const int64_t bytes = 2 * rows * (params.head_dim + params.value_dim);
  return static_cast<int>(
      std::clamp<int64_t>(kCachedBytes / std::max<int64_t>(bytes, 1), 1, kMostHeads));
}

// Without parts.
MaskShare share_of(const AttentionParams& params, bool one_batch, bool one_head) {
  const int32_t batch = one_batch ? 1 : params.batch, heads = one_head ? 1 : params.heads;
  const auto served = static_cast<int32_t>(int64_t{params.batch} * params.heads /
                                           std::max<int64_t>(1, int64_t{batch} * heads));
  return {batch, heads, served, 1, served};
}
// In at most so many parts, of one size.
void set_parts(MaskShare* share, int64_t parts) {
  const int64_t served = std::max(share->served, 1);
  share->pairs = static_cast<int32_t>(ceil_div(served, std::max<int64_t>(parts, 1)));
  share->parts = static_cast<int32_t>(ceil_div(served, share->pairs));
}

}  // namespace

bool attention_is_one_tile(const AttentionParams& params) {
  const auto fits = [](int32_t size, int most) { return size > 0 && size <= most; };
  AttentionParams unmasked = params;
  unmasked.mask.data = nullptr;
  return size_of(params.dtype) == 2 && !params.packed() && params.batch > 0 && params.heads > 0 &&
         params.heads == params.kv_heads && int64_t{params.batch} * params.heads <= 1 << 30 &&
         fits(params.queries, kOneTileRows) && fits(params.keys, kOneTileRows) &&
         fits(params.head_dim, kOneTileColumns) && fits(params.value_dim, kOneTileColumns) &&
         params.sink.data == nullptr && attention_scores_are_plain(unmasked);
}

bool one_tile_takes_backward(const AttentionParams& params) {
  const AttentionMask& mask = params.mask;
  const bool of_pairs =
      (params.queries == 1 || mask.row_stride != 0) && (params.keys == 1 || mask.key_stride != 0);
  return attention_is_one_tile(params) && (mask.data == nullptr || mask.boolean || of_pairs);
}

MaskShare one_tile_share(const AttentionParams& params, int blocks) {
  MaskShare share = share_of(params, params.mask.batch_stride == 0, params.mask.head_stride == 0);
  set_parts(&share, blocks / std::max<int64_t>(1, int64_t{share.batch} * share.heads));
  return share;
}

MaskShare mask_share(const AttentionBackwardParams& params) {
  const AttentionParams& forward = params.forward;
  const int* shape = params.mask_shape;
  const int blocks = kSharedBy * one_tile_blocks(one_tile_columns(forward), true);
  if (params.dmask == nullptr) return one_tile_share(forward, blocks);
  const MaskShare whole = share_of(forward, shape[0] == 1, shape[1] == 1);
  const int64_t masks = int64_t{whole.batch} * whole.heads;
  if (forward.dtype == DType::kFloat64) return whole;
  MaskShare share = whole, best = whole;
  if (one_tile_takes_backward(forward)) {
    set_parts(&share, blocks / masks);
    return share;
  }
  // An estimate: other kernels have a block a multiprocessor and tiles of 128 x 128. To store and
  // add up a part's sums takes as long as three pairs. Parts are to gain a tenth.
  const int64_t tiles = masks * ceil_div(shape[2], 128) * ceil_div(shape[3], 128);
  const int64_t bytes = sizeof(float) * masks * shape[2] * shape[3];
  int64_t least = ceil_div(tiles, kSharedBy) * whole.served * 9 / 10;
  const int64_t most = std::min<int64_t>(kSharedBy, kMostMaskSums / std::max<int64_t>(bytes, 1));
  for (int parts = 2; parts <= std::min<int64_t>(whole.served, most); ++parts) {
    set_parts(&share, parts);
    const int64_t time = ceil_div(tiles * share.parts, kSharedBy) * (share.pairs + 3);
    if (time < least) least = time, best = share;
  }
  return best;
}

size_t mask_sums_bytes(const AttentionBackwardParams& params, const MaskShare& share) {
  const int* shape = params.mask_shape;
  if (params.dmask == nullptr || share.parts == 1) return 0;
  const size_t floats = size_t{1} * share.parts * shape[0] * shape[1] * shape[2] * shape[3];
  return (sizeof(float) * floats + 127) / 128 * 128;
}

bool attention_is_aligned(const AttentionTensor& tensor, DType dtype) {
  const int pack = 16 / size_of(dtype);
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.batch_stride % pack == 0 &&
         tensor.head_stride % pack == 0 && tensor.row_stride % pack == 0;
}

int64_t attention_rows(const AttentionParams& params) {
  return int64_t{params.heads} *
         (params.packed() ? params.total_queries : int64_t{params.batch} * params.queries);
}

AttentionParams with_group_as_queries(AttentionParams params) {
  params.few_queries = kFewQueries;
  const bool sees_all = params.window_left < 0 && (params.window_right < 0 || !params.top_left);
  if (params.queries != 1 || params.heads <= params.kv_heads || !sees_all ||
      params.alibi_slopes != nullptr || params.packed() || params.dropout_threshold != 0)
    return params;
  params.queries = params.sink.rows = params.heads / params.kv_heads;
  params.few_queries *= params.queries;
  params.heads = params.kv_heads;
  params.window_right = -1;
  for (AttentionTensor* tensor : {&params.query, &params.out}) {
    tensor->row_stride = tensor->head_stride;
    tensor->head_stride *= params.queries;
  }
  params.mask.row_stride = params.mask.head_stride;
  params.mask.head_stride *= params.queries;
  return params;
}

bool attention_tier_takes(AttentionTier tier, const AttentionParams& params,
                          const DeviceProperties& device) {
  // For what it does not take of a pass, the portable tier's kernels serve.
  if (tier == AttentionTier::kHopper) return hopper_takes(params, device);
  if (tier != AttentionTier::kPortable) return tier == AttentionTier::kPlain;
  return size_of(params.dtype) == 2 && params.head_dim % 8 == 0 && params.value_dim % 8 == 0 &&
         params.head_dim <= kMaxPortableHeadDim && params.value_dim <= kMaxPortableHeadDim;
}

bool attention_scores_are_plain(const AttentionParams& params) {
  return params.scale >= kSmallestPlainScale && params.softcap == 0 &&
         params.mask.data == nullptr && params.alibi_slopes == nullptr &&
         params.dropout_threshold == 0;
}

bool attention_masks_keys(const AttentionParams& params) {
  const AttentionMask& mask = params.mask;
  return mask.data != nullptr && !params.packed() && mask.row_stride == 0 &&
         (mask.head_stride == 0 || params.heads == params.kv_heads);
}

bool attention_maps_mask(const AttentionParams& params) {
  return attention_masks_keys(params) ||
         (params.mask.data != nullptr && !params.packed() && params.mask.head_stride == 0);
}

AttentionTier attention_tier(const AttentionParams& params, const DeviceProperties& device,
                             AttentionTier wanted) {
  const auto takes = [&](AttentionTier tier) {
    if (!attention_tier_takes(tier, params, device)) return false;
    if (tier == AttentionTier::kPlain) return true;
    for (const AttentionTensor& tensor : {params.query, params.key, params.value, params.out}) {
      if (!attention_is_aligned(tensor, params.dtype)) return false;
    }
    return true;
  };
  if (wanted != AttentionTier::kAuto) return takes(wanted) ? wanted : AttentionTier::kAuto;
  for (AttentionTier tier : {AttentionTier::kHopper, AttentionTier::kPortable}) {
    if (takes(tier)) return tier;
  }
  return AttentionTier::kPlain;
}

int most_heads_of_part(const AttentionParams& params) { return hopper_fuses(params) ? 2 : 4; }

bool hopper_fuses(const AttentionParams& params) { return hopper_has_fused(dim_of(params)); }

HopperPlan hopper_plan(const AttentionParams& params) {
  HopperPlan plan{};
  plan.dim = dim_of(params);
  AttentionParams without = params;
  if (hopper_fuses(params) && attention_masks_keys(params)) without.mask.data = nullptr;
  plan.general = !attention_scores_are_plain(without);
  plan.uneven = is_uneven(params);
  const int group = params.heads / params.kv_heads;
  const int64_t cached = plan.uneven ? cached_heads(params, params.keys) : 1;
  plan.query_section = static_cast<int>(std::min<int64_t>(cached * group, 1 << 30));
  plan.key_parts = 1;
  const int most = most_heads_of_part(params);
  while (group % plan.key_parts != 0 || group / plan.key_parts > most) ++plan.key_parts;
  const int64_t rows_of_keys = int64_t{params.queries} * group / plan.key_parts;
  if (hopper_fuses(params)) {
    // So few heads at once that dquery's sums stay in the cache from one tile of keys to the next.
    // Long sequences need more heads, as each tile of a head waits for the one before: a few; up to
    // 16 (of 64 columns 32) where tiles meet unlike numbers of queries.
    const int64_t head_bytes = std::max<int64_t>(8 * rows_of_keys * plan.dim, 1);
    const int64_t most = plan.uneven ? INT32_MAX : 2 * kSummedBytes / head_bytes;
    const int64_t fewest = std::clamp<int64_t>(most, 1, (plan.uneven ? 2048 : 1024) / plan.dim);
    const int64_t summed = plan.uneven ? kUnevenSummedBytes : kSummedBytes;
    plan.key_section = static_cast<int>(std::clamp<int64_t>(summed / head_bytes, fewest, 256));
  } else {
    plan.key_section = plan.uneven ? cached_heads(params, rows_of_keys) : 1;
  }
  // A head's mask that serves every sequence is read for all of them while it is cached.
  plan.batch_first = !params.packed() && params.batch > 1 && params.mask.data != nullptr &&
                     params.mask.batch_stride == 0 && params.mask.row_stride != 0;
  plan.forward_section = std::max(plan.query_section, plan.batch_first ? params.batch : 1);
  return plan;
}

AttentionParams with_sides_changed(AttentionParams params, int parts) {
  params.heads = params.kv_heads * parts;
  std::swap(params.queries, params.keys);
  std::swap(params.query_offsets, params.key_offsets);
  std::swap(params.total_queries, params.total_keys);
  std::swap(params.window_left, params.window_right);
  return params;
}

int hopper_forward_groups(const AttentionParams& params, const DeviceProperties& device) {
  // Of blocks in turn: a tile takes as long as its warpgroups that have rows, and two more.
  const auto time = [&](int groups) {
    const int64_t tiles = std::max<int64_t>(ceil_div(params.queries, 64 * groups), 1);
    const int64_t rounds = ceil_div(tiles * params.batch * params.heads, device.sm_count);
    return rounds * (2 + static_cast<double>(ceil_div(params.queries, 64)) / tiles);
  };
  // Of packed sequences only the longest is known.
  const bool two = params.packed() ? params.queries <= 128 : time(2) <= time(3);
  return two ? 2 : hopper_most_groups(dim_of(params));
}

bool hopper_takes(const AttentionParams& params, const DeviceProperties& device) {
#ifdef FUSED_NORM_WITH_HOPPER
  const auto fits = [](int columns) { return columns % 8 == 0 && columns >= 8 && columns <= 256; };
  return device.capability == 90 && size_of(params.dtype) == 2 && fits(params.head_dim) &&
         fits(params.value_dim) && (params.dropout_threshold == 0 || hopper_drops(dim_of(params)));
#else
  (void)params, (void)device;
  return false;
#endif
}

bool hopper_takes_forward(const AttentionParams& params, const DeviceProperties& device) {
  return hopper_takes(params, device) &&
         (params.dropout_threshold == 0 || params.mask.data == nullptr ||
          attention_masks_keys(params));
}

bool hopper_takes_backward(const AttentionParams& params, const DeviceProperties& device) {
  const AttentionMask& mask = params.mask;
  return hopper_takes(params, device) &&
         query_statistics(query_parts(params, kStatisticRows)) <= INT32_MAX &&
         (mask.data == nullptr || (hopper_fuses(params) && attention_masks_keys(params)) ||
          (dim_of(params) <= kMaxMaskedBackwardDim && (mask.boolean || size_of(mask.dtype) == 2)));
}

bool hopper_makes_mask_gradient(const AttentionBackwardParams& params,
                                const DeviceProperties& device) {
  const AttentionParams& forward = params.forward;
  return params.dmask != nullptr && attention_rows(forward) > 0 &&
         hopper_takes_backward(forward, device) && dim_of(forward) <= 128 &&
         forward.dropout_threshold == 0 && !forward.packed() && size_of(forward.mask.dtype) == 2 &&
         params.mask_shape[2] == forward.queries && params.mask_shape[3] == forward.keys;
}

QueryParts query_parts(const AttentionParams& params, int rows) {
  const bool packed = params.packed();
  const int64_t of_head =
      packed ? params.total_queries / rows + params.batch + 2 : (params.queries + rows - 1) / rows;
  return {of_head, of_head * params.heads * (packed ? 1 : params.batch), params.heads, packed};
}

MaskMapSize mask_map_size(const AttentionParams& params) {
  const AttentionMask& mask = params.mask;
  return {mask.batch_stride == 0 ? 1 : params.batch, mask.head_stride == 0 ? 1 : params.heads,
          attention_masks_keys(params) ? 1 : (params.queries + kQueriesOfBit - 1) / kQueriesOfBit,
          params.keys / (32 * kKeysOfBit) + 2};
}

KeyParts key_parts(const AttentionParams& params) {
  const bool packed = params.packed();
  const bool masked = params.mask.data != nullptr && !attention_masks_keys(params);
  const int tile = kHopperForwardTiles[masked][hopper_dim_index(dim_of(params))].others;
  KeyParts parts{};
  parts.few = -1;
  parts.keys = static_cast<int32_t>(ceil_div(kKeysOfPart, tile) * tile);
  if (params.batch == 0 || (packed ? params.total_keys : params.keys) <= parts.keys) return parts;
  // Where sequences have as many keys as queries, few queries have few keys.
  if (packed ? params.query_offsets == params.key_offsets : params.queries > params.few_queries)
    return parts;
  parts.packed = packed;
  parts.heads = params.heads;
  parts.few = params.few_queries;
  parts.of_head = packed ? 2 * (params.total_keys / parts.keys) : parts.count(0, params.keys);
  parts.rows = packed ? params.few_queries : params.queries;
  return parts;
}

HopperScratch hopper_scratch(const AttentionParams& params, bool backward) {
  const bool fuses = backward && hopper_fuses(params);
  HopperScratch scratch{};
  const auto take = [&](size_t bytes) {
    const size_t begin = (scratch.all + 127) / 128 * 128;
    scratch.all = begin + bytes;
    return begin;
  };
  const bool parts = backward && hopper_plan(params).key_parts > 1;
  if (fuses || parts || is_uneven(params)) scratch.zeros = kHopperTicketBytes;
  if (fuses) {
    const HopperPlan plan = hopper_plan(params);
    const int rows = kHopperFusedTiles[plan.general][hopper_dim_index(plan.dim)].others;
    scratch.tiles = query_parts(params, rows);
    scratch.zeros += 2 * scratch.tiles.all * sizeof(uint32_t);
  }
  const int key_rows = fuses ? kHopperOwnRows : kHopperApartRows;
  if (parts) {
    scratch.key_tiles = query_parts(with_sides_changed(params, 1), key_rows);
    scratch.key_counters = scratch.zeros;
    scratch.zeros += 2 * scratch.key_tiles.all * sizeof(uint32_t);
  }
  take(scratch.zeros);
  if (attention_maps_mask(params)) {
    const MaskMapSize size = mask_map_size(params);
    scratch.mask_map = take(size.arrays() * size.words * sizeof(uint32_t));
  }
  if (const KeyParts key = key_parts(params); !backward && key.few >= 0) {
    scratch.key_part_sums =
        take(key.all_rows(params.batch) * (params.value_dim + 1) * sizeof(float));
  }
  if (fuses) {
    const bool sums = params.packed() || !hopper_stores_dquery(params.keys, params.queries);
    scratch.chunks = take(sums ? 2 * scratch.tiles.all * 64 * 64 * sizeof(float) : 0);
  }
  const size_t key_sums = scratch.key_tiles.all * key_rows * 2 * dim_of(params);
  if (parts) scratch.key_chunks = take(key_sums * sizeof(float));
  return scratch;
}

}  // namespace fused_norm
