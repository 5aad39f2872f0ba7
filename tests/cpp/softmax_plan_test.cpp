// Plans are data: these tests hold softmax's to what the kernels take for granted, on chips of
// several sizes.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "chips.h"
#include "core/softmax/plan.h"

namespace fused_norm {
namespace {

struct Dtypes {
  DType x, y;
};
const std::vector<Dtypes> kDtypes = {{DType::kBFloat16, DType::kBFloat16},
                                     {DType::kFloat16, DType::kFloat32},
                                     {DType::kFloat32, DType::kFloat32},
                                     {DType::kFloat64, DType::kFloat64}};
const std::vector<int> kCols = {1,      2,      7,      8,      9,      33,     255,     256,
                                257,    511,    512,    513,    777,    1023,   1024,    1025,
                                2048,   2049,   8192,   16384,  16385,  32768,  32769,   65537,
                                131072, 131073, 200000, 262144, 262145, 524289, 1000003, 1 << 30};
const std::vector<int64_t> kRows = {1, 7, 512, 4097, 1 << 20, int64_t{1} << 33};
const std::vector<SoftmaxPass> kPasses = {SoftmaxPass::kForward, SoftmaxPass::kMaskedForward,
                                          SoftmaxPass::kBackward, SoftmaxPass::kLogBackward};
const std::vector<SoftmaxTier> kTiers = {SoftmaxTier::kAuto, SoftmaxTier::kWarp,
                                         SoftmaxTier::kBlock, SoftmaxTier::kUncached};

bool is_lane_count(int threads) {
  return threads == 1 || threads == 2 || threads == 4 || threads == 8 || threads == 16 ||
         threads % 32 == 0;
}

// Every tier that holds the row, in every pass.
template <typename Check>
void for_all(Check check) {
  for (const DeviceProperties& chip : kChips) {
    for (const Dtypes& dtypes : kDtypes) {
      for (int cols : kCols) {
        for (SoftmaxPass pass : kPasses) {
          for (SoftmaxTier tier : kTiers) {
            if (!softmax_tier_holds(tier, pass, cols, dtypes.x, dtypes.y, chip)) continue;
            SCOPED_TRACE(testing::Message() << cols << " columns, pass " << static_cast<int>(pass)
                                            << ", tier " << static_cast<int>(tier));
            check(chip, dtypes, cols, pass, tier);
          }
        }
      }
    }
  }
}

// Rows in tiles, by persistent blocks.
void check_flat(const SoftmaxPlan& plan, const DeviceProperties& chip, Dtypes dtypes, int64_t rows,
                int cols) {
  const FlatRows& flat = plan.flat;
  EXPECT_GT(chip.max_cluster_blocks, 1);  // there are bulk copies
  EXPECT_TRUE(dtypes.x == dtypes.y && size_of(dtypes.x) == 2);
  EXPECT_NE(plan.pass, SoftmaxPass::kMaskedForward);
  ASSERT_GE(flat.row_class, 0);
  ASSERT_LT(flat.row_class, kSoftmaxFlatClasses);
  // Every lane has all of its columns but the last.
  EXPECT_EQ((cols + 31) / 32, kSoftmaxFlatUnits[flat.row_class]);
  EXPECT_EQ(plan.packs, kSoftmaxFlatUnits[flat.row_class]);
  EXPECT_EQ(plan.tier, cols <= 1024 ? SoftmaxTier::kWarp : SoftmaxTier::kBlock);
  EXPECT_EQ(plan.rows_per_block, kFlatThreads / 32 * softmax_flat_rows(plan.packs));
  EXPECT_EQ(flat.rows % plan.rows_per_block, 0);
  EXPECT_EQ(int64_t{flat.rows} * cols * 2 % 16, 0);
  EXPECT_GE(flat.tile_bytes, flat.rows * cols * 2);
  EXPECT_EQ(flat.tile_bytes % 16, 0);
  EXPECT_EQ(plan.shared_bytes, kFlatSlots * flat.tile_bytes * (is_backward(plan.pass) ? 2 : 1));
  // All resident at once, and none without a tile.
  const int a_multiprocessor = (plan.blocks + chip.sm_count - 1) / chip.sm_count;
  EXPECT_LE(a_multiprocessor, 3);
  EXPECT_LE(a_multiprocessor * (plan.shared_bytes + 2048), chip.shared_bytes_per_block + 1024);
  EXPECT_LE(int64_t{plan.blocks - 1} * flat.rows, rows - 1);
}

TEST(SoftmaxPlan, HoldsTheRowAndFitsTheChip) {
  for_all([](const DeviceProperties& chip, Dtypes dtypes, int cols, SoftmaxPass pass,
             SoftmaxTier tier) {
    for (int64_t rows : kRows) {
      if (rows > (int64_t{1} << 40) / cols) continue;  // more than any memory holds
      if (tier != SoftmaxTier::kAuto && rows >= 1 << 28) continue;
      const SoftmaxPlan plan = plan_softmax(tier, pass, rows, cols, dtypes.x, dtypes.y, chip);
      if (tier != SoftmaxTier::kAuto) {
        EXPECT_EQ(plan.tier, tier);
      }
      EXPECT_TRUE(is_lane_count(plan.threads_per_row));
      if (plan.place == RowPlace::kFlat) {
        EXPECT_EQ(tier, SoftmaxTier::kAuto);
        check_flat(plan, chip, dtypes, rows, cols);
        continue;
      }
      const int threads = plan.threads_per_row * plan.rows_per_block;
      EXPECT_LE(threads, plan.tier == SoftmaxTier::kWarp ? 128 : 512);
      EXPECT_EQ(threads % 32, 0);
      EXPECT_TRUE(plan.tier != SoftmaxTier::kWarp || plan.threads_per_row <= 32);
      EXPECT_TRUE(plan.tier != SoftmaxTier::kBlock || plan.rows_per_block == 1);
      EXPECT_TRUE(plan.cluster_blocks == 1 || plan.rows_per_block == 1);
      const bool ring = plan.place == RowPlace::kRing;
      EXPECT_LE(plan.shared_bytes + 1024, chip.shared_bytes_per_block);
      EXPECT_LE(plan.cluster_blocks, chip.max_cluster_blocks);
      EXPECT_TRUE(!plan.overlaps || chip.max_cluster_blocks > 1);
      EXPECT_EQ(plan.blocks % plan.cluster_blocks, 0);
      if (ring) {  // persistent
        // All are resident: by multiprocessors, and by threads and shared memory of those.
        const int filled = chip.cluster_multiprocessors(plan.cluster_blocks);
        const int64_t resident = (plan.blocks + filled - 1) / filled;
        EXPECT_LE(resident * plan.threads_per_row, kMaxSpanWarps * 32);
        EXPECT_LE(resident * (plan.shared_bytes + 2048), chip.shared_bytes_per_block + 1024);
        EXPECT_LE(plan.blocks / plan.cluster_blocks, rows);
        const int warps = plan.threads_per_row / 32, tensors = is_backward(pass) ? 2 : 1;
        const int piece = span_piece_packs(tensors) * 32 * plan.pack;
        EXPECT_TRUE(warps == 2 || warps == 4 || warps == 8 || warps == kMaxSpanWarps);
        EXPECT_TRUE(pass != SoftmaxPass::kMaskedForward);
        EXPECT_EQ(plan.slice % (32 * plan.pack), 0);
        EXPECT_EQ(plan.pieces, (plan.slice + piece - 1) / piece);
        EXPECT_GE(int64_t{plan.slice} * warps * plan.cluster_blocks, cols);
        EXPECT_GE(plan.slots, plan.pieces);  // a row is read twice
        EXPECT_EQ(plan.shared_bytes, warps * span_ring_bytes(tensors, plan.pieces, plan.slots));
        continue;
      }
      // Blocks do not loop over rows, so the grid must reach the last one.
      EXPECT_GE(int64_t{plan.blocks} / plan.cluster_blocks * plan.rows_per_block, rows);

      const int64_t in_flight = int64_t{plan.threads_per_row} * plan.packs * plan.pack;
      EXPECT_GE(int64_t{plan.slice} * plan.cluster_blocks, cols);
      if (plan.tier == SoftmaxTier::kUncached) {
        // Whole warps deal out single columns, and each block but the last has whole turns.
        EXPECT_EQ(plan.pack, 1);
        EXPECT_EQ(plan.threads_per_row % 32, 0);
        EXPECT_TRUE(plan.cluster_blocks == 1 || plan.slice % in_flight == 0);
      } else {
        EXPECT_GE(plan.cluster_blocks * in_flight, cols);
        const bool masked = pass == SoftmaxPass::kMaskedForward;
        EXPECT_TRUE(plan.packs == 1 || plan.packs == 2 || plan.packs == 4 ||
                    (plan.packs == 8 && plan.tier == SoftmaxTier::kBlock && !masked));
      }
    }
  });
}

TEST(SoftmaxPlan, RowsLongerThanAPowerOfTwoGoInTiles) {
  const DType bf16 = DType::kBFloat16;
  auto goes = [&](int cols, SoftmaxTier tier = SoftmaxTier::kAuto,
                  const DeviceProperties& chip = kH200) {
    return plan_softmax(tier, SoftmaxPass::kBackward, 4096, cols, bf16, bf16, chip).place ==
           RowPlace::kFlat;
  };
  for (int cols : {65, 95, 129, 257, 287, 513, 1025, 1032, 1056}) EXPECT_TRUE(goes(cols)) << cols;
  for (int cols : {33, 64, 72, 97, 127, 136, 264, 289, 511, 520, 777, 1024, 1057, 2049})
    EXPECT_FALSE(goes(cols)) << cols;
  EXPECT_FALSE(goes(65, SoftmaxTier::kWarp));
  EXPECT_FALSE(goes(65, SoftmaxTier::kAuto, kA100));  // no bulk copies
  EXPECT_TRUE(goes(513, SoftmaxTier::kAuto, kRtx));
  EXPECT_FALSE(goes(1056, SoftmaxTier::kAuto, kRtx));  // no room
}

TEST(SoftmaxPlan, RowsDoNotShapeTheReduction) {
  for_all([](const DeviceProperties& chip, Dtypes dtypes, int cols, SoftmaxPass pass,
             SoftmaxTier tier) {
    const SoftmaxPlan one = plan_softmax(tier, pass, 1, cols, dtypes.x, dtypes.y, chip);
    for (int64_t rows : kRows) {
      const SoftmaxPlan plan = plan_softmax(tier, pass, rows, cols, dtypes.x, dtypes.y, chip);
      EXPECT_EQ(plan.tier, one.tier);
      EXPECT_EQ(plan.place, one.place);
      EXPECT_EQ(plan.packs, one.packs);
      if (plan.place == RowPlace::kRing) {  // whose warps number the same
        EXPECT_EQ(plan.threads_per_row * plan.cluster_blocks,
                  one.threads_per_row * one.cluster_blocks);
      } else {
        EXPECT_EQ(plan.threads_per_row, one.threads_per_row);
        EXPECT_EQ(plan.cluster_blocks, one.cluster_blocks);
      }
      EXPECT_EQ(plan.slice, one.slice);
    }
  });
}

TEST(SoftmaxPlan, LogSoftmaxBackwardOfFp32TakesClustersBeforeEightPacks) {
  auto plan = [](int cols, bool log, DType dtype, const DeviceProperties& chip) {
    const SoftmaxPass pass = log ? SoftmaxPass::kLogBackward : SoftmaxPass::kBackward;
    return plan_softmax(SoftmaxTier::kAuto, pass, 4096, cols, dtype, dtype, chip);
  };
  for (int cols : {8448, 12288, 16384}) {
    EXPECT_GT(plan(cols, true, DType::kFloat32, kH200).cluster_blocks, 1);
    EXPECT_EQ(plan(cols, true, DType::kFloat32, kH200).packs, 4);
    EXPECT_EQ(plan(cols, false, DType::kFloat32, kH200).cluster_blocks, 1);
    EXPECT_EQ(plan(cols, true, DType::kFloat32, kA100).cluster_blocks, 1);
  }
  EXPECT_EQ(plan(8192, true, DType::kFloat32, kH200).cluster_blocks, 1);
  EXPECT_EQ(plan(20000, true, DType::kBFloat16, kH200).cluster_blocks, 1);
}

TEST(SoftmaxPlan, ClustersWithARingHaveRoomForTheNextRow) {
  auto plan = [](SoftmaxPass pass, int cols) {
    constexpr DType kType = DType::kBFloat16;
    return plan_softmax(SoftmaxTier::kAuto, pass, 4096, cols, kType, kType, kH200);
  };
  for (SoftmaxPass pass : {SoftmaxPass::kForward, SoftmaxPass::kBackward}) {
    const int most = is_backward(pass) ? 458752 : 917504;  // of the longest rows
    for (int cols = 57352; cols <= most / 2; cols += 8 * 1021) {
      const SoftmaxPlan of = plan(pass, cols);
      EXPECT_EQ(of.place, RowPlace::kRing);
      EXPECT_GT(of.cluster_blocks, 1);
      EXPECT_GT(of.slots, of.pieces) << cols;
    }
    EXPECT_EQ(plan(pass, 49152).cluster_blocks, 1);
    EXPECT_EQ(plan(pass, most).cluster_blocks, 8);
  }
}

TEST(SoftmaxPlan, FewRowsOfARingHaveAClusterEach) {
  for (SoftmaxPass pass : {SoftmaxPass::kForward, SoftmaxPass::kBackward}) {
    for (int cols : {32776, 50304, 65536, 100352, 200000}) {
      auto plan = [&](int64_t rows) {
        constexpr DType kType = DType::kBFloat16;
        return plan_softmax(SoftmaxTier::kAuto, pass, rows, cols, kType, kType, kH200);
      };
      const SoftmaxPlan many = plan(1 << 20);
      const int few = kH200.sm_count / 2 / many.cluster_blocks;
      EXPECT_EQ(plan(few).cluster_blocks, 8) << cols;
      EXPECT_EQ(plan(few).blocks, 8 * few) << cols;
      EXPECT_EQ(plan(few).slots, plan(few).pieces) << cols;
      EXPECT_EQ(plan(few + 1).cluster_blocks, many.cluster_blocks) << cols;
    }
  }
}

TEST(SoftmaxPlan, EveryTierServesTheRowsItIsFor) {
  const DType bf16 = DType::kBFloat16, f64 = DType::kFloat64;
  auto tier_of = [](int cols, DType dtype, const DeviceProperties& chip) {
    return plan_softmax(SoftmaxTier::kAuto, SoftmaxPass::kForward, 4096, cols, dtype, dtype, chip)
        .tier;
  };
  for (const DeviceProperties& chip : kChips) {
    EXPECT_EQ(tier_of(1, bf16, chip), SoftmaxTier::kWarp);
    EXPECT_EQ(tier_of(1024, bf16, chip), SoftmaxTier::kWarp);
    EXPECT_EQ(tier_of(1025, bf16, chip), SoftmaxTier::kBlock);
    EXPECT_EQ(tier_of(32768, bf16, chip), SoftmaxTier::kBlock);
    EXPECT_EQ(tier_of(1 << 20, bf16, chip), SoftmaxTier::kUncached);
    EXPECT_EQ(tier_of(64, f64, chip), SoftmaxTier::kUncached);
    EXPECT_FALSE(
        softmax_tier_holds(SoftmaxTier::kWarp, SoftmaxPass::kForward, 1025, bf16, bf16, chip));
    EXPECT_FALSE(
        softmax_tier_holds(SoftmaxTier::kBlock, SoftmaxPass::kForward, 64, f64, f64, chip));
  }
  EXPECT_EQ(tier_of(917505, bf16, kH200), SoftmaxTier::kUncached);
  auto holds_masked = [&](int cols, const DeviceProperties& chip) {
    return softmax_tier_holds(SoftmaxTier::kBlock, SoftmaxPass::kMaskedForward, cols, bf16, bf16,
                              chip);
  };
  EXPECT_TRUE(holds_masked(131072, kH200));
  EXPECT_FALSE(holds_masked(131073, kH200));
  EXPECT_TRUE(holds_masked(16384, kA100));
  EXPECT_FALSE(holds_masked(16385, kA100));
  auto place_of = [&](SoftmaxPass pass, int cols, const DeviceProperties& chip) {
    return plan_softmax(SoftmaxTier::kAuto, pass, 4096, cols, bf16, bf16, chip).place;
  };
  for (SoftmaxPass pass : kPasses) {
    const bool masked = pass == SoftmaxPass::kMaskedForward;
    EXPECT_EQ(place_of(pass, 32768, kH200), RowPlace::kRegisters);
    EXPECT_EQ(place_of(pass, 50257, kH200), RowPlace::kRegisters);  // not whole packs
    for (int cols : {32776, 50264, 151936, 262144, 458752})
      EXPECT_EQ(place_of(pass, cols, kH200) == RowPlace::kRing, !masked) << cols;
    EXPECT_NE(place_of(pass, 32776, kA100), RowPlace::kRing);  // without bulk copies
  }
  // Rows of part of a pack lie in registers, as long as a cluster's hold them.
  for (SoftmaxPass pass : {SoftmaxPass::kForward, SoftmaxPass::kBackward}) {
    EXPECT_EQ(place_of(pass, 262143, kH200), RowPlace::kRegisters);
    EXPECT_EQ(place_of(pass, 262145, kH200), RowPlace::kRing);
  }
  EXPECT_EQ(tier_of(32769, bf16, kA100), SoftmaxTier::kUncached);
}

TEST(SoftmaxColumnsPlan, CoversTheTensorAndFitsTheChip) {
  for (const DeviceProperties& chip : kChips) {
    for (const Dtypes& dtypes : kDtypes) {
      for (bool backward : {false, true}) {
        for (bool vectorized : {false, true}) {
          for (int cols : kCols) {
            const int pack = vectorized ? pack_elements(dtypes.x, dtypes.y) : 1;
            const int64_t outer = 3, inner = 40 * pack;
            const SoftmaxColumnsPlan plan = plan_softmax_columns(backward, vectorized, outer, cols,
                                                                 inner, dtypes.x, dtypes.y, chip);
            EXPECT_EQ(plan.pack, pack);
            EXPECT_EQ(plan.lanes * plan.splits, kColumnThreads);
            EXPECT_EQ(plan.splits & (plan.splits - 1), 0);  // they are combined as a tree
            EXPECT_GE(int64_t{plan.blocks} * plan.lanes * plan.pack, outer * inner);
            EXPECT_LE(plan.shared_bytes + 16 * kKilobyte, chip.shared_bytes_per_block);
          }
        }
      }
    }
  }
}

TEST(SoftmaxColumnsPlan, OnlyTheColumnsShapeTheReduction) {
  for (int cols : kCols) {
    for (bool backward : {false, true}) {
      const SoftmaxColumnsPlan one = plan_softmax_columns(
          backward, true, 1, cols, 64, DType::kBFloat16, DType::kBFloat16, kH200);
      const SoftmaxColumnsPlan other = plan_softmax_columns(
          backward, false, 77, cols, 999, DType::kBFloat16, DType::kBFloat16, kH200);
      EXPECT_EQ(one.splits, other.splits);
    }
  }
}

TEST(Divider, DividesByMultiplication) {
  for (uint32_t divisor : {1u, 2u, 3u, 7u, 12u, 1000u, 65535u, 65536u, 1000003u, 0x7fffffffu}) {
    const Divider by = make_divider(divisor);
    for (uint32_t n : {0u, 1u, 2u, divisor - 1, divisor, divisor + 1, 123456789u, 0x7fffffffu}) {
      const uint32_t high = static_cast<uint32_t>(uint64_t{n} * by.multiplier >> 32);
      EXPECT_EQ((high + n) >> by.shift, n / divisor) << n << " / " << divisor;
    }
  }
}

}  // namespace
}  // namespace fused_norm
