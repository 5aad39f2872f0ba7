// Plans are data: these tests hold them to what the kernels take for granted, on chips of several
// sizes.
#include "core/norm/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <vector>

#include "chips.h"

namespace fused_norm {
namespace {

struct Dtypes {
  DType x, y;
};
const std::vector<Dtypes> kDtypes = {{DType::kBFloat16, DType::kBFloat16},
                                     {DType::kFloat16, DType::kFloat32},
                                     {DType::kFloat32, DType::kBFloat16},
                                     {DType::kFloat32, DType::kFloat32},
                                     {DType::kFloat64, DType::kFloat64}};
const std::vector<int> kCols = {
    1,     2,     7,     8,     9,     64,     96,     192,     320,    65,    255,   256,
    257,   258,   513,   768,   1023,  1024,   1025,   2048,    2052,   3333,  4096,  4104,
    5120,  6144,  8191,  8192,  8193,  10242,  12288,  12289,   16384,  16385, 32768, 32769,
    50257, 65536, 65537, 98304, 98305, 131072, 131073, 1000003, 1 << 30};
const std::vector<int64_t> kRows = {1, 7, 512, 4097, 1 << 20, int64_t{1} << 33};

bool is_lane_count(int threads) {
  return threads == 1 || threads == 2 || threads == 4 || threads == 8 || threads == 16 ||
         threads % 32 == 0;
}

template <typename Check>
void for_all(Check check) {
  for (const DeviceProperties& chip : kChips) {
    for (const Dtypes& dtypes : kDtypes) {
      for (int cols : kCols) check(chip, dtypes, cols);
    }
  }
}

// Clusters that walk over rows: the same threads as of those with one row each.
void check_forward_ring(const NormForwardPlan& plan, const DeviceProperties& chip, Dtypes dtypes,
                        int64_t rows, bool rms) {
  const ForwardRing& ring = plan.ring;
  if (ring.slots == 0) return;
  EXPECT_EQ(plan.tier, Tier::kRegisters);
  EXPECT_GT(plan.cluster_blocks, 1);  // there are bulk copies
  EXPECT_EQ(dtypes.x, dtypes.y);
  EXPECT_LE(ring.slots, kMaxForwardSlots);
  // Persistent: all resident at once, with 80 registers a thread, and each with rows to walk over.
  const int a_chip = chip.cluster_multiprocessors(plan.cluster_blocks);
  const int a_multiprocessor = ring.blocks / a_chip;
  EXPECT_EQ(ring.blocks % a_chip, 0);
  EXPECT_GE(rows * plan.cluster_blocks, 3 * ring.blocks);
  const int params = plan.threads_per_row * params_bytes(plan.packs, !rms);
  EXPECT_EQ(ring.shared_bytes, params + ring.slots * plan.threads_per_row * plan.packs * 16);
  EXPECT_LE(a_multiprocessor * (ring.shared_bytes + 2 * kKilobyte),
            chip.shared_bytes_per_block + kKilobyte);
  EXPECT_LE(a_multiprocessor * plan.threads_per_row * 80, 65536);
  // No room for another block: that of the next kernel would move in early, and leave others empty.
  EXPECT_GT((a_multiprocessor + 1) * (ring.shared_bytes + 2 * kKilobyte),
            chip.shared_bytes_per_block + kKilobyte);
}

void check_forward_plan(const DeviceProperties& chip, Dtypes dtypes, int cols) {
  for (int64_t rows : kRows) {
    if (rows > (int64_t{1} << 40) / cols) continue;  // more than any memory holds
    SCOPED_TRACE(testing::Message() << rows << " x " << cols);
    const bool rms = rows % 2 == 1;
    const NormForwardPlan plan = plan_norm_forward(rows, cols, dtypes.x, dtypes.y, rms, chip);
    check_forward_ring(plan, chip, dtypes, rows, rms);
    const int threads = plan.threads_per_row * plan.rows_per_block;
    EXPECT_TRUE(is_lane_count(plan.threads_per_row));
    EXPECT_EQ(threads % 32, 0);
    EXPECT_LE(plan.cluster_blocks, chip.max_cluster_blocks);
    // A block, or a cluster, does not loop over rows, so the grid must reach the last one.
    EXPECT_EQ(plan.blocks % plan.cluster_blocks, 0);
    EXPECT_GE(int64_t{plan.blocks / plan.cluster_blocks} * plan.rows_per_block, rows);
    if (plan.tier == Tier::kStreaming) continue;
    for (bool adds : {false, true}) EXPECT_LE(threads, forward_threads(adds, plan.packs));
    const int64_t block_cols = int64_t{plan.threads_per_row} * plan.packs * plan.pack;
    EXPECT_GE(plan.cluster_blocks * block_cols, cols);
    EXPECT_LT((plan.cluster_blocks - 1) * block_cols, cols);  // the last block has some
    EXPECT_TRUE(plan.cluster_blocks == 1 || (plan.rows_per_block == 1 && plan.packs == kMostPacks));
    // The kernels that there are.
    EXPECT_TRUE(plan.packs == 4 ||
                (plan.threads_per_row >= 32 && (plan.packs == 2 || plan.packs == kMostPacks)));
  }
}

TEST(ForwardPlan, HoldsTheRowAndFitsTheChip) { for_all(check_forward_plan); }

TEST(ForwardPlan, RowsDoNotShapeTheReduction) {
  for_all([](const DeviceProperties& chip, Dtypes dtypes, int cols) {
    for (int form = 0; form < 4; ++form) {
      const bool rms = form % 2 != 0, lists = form / 2 != 0;
      const NormPlan one = plan_norm_forward(1, cols, dtypes.x, dtypes.y, rms, chip);
      for (int64_t rows : kRows) {
        const NormPlan plan = plan_norm_forward(rows, cols, dtypes.x, dtypes.y, rms, chip, lists);
        EXPECT_EQ(plan.tier, one.tier);
        EXPECT_EQ(plan.pack, one.pack);
        EXPECT_EQ(plan.cluster_blocks, one.cluster_blocks);
        if (plan.threads_per_row == one.threads_per_row) {
          EXPECT_EQ(plan.packs, one.packs);
        } else if (plan.threads_per_row < 32) {  // four packs of a lane are two lanes' two
          EXPECT_TRUE((!rms || lists) && dtypes.x == dtypes.y && size_of(dtypes.x) == 2);
          EXPECT_EQ(2 * plan.threads_per_row, one.threads_per_row);
          EXPECT_EQ(plan.packs, 4);
          EXPECT_EQ(cols % plan.pack, 0);
          EXPECT_LE(cols / plan.pack, 2 * one.threads_per_row);
        } else {  // four packs of a thread are two threads' two, but for a warp past the row
          EXPECT_EQ(one.packs, 2);
          EXPECT_EQ(plan.packs, 4);
          EXPECT_TRUE(rms || size_of(dtypes.x) == 2);
          EXPECT_EQ(plan.threads_per_row, (one.threads_per_row + 32) / 64 * 32);
        }
      }
    }
  });
}

TEST(ForwardPlan, HalfTheLanesTakeTwiceThePacks) {
  auto lanes = [](int64_t rows, int cols, bool rms = false, DType dtype = DType::kBFloat16,
                  bool lists = false) {
    return plan_norm_forward(rows, cols, dtype, dtype, rms, kH200, lists).threads_per_row;
  };
  EXPECT_EQ(lanes(131072, 128), 4);
  EXPECT_EQ(lanes(131072, 256), 8);
  EXPECT_EQ(lanes(131072, 512), 16);
  for (int cols : {64, 96}) EXPECT_EQ(lanes(131072, cols), 4) << cols;
  for (int cols : {192, 320}) EXPECT_EQ(lanes(131072, cols), lanes(1, cols)) << cols;
  EXPECT_EQ(lanes(19008, 128), 8);  // few rows
  EXPECT_EQ(lanes(131072, 256, true), 16);
  EXPECT_EQ(lanes(131072, 256, true, DType::kBFloat16, true), 8);
  EXPECT_EQ(lanes(131072, 128, false, DType::kFloat32), 16);
}

// Tiles of rows of 16 bits an element, of which a lane has so many columns; the compiler is told
// that all lanes have the first `sure`.
void check_tiles(const FlatRows& flat, int rows_at_work, int units, int sure, int cols) {
  EXPECT_LE(cols, 32 * units);
  EXPECT_GE(cols, 32 * sure);
  EXPECT_EQ(flat.rows % rows_at_work, 0);
  const int bytes = flat.rows * cols * 2;
  EXPECT_EQ(bytes % 16, 0);  // the kernels take for granted that tiles are whole granules
  EXPECT_GE(flat.tile_bytes, bytes);
  EXPECT_EQ(flat.tile_bytes % 16, 0);
}

TEST(ForwardPlan, ShortRowsThatAreNotWholePacksGoInTiles) {
  for_all([](const DeviceProperties& chip, Dtypes dtypes, int cols) {
    for (int64_t rows : kRows) {
      SCOPED_TRACE(testing::Message() << rows << " x " << cols);
      const FlatRows tiles = plan_norm_forward(rows, cols, dtypes.x, dtypes.y, false, chip).tiles;
      const bool goes = dtypes.x == dtypes.y && size_of(dtypes.x) == 2 && cols % 8 != 0 &&
                        cols <= 17 * 32 && chip.max_cluster_blocks > 1;
      ASSERT_EQ(tiles.blocks > 0, goes);
      if (!goes) continue;
      const int units = kForwardTileUnits[tiles.row_class];
      check_tiles(tiles, kFlatThreads / 32 * forward_tile_rows(units), units,
                  sure_units(kForwardTileUnits, tiles.row_class), cols);
      EXPECT_EQ(tiles.shared_bytes, kFlatSlots * tiles.tile_bytes);
      // Persistent: all resident at once, and none without a tile.
      const int a_multiprocessor = (tiles.blocks + chip.sm_count - 1) / chip.sm_count;
      EXPECT_LE(a_multiprocessor, kForwardTileBlocks);
      EXPECT_LE(a_multiprocessor * (tiles.shared_bytes + 3 * kKilobyte),
                chip.shared_bytes_per_block + kKilobyte);
      EXPECT_LE(int64_t{tiles.blocks - 1} * tiles.rows, rows - 1);
    }
  });
}

TEST(ForwardPlan, FewRowsHaveMoreThreads) {
  const auto packs = [](int64_t rows, int cols, DType dtype = DType::kBFloat16, bool rms = false) {
    return plan_norm_forward(rows, cols, dtype, dtype, rms, kH200).packs;
  };
  EXPECT_EQ(packs(512, 4096), 2);
  EXPECT_EQ(packs(528, 4096), 2);  // four blocks of 256 threads a multiprocessor
  EXPECT_EQ(packs(529, 4096), 4);
  EXPECT_EQ(packs(1, 8192), 2);
  EXPECT_EQ(packs(1, 8200), 4);  // no block has so many threads
  EXPECT_EQ(packs(1, 2048, DType::kFloat32, true), 2);
  EXPECT_EQ(packs(1, 2048, DType::kFloat32), 4);  // two sums at once
  for (int64_t rows : {1, 100000}) EXPECT_EQ(packs(rows, 384), 4);
  for (int64_t rows : {1, 100000}) EXPECT_EQ(packs(rows, 512, DType::kBFloat16, true), 2);
}

TEST(ForwardPlan, LongRowsAreWalkedOver) {
  for (bool rms : {false, true}) {
    for (int cols : {33000, 50000, 65536, 131072, 262144}) {
      const auto plan =
          plan_norm_forward(2048, cols, DType::kBFloat16, DType::kBFloat16, rms, kH200);
      EXPECT_GT(plan.ring.slots, 0) << cols;
    }
  }
  const auto blocks = [](int64_t rows, int cols, DType dtype) {
    return plan_norm_forward(rows, cols, dtype, dtype, true, kH200).ring.blocks;
  };
  EXPECT_EQ(blocks(2048, 50000, DType::kBFloat16), 132);
  EXPECT_EQ(blocks(2048, 33000, DType::kFloat16), 2 * 132);  // of few threads
  EXPECT_EQ(blocks(2048, 20000, DType::kFloat32), 2 * 132);
  EXPECT_EQ(blocks(197, 50000, DType::kBFloat16), 0);  // less than three for each cluster
  EXPECT_EQ(blocks(198, 50000, DType::kBFloat16), 132);
  EXPECT_EQ(
      plan_norm_forward(2048, 50000, DType::kBFloat16, DType::kFloat32, true, kH200).ring.slots, 0);
}

void check_registers(const NormBackwardPlan& plan, const DeviceProperties& chip) {
  EXPECT_TRUE(is_lane_count(plan.threads_per_row));
  const int threads = plan.threads_per_row * plan.rows_per_block;
  EXPECT_LE(threads, backward_threads(plan.packs));
  EXPECT_EQ(threads % 32, 0);
  EXPECT_EQ(plan.cluster_blocks, 1);
  EXPECT_LE(plan.packs, 3);  // of which there are kernels
  // Persistent: all resident at once. Named barriers let no more than four blocks be.
  const int blocks = (plan.blocks + chip.sm_count - 1) / chip.sm_count;
  EXPECT_LE(blocks, 4);
  EXPECT_LE(blocks * threads, backward_blocks(plan.packs) * backward_threads(plan.packs));
  EXPECT_LE(blocks * (plan.shared_bytes + 5 * kKilobyte), chip.shared_bytes_per_block);
  // Groups of several warps have a named barrier and a set of slots each.
  EXPECT_TRUE(plan.threads_per_row <= 32 || plan.rows_per_block <= 8);
}

void check_ring(const NormBackwardPlan& plan, const DeviceProperties& chip, int64_t rows, int cols,
                int saved_size, int dy_size, bool from_output) {
  // From the output threads keep weights and scales, in more registers.
  const int registers = from_output ? 128 : 80;
  EXPECT_GT(chip.max_cluster_blocks, 1);  // there are bulk copies
  EXPECT_LE(plan.cluster_blocks, kMaxClusterBlocks);
  EXPECT_GT(chip.cluster_multiprocessors(plan.cluster_blocks), 0);
  EXPECT_EQ(plan.rows_per_block, 1);
  EXPECT_EQ(plan.threads_per_row % 32, 0);
  EXPECT_GE(plan.threads_per_row, 64);
  EXPECT_LE(plan.threads_per_row, 768);
  EXPECT_EQ(plan.packs * plan.pack, 16);
  // A row being added up, one whose dx is written, and one on its way.
  EXPECT_GE(plan.stages, 3);
  EXPECT_LE(plan.stages, kMaxRingStages);
  const int block_cols = std::min(cols, plan.threads_per_row * 16);
  EXPECT_GE(plan.shared_bytes, plan.threads_per_row * 16 * 4 * (from_output ? 2 : 1) +
                                   plan.stages * (ring_slot(block_cols * saved_size) +
                                                  ring_slot(block_cols * dy_size)));
  // Persistent: all resident at once, in shared memory and registers.
  const int a_chip = chip.cluster_multiprocessors(plan.cluster_blocks);
  const int a_multiprocessor = (plan.blocks + a_chip - 1) / a_chip;
  EXPECT_LE(a_multiprocessor * (plan.shared_bytes + 2 * kKilobyte),
            chip.shared_bytes_per_block + kKilobyte);
  EXPECT_LE(a_multiprocessor * plan.threads_per_row * registers, 65536);
  EXPECT_TRUE(plan.cluster_blocks == 1 || a_multiprocessor == 1);
  // The partial rows of a cluster hold all of its rows, few in each, unless partial rows run out.
  const int64_t clusters = plan.blocks / plan.cluster_blocks;
  const int64_t rounds = (rows + clusters - 1) / clusters;
  EXPECT_GE(int64_t{plan.partial_sets} * plan.rows_in_sequence, rounds);
  EXPECT_TRUE(plan.rows_in_sequence <= 128 || plan.partials + clusters > 65535);
}

TEST(BackwardPlan, HoldsTheRowAndFitsTheChip) {
  for_all([](const DeviceProperties& chip, Dtypes dtypes, int cols) {
    for (int64_t rows : kRows) {
      for (int form = 0; form < 6; ++form) {
        const bool lists = form % 3 == 2, from_output = form % 3 != 0, rms = form / 3 != 0;
        SCOPED_TRACE(testing::Message() << rows << " x " << cols << " form " << form);
        const NormBackwardPlan plan =
            plan_norm_backward(rows, cols, dtypes.x, dtypes.y, from_output, rms, chip, 0, lists);
        EXPECT_GE(plan.partials, 1);
        EXPECT_LE(plan.partials, 65535);  // gridDim.y of the column tiles
        EXPECT_TRUE(plan.sum_threads == kSumThreads || plan.sum_threads == kFewSumThreads);
        if (plan.tier == Tier::kStreaming) {
          EXPECT_EQ(plan.cluster_blocks, 1);
          EXPECT_LE(plan.threads_per_row * plan.rows_per_block, 512);
          const int tile_cols =
              kTileThreads * streamed_columns(false, dtypes.x == DType::kFloat64 ? 8 : 4);
          EXPECT_GE(int64_t{plan.tiles} * tile_cols, cols);
          EXPECT_LT(int64_t{plan.tiles - 1} * tile_cols, cols);
          EXPECT_EQ(plan.threads_per_row % 32, 0);
          continue;
        }
        EXPECT_GE(int64_t{plan.cluster_blocks} * plan.threads_per_row * plan.packs * plan.pack,
                  cols);
        const int sets = plan.tier == Tier::kRing ? plan.partial_sets : 1;
        EXPECT_EQ(plan.blocks * sets, plan.partials * plan.cluster_blocks);
        EXPECT_LE(plan.partials, rows);
        const int saved_size = size_of(from_output ? dtypes.y : dtypes.x);
        if (plan.tier == Tier::kRing) {
          check_ring(plan, chip, rows, cols, saved_size, size_of(dtypes.y), from_output);
          continue;
        }
        check_registers(plan, chip);
        if (from_output) {  // weight, scale and shifts, of each group where it has its own
          const int threads = plan.threads_per_row * (lists ? plan.rows_per_block : 1);
          EXPECT_GE(plan.shared_bytes, threads * plan.packs * plan.pack * 4 * 4);
        }
        // Of rows that are dealt out, in elements or pairs, there are kernels with one pack a
        // thread.
        EXPECT_TRUE(cols % plan.pack == 0 || plan.packs == 1);
        // Of three packs there are kernels for a part of a warp and dtypes that are alike.
        EXPECT_TRUE(plan.packs != 3 || (dtypes.x == dtypes.y && plan.threads_per_row < 32));
      }
    }
  });
}

TEST(BackwardPlan, PartialRowsOfManyColumnsAreAddedUpBySmallBlocks) {
  auto threads = [](int cols, bool rms) {
    return plan_norm_backward(8192, cols, DType::kBFloat16, DType::kBFloat16, false, rms, kH200)
        .sum_threads;
  };
  EXPECT_EQ(threads(4096, false), kSumThreads);
  EXPECT_EQ(threads(5120, false), kFewSumThreads);
  EXPECT_EQ(threads(5120, true), kSumThreads);  // dweight alone
  EXPECT_EQ(threads(32768, true), kFewSumThreads);
}

// Many rows may have more packs in each lane: halves, then, or quarters of the lanes, of which the
// last had none where they have three packs.
void check_same_sums(const NormBackwardPlan& plan, const NormBackwardPlan& one) {
  EXPECT_EQ(plan.tier, one.tier);
  EXPECT_EQ(plan.cluster_blocks, one.cluster_blocks);
  if (plan.packs != one.packs && plan.tier == Tier::kRegisters) {
    EXPECT_LT(plan.threads_per_row, 32);
    EXPECT_EQ((plan.packs + 1) / 2 * 2 * plan.threads_per_row, one.packs * one.threads_per_row);
  } else {
    EXPECT_EQ(plan.packs, one.packs);
    EXPECT_EQ(plan.threads_per_row, one.threads_per_row);
  }
}

TEST(BackwardPlan, RowsDoNotShapeTheReduction) {
  for_all([](const DeviceProperties& chip, Dtypes dtypes, int cols) {
    for (int form = 0; form < 4; ++form) {
      const auto plan_for = [&](int64_t rows) {
        return plan_norm_backward(rows, cols, dtypes.x, dtypes.y, form % 2 != 0, form / 2 != 0,
                                  chip);
      };
      const NormBackwardPlan one = plan_for(1);
      for (int64_t rows : kRows) check_same_sums(plan_for(rows), one);
    }
  });
}

TEST(BackwardPlan, ChipsOfOneModelShareRowsAlike) {
  DeviceProperties other = kH200;  // with other processing clusters
  const int filled[] = {132, 132, 126, 132, 120, 108, 112, 128};
  std::copy(std::begin(filled), std::end(filled), other.filled_by_clusters);
  for (int cols = 8000; cols < 100000; cols += 8) {
    for (int form = 0; form < 4; ++form) {
      const auto blocks = [&](const DeviceProperties& chip) {
        return plan_norm_backward(4096, cols, DType::kBFloat16, DType::kBFloat16, form % 2 != 0,
                                  form / 2 != 0, chip)
            .cluster_blocks;
      };
      EXPECT_EQ(blocks(kH200), blocks(other)) << cols;
    }
  }
}

TEST(BackwardPlan, RowsThatAreNotWholePacksAreDealtOut) {
  const auto plan_for = [](int cols, const DeviceProperties& chip) {
    return plan_norm_backward(4096, cols, DType::kBFloat16, DType::kBFloat16, false, false, chip);
  };
  const int lanes[][2] = {{7, 1}, {9, 2}, {37, 8}, {65, 16}, {127, 16}, {129, 32}, {257, 64}};
  for (const auto& [cols, threads] : lanes) {
    EXPECT_EQ(plan_for(cols, kH200).threads_per_row, threads) << cols;
    EXPECT_EQ(plan_for(cols, kA100).threads_per_row, threads) << cols;
  }
  EXPECT_EQ(plan_for(777, kA100).packs, 1);
  EXPECT_EQ(plan_for(777, kA100).rows_per_block, 2);
  for (int cols : {1022, 1278}) EXPECT_EQ(plan_for(cols, kH200).tier, Tier::kRegisters);
  for (int cols : {1281, 1500, 3333, 3334, 8191}) {
    EXPECT_EQ(plan_for(cols, kH200).tier, Tier::kRing);
    EXPECT_EQ(plan_for(cols, kA100).tier, Tier::kStreaming);  // there are no bulk copies
  }
}

TEST(BackwardPlan, OfManyShortRowsEachLaneHasSeveralPacks) {
  const auto plan_for = [](int64_t rows, int cols, DType y = DType::kBFloat16) {
    return plan_norm_backward(rows, cols, DType::kBFloat16, y, false, false, kH200);
  };
  struct Shape {
    int packs, lanes;  // of many rows
    std::vector<int> lengths;
  };
  for (const auto& [packs, lanes, lengths] : std::vector<Shape>{{1, 8, {40, 56}},
                                                                {2, 4, {64}},
                                                                {3, 4, {72, 80, 96}},
                                                                {2, 8, {104, 128}},
                                                                {3, 8, {136, 160, 192}},
                                                                {2, 16, {200, 256}},
                                                                {3, 16, {264, 320, 384}},
                                                                {2, 32, {392, 400, 512}},
                                                                {1, 96, {520, 768}},
                                                                {2, 64, {776, 1024}}}) {
    for (int cols : lengths) {
      const NormBackwardPlan many = plan_for((1 << 23) / cols + 1, cols);
      EXPECT_EQ(many.packs, packs) << cols;
      EXPECT_EQ(many.threads_per_row, lanes) << cols;
      const NormBackwardPlan few = plan_for((1 << 23) / cols - 1, cols);
      EXPECT_EQ(few.packs, cols <= 256 || packs == 1 ? 1 : 2) << cols;
      // Of two dtypes packs have four columns, and there are no kernels with three packs.
      const bool single = cols > 256 && cols <= 384;
      EXPECT_EQ(plan_for(1 << 20, cols, DType::kFloat32).packs, single ? 1 : 2) << cols;
    }
  }
}

TEST(BackwardPlan, FewRowsAreOneKernel) {
  const auto splits = [](int64_t rows, int cols, const DeviceProperties& chip) {
    return plan_norm_backward(rows, cols, DType::kBFloat16, DType::kBFloat16, false, false, chip)
        .few_splits;
  };
  EXPECT_EQ(splits(512, 4096, kH200), 1);  // a tile of columns for almost every multiprocessor
  EXPECT_EQ(splits(1024, 2048, kH200), 4);
  EXPECT_EQ(splits(64, 1024, kH200), 1);
  EXPECT_EQ(splits(1024, 4096, kH200), 0);  // rows are too many to be read twice
  EXPECT_EQ(splits(1024, 1024, kH200), 0);  // and here for each thread of a tile
  EXPECT_EQ(splits(64, 256, kH200), 0);     // a row is a warp's
  EXPECT_EQ(splits(64, 1001, kH200), 0);    // not whole packs
  EXPECT_EQ(splits(1024, 2048, kA100), 0);  // no clusters
  EXPECT_EQ(splits(256, 2048, kA100), 1);
  const auto from_output = [](int cols, const DeviceProperties& chip) {
    return plan_norm_backward(64, cols, DType::kBFloat16, DType::kBFloat16, true, false, chip)
        .few_splits;
  };
  EXPECT_EQ(from_output(4096, kH200), 1);
  EXPECT_EQ(from_output(1024, kA10), 1);
}

TEST(BackwardPlan, BlocksTakeTheGroupsOfAGateInTurn) {
  for (const DeviceProperties& chip : kChips) {
    for (DType x : {DType::kBFloat16, DType::kFloat32}) {
      for (int cols : {8, 64, 128, 264, 1024, 2048, 3072, 4096}) {
        const auto alone = plan_norm_backward(1, cols, x, x, false, true, chip, 1);
        for (int groups : {1, 3, 8, 640}) {
          for (int64_t rows : {int64_t{groups}, int64_t{groups} * 7, int64_t{groups} << 20}) {
            const auto plan = plan_norm_backward(rows, cols, x, x, false, true, chip, groups);
            check_same_sums(plan, alone);
            if (plan.tier != Tier::kRegisters) continue;
            EXPECT_EQ(plan.blocks % groups, 0);
            EXPECT_EQ(plan.partials, plan.blocks);
            EXPECT_EQ(plan.few_splits, 0);
            // Each block has rows of its group, and room for two of three tensors.
            EXPECT_LT((plan.blocks / groups - 1) * plan.rows_per_block, rows / groups);
            const int rows_bytes =
                plan.rows_per_block * plan.threads_per_row * 2 * 3 * plan.packs * 16;
            EXPECT_GE(plan.shared_bytes, rows_bytes + cols * 4);
            EXPECT_LE(plan.shared_bytes, chip.shared_bytes_per_block);
          }
        }
      }
    }
  }
}

TEST(BackwardPlan, RoomForAListChangesNoSum) {
  for_all([](const DeviceProperties& chip, Dtypes dtypes, int cols) {
    if (&chip != &kChips[0]) return;  // less shared memory has no room for each group's parameters
    for (int64_t rows : kRows) {
      SCOPED_TRACE(testing::Message() << rows << " x " << cols);
      for (bool rms : {false, true}) {
        const auto plan_for = [&](bool lists) {
          return plan_norm_backward(rows, cols, dtypes.x, dtypes.y, true, rms, chip, 0, lists);
        };
        const auto plan = plan_for(false), listing = plan_for(true);
        EXPECT_EQ(listing.tier, plan.tier);
        EXPECT_EQ(listing.threads_per_row, plan.threads_per_row);
        EXPECT_EQ(listing.rows_per_block, plan.rows_per_block);
        EXPECT_EQ(listing.blocks, plan.blocks);
        EXPECT_EQ(listing.partials, plan.partials);
      }
    }
  });
}

TEST(BackwardPlan, FromTheOutputTakesNoMoreKernels) {
  const auto kernels = [](const NormBackwardPlan& plan) {
    if (plan.tier == Tier::kStreaming) return 3;
    return plan.few_splits > 0 ? 1 : 2;
  };
  for_all([&](const DeviceProperties& chip, Dtypes dtypes, int cols) {
    if (&chip != &kChips[0]) return;  // less shared memory has no room for the output's parameters
    for (int64_t rows : kRows) {
      SCOPED_TRACE(testing::Message() << rows << " x " << cols);
      for (bool rms : {false, true}) {
        const auto plan_for = [&](bool from_output) {
          return plan_norm_backward(rows, cols, dtypes.x, dtypes.y, from_output, rms, chip);
        };
        EXPECT_LE(kernels(plan_for(true)), kernels(plan_for(false)));
      }
    }
  });
}

TEST(BackwardPlan, LongRowsUseTheRingWhereTheChipHasBulkCopies) {
  const auto plan_for = [](int cols, bool from_output, const DeviceProperties& chip) {
    return plan_norm_backward(4096, cols, DType::kBFloat16, DType::kBFloat16, from_output, false,
                              chip);
  };
  EXPECT_EQ(plan_for(4096, false, kH200).tier, Tier::kRegisters);
  EXPECT_EQ(plan_for(1000, false, kH200).tier, Tier::kRegisters);
  EXPECT_EQ(plan_for(1500, false, kH200).tier, Tier::kRing);       // ends within a pack
  EXPECT_EQ(plan_for(8192, false, kH200).tier, Tier::kRegisters);  // fills a block's threads
  EXPECT_EQ(plan_for(5120, true, kH200).tier, Tier::kRegisters);
  EXPECT_EQ(plan_for(5120, false, kH200).blocks, 2 * 132);
  EXPECT_EQ(plan_for(5120, false, kH200).stages, 3);
  EXPECT_EQ(plan_for(6144, false, kH200).blocks, 132);
  // No room for another block beside it.
  EXPECT_GT(2 * plan_for(6144, false, kH200).shared_bytes, kH200.shared_bytes_per_block);
  EXPECT_EQ(plan_for(12288, false, kH200).cluster_blocks, 1);
  EXPECT_EQ(plan_norm_backward(4096, 12288, DType::kBFloat16, DType::kBFloat16, false, true, kH200)
                .cluster_blocks,
            2);
  EXPECT_EQ(plan_for(12288, true, kH200).cluster_blocks, 2);  // in 128 registers a thread
  EXPECT_EQ(plan_for(50000, false, kH200).cluster_blocks, 5);
  EXPECT_EQ(plan_for(28672, false, kH200).cluster_blocks, 3);
  // 3 would do, with 6 warps to a scheduler in place of 4.
  EXPECT_EQ(plan_for(32768, false, kH200).cluster_blocks, 4);
  EXPECT_EQ(plan_for(65536, false, kH200).cluster_blocks, 8);
  EXPECT_EQ(plan_for(131072, false, kH200).cluster_blocks, kMaxClusterBlocks);
  EXPECT_EQ(plan_for(131072, true, kH200).cluster_blocks, kMaxClusterBlocks);
  EXPECT_EQ(plan_for(262144, false, kH200).tier, Tier::kStreaming);
  EXPECT_EQ(plan_for(8192, false, kA100).tier, Tier::kRegisters);
  EXPECT_EQ(plan_for(12288, false, kA100).tier, Tier::kStreaming);
}

TEST(RowLayout, DividesByMultiplication) {
  for (uint32_t inner : {1u, 2u, 3u, 7u, 12u, 1000u, 65535u, 65536u, 1000003u, 0x7fffffffu}) {
    const RowLayout layout = two_strides(inner, 1, 1);
    for (uint32_t row : {0u, 1u, 2u, inner - 1, inner, inner + 1, 2 * (inner / 2), 123456789u,
                         0x7ffffffeu, 0x7fffffffu}) {
      const uint32_t high = static_cast<uint32_t>(uint64_t{row} * layout.multiplier >> 32);
      EXPECT_EQ((high + row) >> layout.shift, row / inner) << row << " / " << inner;
    }
  }
}

}  // namespace
}  // namespace fused_norm
