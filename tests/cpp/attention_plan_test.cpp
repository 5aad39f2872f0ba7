// Which tier a call of attention takes, and what the kernels take for granted of their tiles.
#include <gtest/gtest.h>

#include <cstdint>

#include "chips.h"
#include "core/attention/plan.h"

namespace fused_norm {
namespace {

AttentionTensor tensor(uintptr_t address = 1 << 20, int64_t row_stride = 1024) {
  return {reinterpret_cast<void*>(address), row_stride * 4096, 128, row_stride};
}

AttentionParams call(DType dtype, int head_dim, int value_dim) {
  AttentionParams params{};
  params.dtype = dtype;
  params.batch = 2;
  params.heads = params.kv_heads = 4;
  params.queries = params.keys = 128;
  params.head_dim = head_dim;
  params.value_dim = value_dim;
  params.scale = 0.125;
  params.window_left = params.window_right = -1;
  params.query = params.key = params.value = params.out = tensor();
  return params;
}

AttentionTier chosen(const AttentionParams& params, const DeviceProperties& chip,
                     AttentionTier wanted = AttentionTier::kAuto) {
  return attention_tier(params, chip, wanted);
}

TEST(AttentionTier, TensorCoresTake16BitHeadsUpTo256) {
  for (const DeviceProperties& chip : kChips) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (int dim = 8; dim <= kMaxPortableHeadDim; dim += 8) {
        EXPECT_NE(chosen(call(dtype, dim, 64), chip), AttentionTier::kPlain) << dim;
        EXPECT_NE(chosen(call(dtype, 64, dim), chip), AttentionTier::kPlain) << dim;
        EXPECT_EQ(chosen(call(dtype, dim, dim), chip, AttentionTier::kPortable),
                  AttentionTier::kPortable);
      }
      EXPECT_EQ(chosen(call(dtype, 264, 64), chip), AttentionTier::kPlain);
      EXPECT_EQ(chosen(call(dtype, 64, 264), chip), AttentionTier::kPlain);
      EXPECT_EQ(chosen(call(dtype, 63, 64), chip), AttentionTier::kPlain);
      EXPECT_EQ(chosen(call(dtype, 64, 65), chip), AttentionTier::kPlain);
    }
    EXPECT_EQ(chosen(call(DType::kFloat32, 64, 64), chip), AttentionTier::kPlain);
    EXPECT_EQ(chosen(call(DType::kFloat64, 64, 64), chip), AttentionTier::kPlain);
  }
}

// Query (b, h) of heads that share keys becomes query h % group of head h / group, in the same
// place.
TEST(AttentionTier, SingleQueriesOfAGroupAreOneHeads) {
  AttentionParams params = call(DType::kBFloat16, 64, 64);
  params.queries = 1;
  params.heads = 12;
  params.mask = {&params, false, DType::kBFloat16, 1200, 100, 100, 1};
  params.window_right = 0;  // causal: one query sees all keys
  const AttentionParams one = with_group_as_queries(params);
  EXPECT_EQ(one.heads, 4);
  EXPECT_EQ(one.queries, 3);
  EXPECT_EQ(attention_rows(one), attention_rows(params));
  for (int head = 0; head < 12; ++head) {
    const auto at = [&](int64_t head_stride, int64_t row_stride) {
      return head / 3 * head_stride + head % 3 * row_stride;
    };
    EXPECT_EQ(at(one.query.head_stride, one.query.row_stride), head * params.query.head_stride);
    EXPECT_EQ(at(one.out.head_stride, one.out.row_stride), head * params.out.head_stride);
    EXPECT_EQ(at(one.mask.head_stride, one.mask.row_stride), head * params.mask.head_stride);
  }
  EXPECT_EQ(one.window_right, -1);
  EXPECT_EQ(one.sink.rows, 3);  // a sink for each head, as before
  params.top_left = true;       // it sees the first key alone
  EXPECT_EQ(with_group_as_queries(params).queries, 1);
  params.window_right = -1;
  params.queries = 2;
  EXPECT_EQ(with_group_as_queries(params).heads, 12);
}

TEST(AttentionTier, AForcedTierThatDoesNotTakeTheCallIsAuto) {
  const AttentionParams params = call(DType::kFloat32, 64, 64);
  EXPECT_EQ(chosen(params, kA100, AttentionTier::kPortable), AttentionTier::kAuto);
  EXPECT_EQ(chosen(params, kA100, AttentionTier::kPlain), AttentionTier::kPlain);
  EXPECT_EQ(chosen(call(DType::kBFloat16, 64, 64), kA100, AttentionTier::kPlain),
            AttentionTier::kPlain);
}

TEST(AttentionTier, TensorCoresNeedAlignedRows) {
  for (AttentionTensor AttentionParams::*member :
       {&AttentionParams::query, &AttentionParams::key, &AttentionParams::value,
        &AttentionParams::out}) {
    AttentionParams params = call(DType::kBFloat16, 64, 64);
    params.*member = tensor((1 << 20) + 8);
    EXPECT_EQ(chosen(params, kA100), AttentionTier::kPlain);
    params.*member = tensor(1 << 20, 1028);
    EXPECT_EQ(chosen(params, kA100), AttentionTier::kPlain);
  }
}

TEST(AttentionScores, OptionsOfScoresMakeThemGeneral) {
  const AttentionParams params = call(DType::kBFloat16, 64, 64);
  EXPECT_TRUE(attention_scores_are_plain(params));
  AttentionParams changed = params;
  changed.window_right = 0;
  changed.sink.data = &changed;
  EXPECT_TRUE(attention_scores_are_plain(changed));
  for (double scale : {0., -1., 1e-35}) {
    changed = params;
    changed.scale = scale;
    EXPECT_FALSE(attention_scores_are_plain(changed)) << scale;
  }
  changed = params;
  changed.softcap = 30;
  EXPECT_FALSE(attention_scores_are_plain(changed));
  changed = params;
  changed.mask.data = &changed;
  EXPECT_FALSE(attention_scores_are_plain(changed));
  changed = params;
  changed.dropout_threshold = 1;
  EXPECT_FALSE(attention_scores_are_plain(changed));
  changed = params;
  const float slope = 1;
  changed.alibi_slopes = &slope;
  EXPECT_FALSE(attention_scores_are_plain(changed));
}

// Calls use(kernel, general, tiles) for all kernels of the portable tier.
template <typename Use>
void for_portable_tiles(Use use) {
  using Kernel = PortableKernel;
  for (Kernel kernel :
       {Kernel::kForward, Kernel::kQueryGradient, Kernel::kKeyGradient, Kernel::kMaskGradient}) {
    for (bool general : {false, true}) {
      if (kernel == Kernel::kMaskGradient && !general) continue;
      for (int i = 0; i < kPortableDims; ++i)
        use(kernel, general, portable_tiles(kernel, general, i));
    }
  }
}

TEST(AttentionTiles, FitEveryChip) {
  for (const DeviceProperties& chip : kChips) {
    for_portable_tiles([&](PortableKernel kernel, bool, const AttentionTiles& tiles) {
      EXPECT_LE(portable_shared_bytes(kernel, tiles), chip.shared_bytes_per_block) << tiles.dim;
    });
  }
}

// What kernels take for granted: a block copies whole rows at once, and the sums of a mask's tile
// fit in its shared memory.
TEST(AttentionTiles, HoldWhatKernelsTakeForGranted) {
  for_portable_tiles([](PortableKernel kernel, bool general, const AttentionTiles& tiles) {
    const int rows_at_once = tiles.threads() / (tiles.dim / 8);
    EXPECT_EQ(tiles.own() % rows_at_once, 0);
    EXPECT_EQ(tiles.others % rows_at_once, 0);
    EXPECT_EQ(tiles.others % 16, 0);
    EXPECT_LE(tiles.others, general ? 64 : 128);
    EXPECT_LE(tiles.others, tiles.threads());
    EXPECT_TRUE(tiles.stages == 1 || tiles.stages == 2);
    // A thread for each word of a query's statistics.
    if (kernel == PortableKernel::kKeyGradient) {
      EXPECT_LE(2 * tiles.others, tiles.threads());
    }
    if (kernel != PortableKernel::kMaskGradient) return;
    EXPECT_LE(tiles.own() * (tiles.others + 1) * 4, portable_shared_bytes(kernel, tiles));
  });
  for (int dim : {1, 64, 65, 128, 129, 256}) {
    for (int index : {attention_tiles_index(dim, 1), attention_tiles_index(1, dim)})
      EXPECT_GE(portable_tiles(PortableKernel::kForward, false, index).dim, dim);
  }
}

AttentionParams one_tile(int batch, int heads, int rows = 49, int dim = 32) {
  AttentionParams params = call(DType::kBFloat16, dim, dim);
  params.batch = batch;
  params.heads = params.kv_heads = heads;
  params.queries = params.keys = rows;
  params.mask = {&params, false, DType::kBFloat16, 0, rows * rows, rows, 1};
  return params;
}

TEST(AttentionOneTile, AreShortDenseAndPlainButForTheMask) {
  const AttentionParams params = one_tile(100, 3);
  EXPECT_TRUE(attention_is_one_tile(params));
  EXPECT_TRUE(one_tile_takes_backward(params));
  for (int rows : {1, 64}) {
    for (int dim : {8, 32, 64}) EXPECT_TRUE(attention_is_one_tile(one_tile(100, 3, rows, dim)));
  }
  EXPECT_FALSE(attention_is_one_tile(one_tile(100, 3, 65)));
  EXPECT_FALSE(attention_is_one_tile(one_tile(100, 3, 49, 72)));
  EXPECT_FALSE(attention_is_one_tile(one_tile(0, 3)));
  const auto changed = [&](auto change) {
    AttentionParams other = params;
    change(other);
    return attention_is_one_tile(other) || one_tile_takes_backward(other);
  };
  EXPECT_FALSE(changed([](AttentionParams& p) { p.keys = 0; }));
  EXPECT_FALSE(changed([](AttentionParams& p) { p.keys = 65; }));
  EXPECT_FALSE(changed([](AttentionParams& p) { p.value_dim = 72; }));
  EXPECT_FALSE(changed([](AttentionParams& p) { p.kv_heads = 1; }));
  EXPECT_FALSE(changed([](AttentionParams& p) { p.softcap = 5; }));
  EXPECT_FALSE(changed([](AttentionParams& p) { p.scale = -1; }));
  EXPECT_FALSE(changed([](AttentionParams& p) { p.dropout_threshold = 1; }));
  EXPECT_FALSE(changed([&](AttentionParams& p) { p.sink.data = &params; }));
  EXPECT_FALSE(changed([](AttentionParams& p) { p.dtype = DType::kFloat32; }));
  static constexpr int32_t kOffsets[2] = {};
  EXPECT_FALSE(changed([](AttentionParams& p) { p.query_offsets = p.key_offsets = kOffsets; }));
  AttentionParams unmasked = params;
  unmasked.mask = {};
  EXPECT_TRUE(one_tile_takes_backward(unmasked));
  EXPECT_TRUE(attention_is_one_tile(unmasked));
  const float slope = 1;
  EXPECT_FALSE(changed([&](AttentionParams& p) { p.alibi_slopes = &slope; }));
  // Backward a mask that has a gradient of its own, a sum over queries or keys, takes other
  // kernels, whether that is wanted or not.
  for (bool boolean : {false, true}) {
    for (bool of_keys : {false, true}) {
      AttentionParams broadcast = params;
      broadcast.mask.boolean = boolean;
      (of_keys ? broadcast.mask.row_stride : broadcast.mask.key_stride) = 0;
      EXPECT_TRUE(attention_is_one_tile(broadcast));
      EXPECT_EQ(one_tile_takes_backward(broadcast), boolean);
      (of_keys ? broadcast.queries : broadcast.keys) = 1;
      EXPECT_TRUE(one_tile_takes_backward(broadcast));
    }
  }
  // As queries of one head, single queries of heads that share keys.
  AttentionParams group = params;
  group.queries = 1;
  group.heads = 12;
  EXPECT_FALSE(attention_is_one_tile(group));
  EXPECT_TRUE(attention_is_one_tile(with_group_as_queries(group)));
}

TEST(AttentionOneTile, BlocksHavePairsOfOneMask) {
  const auto share = [](int64_t batch_stride, int64_t head_stride) {
    AttentionParams params = one_tile(700, 3);
    params.mask.batch_stride = batch_stride;
    params.mask.head_stride = head_stride;
    return one_tile_share(params, 396);
  };
  EXPECT_EQ(share(0, 0).served, 2100);
  EXPECT_EQ(share(0, 0).parts, 350);  // of six pairs each
  EXPECT_EQ(share(0, 2401).served, 700);
  EXPECT_EQ(share(0, 2401).parts, 117);
  EXPECT_EQ(share(2401, 0).served, 3);
  EXPECT_EQ(share(2401, 0).parts, 1);
  EXPECT_EQ(share(7203, 2401).served, 1);
}

// Parts are of one size but the last, and none is empty.
TEST(AttentionOneTile, PartsAreAllPairsOfAMask) {
  for (int rows : {49, 130, 2000}) {
    for (int batch : {1, 2, 7, 64, 395, 396, 2048, 8192}) {
      for (int heads : {1, 3, 24}) {
        for (bool one_batch : {false, true}) {
          for (bool one_head : {false, true}) {
            AttentionBackwardParams params{one_tile(batch, heads, rows)};
            params.dmask = &params;
            params.mask_shape[0] = one_batch ? 1 : batch;
            params.mask_shape[1] = one_head ? 1 : heads;
            params.mask_shape[2] = params.mask_shape[3] = rows;
            const MaskShare share = mask_share(params);
            EXPECT_EQ(int64_t{share.batch} * share.heads * share.served, int64_t{batch} * heads);
            EXPECT_GE(share.parts * share.pairs, share.served);
            EXPECT_LT((share.parts - 1) * share.pairs, share.served);
            EXPECT_LE(share.parts, (rows > kOneTileRows ? 1 : 3) * kSharedBy);
            EXPECT_EQ(mask_sums_bytes(params, share) > 0, share.parts > 1);
            EXPECT_LE(mask_sums_bytes(params, share), size_t{kMostMaskSums});
            params.forward.batch = 0;
            EXPECT_EQ(mask_share(params).parts, 1);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fused_norm
