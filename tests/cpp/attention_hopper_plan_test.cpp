// Which calls the Hopper kernels of attention take, and in what form.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/attention/plan.h"
#include "tests/cpp/chips.h"

namespace fused_norm {
namespace {

AttentionParams call(int head_dim, int queries, int keys) {
  AttentionParams params{};
  params.dtype = DType::kBFloat16;
  params.batch = 2;
  params.heads = 16;
  params.kv_heads = 4;
  params.queries = queries;
  params.keys = keys;
  params.head_dim = params.value_dim = head_dim;
  params.scale = 0.125;
  params.window_left = params.window_right = -1;
  return params;
}

TEST(AttentionHopperPlan, RoundsUpToTheWiderHead) {
  for (int dim = 8; dim <= 256; dim += 8) {
    AttentionParams params = call(dim, 512, 512);
    params.value_dim = 8;
    const int columns = hopper_plan(params).dim;
    EXPECT_GE(columns, dim);
    EXPECT_TRUE(dim <= 64 || columns - dim < 64) << dim;
    std::swap(params.head_dim, params.value_dim);
    EXPECT_EQ(hopper_plan(params).dim, columns);
  }
}

// A row's bits depend on its own sequence and the options, so what sets the tiles does too.
TEST(AttentionHopperPlan, TilesDoNotDependOnBatchOrLengths) {
  for (int dim : {64, 96, 128, 192, 256}) {
    AttentionParams params = call(dim, 7, 100000);
    params.batch = 1000;
    const int32_t offsets[] = {0};
    for (const int32_t* packed : {static_cast<const int32_t*>(nullptr), offsets}) {
      params.query_offsets = params.key_offsets = packed;
      const HopperPlan one = hopper_plan(call(dim, 128, 128)), other = hopper_plan(params);
      EXPECT_EQ(one.dim, other.dim);
      EXPECT_EQ(one.general, other.general);
      EXPECT_EQ(one.key_parts, other.key_parts);
    }
  }
}

// Three warpgroups but where two finish sooner: they leave fewer rows without a query, or all
// blocks are at work at once.
TEST(AttentionHopperPlan, WarpgroupsFollowTheQueries) {
  const auto groups = [](int dim, int batch, int queries) {
    AttentionParams params = call(dim, queries, 4096);
    params.batch = batch;
    return hopper_forward_groups(params, kH200);
  };
  for (int dim : {64, 96}) {
    for (int queries : {1, 128, 197, 256}) EXPECT_EQ(groups(dim, 64, queries), 2);
    for (int queries : {192, 257, 512, 577, 1024, 4096}) EXPECT_EQ(groups(dim, 64, queries), 3);
    EXPECT_EQ(groups(dim, 1, 576), 2);
  }
  for (int dim : {128, 192, 256}) EXPECT_EQ(groups(dim, 64, 4096), 2);
  AttentionParams packed = call(64, 512, 512);
  const int32_t offsets[] = {0};
  packed.query_offsets = packed.key_offsets = offsets;
  EXPECT_EQ(hopper_forward_groups(packed, kH200), 3);
  packed.queries = 128;  // of the longest
  EXPECT_EQ(hopper_forward_groups(packed, kH200), 2);
}

TEST(AttentionHopperPlan, OnlyPositiveScalesAndBandsArePlain) {
  AttentionParams params = call(128, 512, 512);
  params.window_right = 0;
  EXPECT_FALSE(hopper_plan(params).general);
  for (double scale : {0.0, -0.125, 1e-38}) {
    params.scale = scale;
    EXPECT_TRUE(hopper_plan(params).general) << scale;
  }
  params.scale = 0.125;
  params.softcap = 30;
  EXPECT_TRUE(hopper_plan(params).general);
}

// Heads that share keys follow each other, and so do as many others as the cache holds.
TEST(AttentionHopperPlan, SectionsHoldWholeGroupsOfHeads) {
  for (int keys : {0, 1, 1000, 16384, 1 << 20}) {
    for (bool causal : {false, true}) {
      AttentionParams params = call(128, 512, keys);
      if (causal) params.window_right = 0;
      const HopperPlan plan = hopper_plan(params);
      EXPECT_GE(plan.forward_section, 4);
      EXPECT_EQ(plan.forward_section % 4, 0);
      EXPECT_EQ(plan.uneven, causal);
      EXPECT_EQ(hopper_scratch(params, false).all != 0, causal);
    }
  }
}

// As many as the cache holds, but half of the chip's blocks at most: the longest tiles of all of
// them come first, and are the first to read their keys from memory.
TEST(AttentionHopperPlan, FewHeadsOfShortSequencesBeginTogether) {
  const auto heads = [](int dim, int length) {
    AttentionParams params = call(dim, length, length);
    params.kv_heads = params.heads;
    params.window_right = 0;
    return hopper_plan(params).forward_section;
  };
  EXPECT_EQ(heads(64, 128), 64);
  EXPECT_EQ(heads(64, 1024), 64);
  EXPECT_EQ(heads(128, 2048), 32);
  EXPECT_EQ(heads(128, 1 << 20), 1);
}

// Of keys too: then a section is of heads of keys.
TEST(AttentionHopperPlan, BackwardHasATicketForEachOfItsKernels) {
  for (int length : {0, 1, 1000, 16384, 1 << 20}) {
    for (bool causal : {false, true}) {
      AttentionParams params = call(128, length, length);
      if (causal) params.window_right = 0;
      const HopperPlan plan = hopper_plan(params);
      EXPECT_EQ(plan.query_section % 4, 0);
      EXPECT_GE(plan.query_section, 4);
      EXPECT_GE(plan.key_section, 1);
      EXPECT_EQ(plan.uneven, causal);
    }
  }
}

// dquery's sums of the heads at work stay in the cache, unless these would be too few to fill the
// chip; under a causal mask the tiles of a head begin one after the other.
TEST(AttentionHopperPlan, FewHeadsOfLongSequencesAreAtWork) {
  const auto heads = [](int dim, int length, bool causal) {
    AttentionParams params = call(dim, length, length);
    params.kv_heads = params.heads;
    if (causal) params.window_right = 0;
    return hopper_plan(params).key_section;
  };
  EXPECT_EQ(heads(64, 1024, false), 34);
  EXPECT_EQ(heads(64, 4096, false), 16);
  EXPECT_EQ(heads(64, 16384, false), 4);
  EXPECT_EQ(heads(64, 1 << 20, false), 1);
  EXPECT_EQ(heads(128, 16384, false), 2);
  EXPECT_EQ(heads(64, 1024, true), 50);
  EXPECT_EQ(heads(64, 16384, true), 32);
  EXPECT_EQ(heads(128, 16384, true), 16);
}

// A tile that has all keys of a sequence stores dquery itself, where there are few queries.
TEST(AttentionHopperPlan, OneTileOfKeysNeedsNoSums) {
  const auto bytes = [](int queries, int keys) {
    return hopper_scratch(call(64, queries, keys), true).all;
  };
  constexpr size_t kOfTile = 2 * 64 * 64 * sizeof(float), kHeads = 2 * 16;
  EXPECT_GE(bytes(128, 129), bytes(128, 128) + kHeads * kOfTile);
  EXPECT_GE(bytes(513, 77), bytes(512, 77) + kHeads * kOfTile);
  EXPECT_TRUE(hopper_stores_dquery(128, 512));
  EXPECT_FALSE(hopper_stores_dquery(128, 513));
}

// Four bytes for each ticket, three kernels at most; the kernel of all gradients always has one.
TEST(AttentionHopperPlan, ScratchHoldsTicketsCountersAndSums) {
  AttentionParams params = call(192, 1000, 1000);
  EXPECT_EQ(hopper_scratch(params, false).all, 0u);
  params.window_right = 0;
  EXPECT_EQ(hopper_scratch(params, false).all, kHopperTicketBytes);
  EXPECT_EQ(hopper_scratch(params, true).zeros, kHopperTicketBytes);
  for (int dim : {64, 96, 128}) {
    AttentionParams fused = call(dim, 1000, 1000);
    fused.kv_heads = fused.heads;
    EXPECT_TRUE(hopper_fuses(fused));
    const HopperScratch scratch = hopper_scratch(fused, true);
    const size_t rows = dim == 64 ? 128 : 64, heads = fused.batch * fused.heads;
    EXPECT_EQ(scratch.zeros, kHopperTicketBytes + 4 * 2 * heads * ((1000 + rows - 1) / rows));
    EXPECT_GE(scratch.chunks, scratch.zeros);
    EXPECT_EQ(scratch.chunks % 128, 0u);
    EXPECT_EQ(scratch.all, scratch.chunks + 2 * heads * ((1000 + rows - 1) / rows) * 64 * 64 * 4);
    EXPECT_EQ(hopper_scratch(fused, false).all, 0u);
    fused.softcap = 30;
    EXPECT_TRUE(hopper_plan(fused).general);
    EXPECT_EQ(hopper_scratch(fused, true).all, scratch.all);
    fused.dropout_threshold = 1;
    EXPECT_EQ(hopper_scratch(fused, true).all, scratch.all);
  }
}

// Parts divide a group, have few heads, and are as few as that allows.
TEST(AttentionHopperPlan, LargeGroupsComeInParts) {
  for (int dim : {64, 128, 192, 256}) {
    for (int group = 1; group <= 33; ++group) {
      AttentionParams params = call(dim, 1000, 700);
      params.kv_heads = 3;
      params.heads = group * params.kv_heads;
      const bool fuses = hopper_fuses(params);
      const int parts = hopper_plan(params).key_parts, most = most_heads_of_part(params);
      EXPECT_EQ(group % parts, 0) << group;
      EXPECT_LE(group / parts, most) << group;
      for (int fewer = 1; fewer < parts; ++fewer) {
        EXPECT_TRUE(group % fewer != 0 || group / fewer > most) << group;
      }
      const HopperScratch scratch = hopper_scratch(params, true);
      const size_t heads = size_t{1} * params.batch * params.kv_heads;
      const size_t tiles = fuses ? 6 * heads : 11 * heads, rows = fuses ? 128 : 64;
      const size_t sums = parts > 1 ? tiles * rows * 2 * dim * sizeof(float) : 0;
      const size_t before =
          fuses ? scratch.chunks + 2 * scratch.tiles.all * 64 * 64 * sizeof(float) : scratch.zeros;
      if (parts > 1) {
        EXPECT_EQ(scratch.key_chunks, (before + 127) / 128 * 128);
        EXPECT_EQ(scratch.all, scratch.key_chunks + sums);
      } else {
        EXPECT_EQ(scratch.all, before);
      }
      const size_t counters = 2 * (scratch.tiles.all + (sums > 0 ? tiles : 0));
      const size_t tickets = fuses || parts > 1 ? kHopperTicketBytes : 0;
      EXPECT_EQ(scratch.zeros, tickets + counters * sizeof(uint32_t)) << dim << " " << group;
      params.softcap = 30;
      EXPECT_EQ(hopper_plan(params).key_parts, parts);
    }
  }
}

// Sequences' parts, each from its offset / rows + its index on, do not overlap and are all there.
TEST(AttentionHopperPlan, PackedSequencesHavePartsOfTheirOwn) {
  const int lengths[] = {0, 1, 63, 64, 65, 0, 500, 128};
  AttentionParams params = call(128, 512, 512);
  int total = 0;
  for (int length : lengths) total += length;
  params.query_offsets = &params.batch;  // any
  params.batch = std::size(lengths);
  params.total_queries = total;
  for (int rows : {4, 16, 64, 128}) {
    const QueryParts parts = query_parts(params, rows);
    int64_t end = 0;
    for (int head = 0; head < params.heads; ++head) {
      int offset = 0;
      for (int i = 0; i < params.batch; ++i) {
        EXPECT_GE(parts.first(i, head, offset / rows), end);
        end = parts.first(i, head, offset / rows) + (lengths[i] + rows - 1) / rows;
        offset += lengths[i];
      }
    }
    EXPECT_LE(end, parts.all);
  }
}

TEST(AttentionHopperPlan, DenseSequencesHavePartsOfTheirOwn) {
  const AttentionParams params = call(64, 1001, 1000);
  const QueryParts parts = query_parts(params, 4);
  EXPECT_EQ(parts.of_head, 251);
  EXPECT_EQ(parts.all, 251 * params.heads * params.batch);
  EXPECT_EQ(parts.first(1, 2, 0), 251 * (params.heads + 2));
}

// As in decoding. The form's tile of keys sets how many a part has.
TEST(AttentionHopperPlan, ManyKeysOfFewQueriesComeInParts) {
  for (int dim : {64, 96, 128, 192, 256}) {
    AttentionParams params = with_group_as_queries(call(dim, 8, 5000));
    KeyParts parts = key_parts(params);
    EXPECT_GE(parts.keys, kKeysOfPart);
    EXPECT_LT(parts.keys, kKeysOfPart + 128);
    EXPECT_EQ(parts.rows, 8);
    EXPECT_EQ(parts.count(8, 5000), (5000 + parts.keys - 1) / parts.keys);
    EXPECT_EQ(parts.count(8, parts.keys), 1);
    const size_t rows = 2 * 16 * 8 * size_t{1} * parts.count(8, 5000);
    EXPECT_EQ(hopper_scratch(params, false).all, rows * (dim + 1) * sizeof(float));
    params.keys = parts.keys;
    EXPECT_EQ(key_parts(params).count(8, parts.keys), 1);
    EXPECT_EQ(hopper_scratch(params, false).all, 0);
    EXPECT_EQ(key_parts(with_group_as_queries(call(dim, 9, 5000))).count(9, 5000), 1);
    // The backward pass has none.
    EXPECT_EQ(hopper_scratch(call(dim, 8, 5000), true).key_part_sums, 0);
  }
}

// A group of heads as the queries of one: its keys have the parts that each head's would have.
TEST(AttentionHopperPlan, GroupsHaveThePartsOfTheirHeads) {
  AttentionParams params = call(128, 1, 5000);
  const int count = key_parts(params).count(1, 5000);
  EXPECT_EQ(count, 1);  // few_queries is unset
  params.heads = 80;
  params = with_group_as_queries(params);
  EXPECT_EQ(params.queries, 20);
  EXPECT_EQ(key_parts(params).count(20, 5000), 5);
  EXPECT_EQ(key_parts(params).rows, 20);
}

// Packed, parts of sequences lie one behind the other and share no rows.
TEST(AttentionHopperPlan, PartsOfPackedSequencesHaveRowsOfTheirOwn) {
  const int32_t queries[] = {0}, keys[] = {0};
  AttentionParams params = with_group_as_queries(call(128, 2, 0));
  params.query_offsets = queries, params.key_offsets = keys;
  for (int first : {0, 1, 1023, 1024, 1200}) {
    for (int length : {1024, 1025, 2047, 2048, 2049, 100000}) {
      params.total_keys = first + 2 * length;
      const KeyParts parts = key_parts(params);
      ASSERT_EQ(parts.few, 8);
      const int count = parts.count(2, length);
      EXPECT_LE(parts.row(0, 3, first, count), parts.row(1, 3, first + length, 0));
      EXPECT_LE(parts.row(1, 3, first + length, count), parts.row(0, 4, 0, 0));
      EXPECT_LE(parts.row(1, 15, first + length, count), parts.all_rows(params.batch));
    }
  }
  params.total_keys = 1 << 20;
  params.batch = 1 << 20;  // of one key each: they need no memory of their own
  EXPECT_EQ(key_parts(params).all_rows(params.batch), 2 * 1024 * 16 * 8);
  params.batch = 0;
  EXPECT_LT(key_parts(params).few, 0);
  params.batch = 2;
  params.key_offsets = queries;  // as many keys as queries
  EXPECT_LT(key_parts(params).few, 0);
}

TEST(AttentionHopperPlan, TakesNothingWhereThereAreNoKernels) {
  EXPECT_FALSE(hopper_takes_backward(call(128, 512, 512), kA100));
  EXPECT_FALSE(hopper_takes_forward(call(128, 512, 512), kA100));
  EXPECT_FALSE(hopper_takes_forward(call(128, 512, 512), kRtx));
}

TEST(AttentionHopperPlan, ASectionOfManyHeadsFitsInItsType) {
  AttentionParams params = call(8, 512, 1);
  params.heads = 2048;
  params.kv_heads = 1;
  params.window_right = 0;
  EXPECT_GT(hopper_plan(params).query_section, 0);
}

#ifdef FUSED_NORM_WITH_HOPPER
TEST(AttentionHopperPlan, MakesGradientsOfWholeMasks) {
  DeviceProperties chip = kH200;
  chip.capability = 90;
  const auto makes = [&](int dim, auto change) {
    float place = 0;
    AttentionBackwardParams params{};
    params.forward = call(dim, 300, 331);
    AttentionMask& mask = params.forward.mask;
    mask = {&place, false, DType::kBFloat16, 0, 300 * 331, 331, 1};
    params.dmask = &place;
    const int shape[] = {1, 16, 300, 331};
    std::copy(shape, shape + 4, params.mask_shape);
    change(params);
    return hopper_makes_mask_gradient(params, chip);
  };
  const auto nothing = [](AttentionBackwardParams&) {};
  for (int dim : {8, 64, 72, 96, 128}) EXPECT_TRUE(makes(dim, nothing)) << dim;
  for (int dim : {136, 192, 256}) EXPECT_FALSE(makes(dim, nothing)) << dim;
  using Params = AttentionBackwardParams;
  EXPECT_TRUE(makes(64, [](Params& p) { p.mask_shape[0] = 2, p.mask_shape[1] = 1; }));
  EXPECT_FALSE(makes(64, [](Params& p) { p.mask_shape[2] = 1; }));
  EXPECT_FALSE(makes(64, [](Params& p) { p.mask_shape[3] = 1; }));
  EXPECT_FALSE(makes(64, [](Params& p) { p.dmask = nullptr; }));
  EXPECT_FALSE(makes(64, [](Params& p) { p.forward.batch = 0; }));
  EXPECT_FALSE(makes(64, [](Params& p) { p.forward.mask.dtype = DType::kFloat32; }));
  EXPECT_FALSE(makes(64, [](Params& p) { p.forward.dropout_threshold = 1; }));
}

TEST(AttentionHopperPlan, TakesHeadsOfWholePacks) {
  DeviceProperties chip = kH200;
  chip.capability = 90;
  AttentionParams params = call(128, 512, 512);
  EXPECT_TRUE(hopper_takes_forward(params, chip));
  EXPECT_TRUE(hopper_takes_backward(params, chip));
  params.window_right = 0;
  EXPECT_TRUE(hopper_takes_backward(params, chip));
  params.softcap = 30;
  EXPECT_TRUE(hopper_takes_backward(params, chip));
  EXPECT_TRUE(hopper_plan(params).general);
  params.mask.data = &params;
  EXPECT_TRUE(hopper_takes_forward(params, chip));
  params.mask.row_stride = 512;
  params.mask.dtype = DType::kFloat32;
  EXPECT_FALSE(hopper_takes_backward(params, chip));
  params.mask.dtype = params.dtype;
  EXPECT_TRUE(hopper_takes_backward(params, chip));
  params.head_dim = 200;
  EXPECT_FALSE(hopper_takes_backward(params, chip));
  params.mask = {};
  for (int dim : {4, 100, 264}) EXPECT_FALSE(hopper_takes_forward(call(dim, 512, 512), chip));
  params.dtype = DType::kFloat32;
  EXPECT_FALSE(hopper_takes_forward(params, chip));
}

TEST(AttentionHopperPlan, DropsUpTo128Columns) {
  DeviceProperties chip = kH200;
  chip.capability = 90;
  const int of_tile[][2] = {{8, 64}, {64, 64}, {72, 128}, {96, 128}, {128, 128}};
  for (auto [columns, dim] : of_tile) {
    AttentionParams params = call(columns, 512, 512);
    params.dropout_threshold = 1;
    EXPECT_TRUE(hopper_takes_forward(params, chip)) << columns;
    EXPECT_TRUE(hopper_takes_backward(params, chip)) << columns;
    EXPECT_EQ(hopper_plan(params).dim, dim) << columns;
    EXPECT_TRUE(hopper_plan(params).general);
    params.mask.data = &params;  // of keys
    EXPECT_TRUE(hopper_takes_forward(params, chip)) << columns;
    params.mask.row_stride = 512;
    params.mask.dtype = params.dtype;
    EXPECT_FALSE(hopper_takes_forward(params, chip)) << columns;
    EXPECT_TRUE(hopper_takes_backward(params, chip)) << columns;
  }
  AttentionParams unlike = call(64, 512, 512);
  unlike.dropout_threshold = 1;
  unlike.value_dim = 72;
  EXPECT_EQ(hopper_plan(unlike).dim, 128);
  unlike.value_dim = 136;
  EXPECT_FALSE(hopper_takes_forward(unlike, chip));
  for (int columns : {136, 192, 256}) {
    AttentionParams params = call(columns, 512, 512);
    params.dropout_threshold = 1;
    EXPECT_FALSE(hopper_takes_forward(params, chip)) << columns;
    EXPECT_FALSE(hopper_takes_backward(params, chip)) << columns;
  }
}
#endif

// Padding costs no other kernels than plain scores: a mask that is the same for every query, and
// for all query heads of a head of keys.
TEST(AttentionHopperPlan, MasksOfKeysAreLikePlainScores) {
  AttentionParams params = call(128, 512, 1000);
  EXPECT_FALSE(attention_masks_keys(params));
  params.mask = {.data = &params, .dtype = DType::kFloat32, .batch_stride = 1000, .key_stride = 1};
  EXPECT_TRUE(attention_masks_keys(params));
  EXPECT_TRUE(hopper_fuses(params));
  EXPECT_FALSE(hopper_plan(params).general);
  const HopperScratch scratch = hopper_scratch(params, false);
  EXPECT_GE(scratch.all - scratch.mask_map, 2 * 2 * 4u * ((1000 + 511) / 512));
  params.softcap = 30;
  EXPECT_TRUE(hopper_plan(params).general);
  params.softcap = 0;
  params.mask.head_stride = 1000;  // each query head its own: keys with one alone can follow it
  EXPECT_FALSE(attention_masks_keys(params));
  params.kv_heads = params.heads;
  EXPECT_TRUE(attention_masks_keys(params));
  params.mask.row_stride = 1000;
  EXPECT_FALSE(attention_masks_keys(params));
  EXPECT_TRUE(hopper_plan(params).general);
}

// Of a mask that all heads share the kernels know which tiles it hides, and so take the longest
// first; one for all sequences has one map.
TEST(AttentionHopperPlan, MasksThatHeadsShareHaveAMap) {
  AttentionParams params = call(128, 512, 1000);
  EXPECT_FALSE(attention_maps_mask(params));
  params.mask = {.data = &params, .boolean = true, .row_stride = 1000, .key_stride = 1};
  EXPECT_TRUE(attention_maps_mask(params));
  EXPECT_FALSE(attention_masks_keys(params));
  EXPECT_TRUE(hopper_plan(params).uneven);
  EXPECT_EQ(mask_map_size(params).sequences, 1);
  EXPECT_EQ(mask_map_size(params).blocks, 512 / kQueriesOfBit);
  EXPECT_GE(32 * kKeysOfBit * (mask_map_size(params).words - 1), 1000);
  params.mask.batch_stride = 512000;
  EXPECT_EQ(mask_map_size(params).sequences, params.batch);
  params.mask.head_stride = 512000;
  EXPECT_FALSE(attention_maps_mask(params));
  params.mask.row_stride = 0;  // of keys, and of each head
  params.kv_heads = params.heads;
  EXPECT_EQ(mask_map_size(params).blocks, 1);
  EXPECT_EQ(mask_map_size(params).heads, params.heads);
}

// One mask for all sequences: those of a head come together, and all in one section.
TEST(AttentionHopperPlan, SequencesThatShareAMaskFollowEachOther) {
  AttentionParams params = call(128, 512, 512);
  params.mask.data = &params;
  params.mask.head_stride = 512 * 512;
  params.mask.row_stride = 512;
  EXPECT_TRUE(hopper_plan(params).batch_first);
  params.batch = 7;
  EXPECT_EQ(hopper_plan(params).forward_section, 7);
  params.mask.batch_stride = 512 * 512;
  EXPECT_FALSE(hopper_plan(params).batch_first);
  EXPECT_FALSE(hopper_plan(call(128, 512, 512)).batch_first);
}

}  // namespace
}  // namespace fused_norm
