#include <algorithm>
#include <climits>
#include <optional>

#include "core/norm/plan.h"

namespace fused_norm {
namespace {

// Partial rows: gridDim.y of the column tiles.
constexpr int64_t kMaxPartials = 65535;

// Static shared memory of the kernels, rounded up.
constexpr int kStaticShared = 5 * 1024;

// What is planned, and for which chip. A gate has so many groups; without one, none.
struct BackwardCall {
  int64_t rows;
  int cols;
  DType x, y;
  bool from_output, rms;
  int gate_groups;
  bool lists;
  const DeviceProperties& device;

  bool gated() const { return gate_groups > 0; }
  int saved_size() const { return size_of(from_output ? y : x); }
  int dy_size() const { return size_of(y); }
  // Rings are filled by bulk copies, which came with clusters.
  bool bulk_copies() const { return device.max_cluster_blocks > 1 && !gated(); }
};

struct RingShape {
  int threads, stages, shared_bytes;
  int blocks;  // of a multiprocessor
};

// How `spread` blocks share a long row, if they can. Blocks of few threads share a multiprocessor,
// up to 12 warps, and hide each other's barriers; more would make more partial rows. Three stages
// hold the row at work, the one before, of which dx is still to be written, and the next. There are
// more where these would leave too little on its way, or room for another block: when kernels
// overlap, the first multiprocessors to be free then get that too, and others stay empty. Each
// stage beyond costs about 1 %.
std::optional<RingShape> ring_shape(int spread, int cols, int pack, int saved_size, int dy_size,
                                    bool from_output, const DeviceProperties& device) {
  constexpr int kEnoughThreads = 384, kMinStages = 3;
  constexpr int kStatic = 1024, kEnoughBytes = 40 * 1024;
  const int capacity = device.shared_bytes_per_block + kReservedPerBlock;
  const int most_threads = ring_threads(from_output);
  const int64_t block_packs = ceil_div(ceil_div(cols, pack), spread);
  if (block_packs * pack > most_threads * kRingCols) return std::nullopt;
  const int threads = threads_for(block_packs, kRingCols / pack);
  const int block_cols = std::min(cols, threads * kRingCols);
  const int params = ring_params(from_output) * threads * kRingCols * 4;
  const int stage = ring_slot(block_cols * saved_size) + ring_slot(block_cols * dy_size);
  const int beside = params + kStatic + kReservedPerBlock;
  const int wanted = spread > 1 ? 1 : static_cast<int>(ceil_div(kEnoughThreads, threads));
  for (int blocks = wanted; blocks > 0; --blocks) {
    auto have_registers = [&](int blocks) { return blocks * threads <= most_threads; };
    const int most = std::min((capacity / blocks - beside) / stage, kMaxRingStages);
    if (most < kMinStages || !have_registers(blocks)) continue;
    auto suffice = [&](int stages) {
      const bool fill =
          (blocks + 1) * (beside + stages * stage) > capacity || !have_registers(blocks + 1);
      return fill && blocks * (stages - 2) * stage >= kEnoughBytes;
    };
    int stages = kMinStages;
    while (stages < most && !suffice(stages)) ++stages;
    return RingShape{threads, stages, params + stages * stage, blocks};
  }
  return std::nullopt;
}

// How long a row takes in clusters of so many blocks, in proportion. They lie within the chip's
// processing clusters, of 16 multiprocessors or a few more: what they cannot fill is lost. And a
// multiprocessor takes as long for a row as the most warps that share one of its four schedulers,
// and somewhat longer. Known of all chips, not asked of this one: of one model, too, they have
// different processing clusters, and a row's dx would have other bits where the sizes differ.
int64_t ring_time(int spread, int threads) {
  constexpr int kProcessingCluster = 16, kSchedulers = 4, kLonger = 2;
  const int filled = kProcessingCluster / spread * spread;
  const int64_t warps = ceil_div(threads, kWarpSize * kSchedulers);
  return (int64_t{1} << 20) * spread * (warps + kLonger) / filled;
}

// Threads of a block that does not rather become two. From 12288 columns of bf16 on that is faster
// for RMSNorm and not for LayerNorm; fp32, with twice the bytes of a row to wait for, gains sooner.
int most_threads_of_one(bool rms, int saved_size) {
  if (saved_size == 4) return rms ? 352 : 480;
  return rms ? 640 : kMaxRingThreads;
}

// Fills in the plan, if so many blocks as a cluster can have can share the row. One or two do if
// they can, as these fill the chip.
bool plan_ring(const BackwardCall& call, NormBackwardPlan& plan) {
  const DeviceProperties& device = call.device;
  // Of a thread, so that rounding errors stay those of a shallow tree.
  constexpr int kMaxRowsInSequence = 128;
  std::optional<RingShape> best;
  int best_spread = 0;
  int64_t best_time = 0;
  auto consider = [&](int spread) {
    if (device.cluster_multiprocessors(spread) == 0) return;
    const auto shape = ring_shape(spread, call.cols, plan.pack, call.saved_size(), call.dy_size(),
                                  call.from_output, device);
    if (!shape) return;
    if (spread == 1 && shape->threads > most_threads_of_one(call.rms, call.saved_size()) &&
        device.max_cluster_blocks > 1)
      return;
    const int64_t time = ring_time(spread, shape->threads);
    if (best && time > best_time) return;
    best = shape;
    best_spread = spread;
    best_time = time;
  };
  for (int spread = 1; spread <= device.max_cluster_blocks; ++spread) {
    if (best && best_spread <= 2) break;
    consider(spread);
  }
  // Clusters larger than all chips have are for the longest rows, and for the parameters of an
  // output. A row whose output has no room even so takes no ring from the input either: both kinds
  // of backward then have as many kernels.
  if (!best && ring_shape(kMaxClusterBlocks, call.cols, plan.pack, call.dy_size(), call.dy_size(),
                          /*from_output=*/true, device))
    consider(kMaxClusterBlocks);
  if (!best) return false;

  plan.tier = Tier::kRing;
  plan.packs = kRingCols / plan.pack;
  plan.threads_per_row = best->threads;
  plan.rows_per_block = 1;
  plan.cluster_blocks = best_spread;
  plan.stages = best->stages;
  plan.shared_bytes = best->shared_bytes;
  const int resident = device.cluster_multiprocessors(best_spread) * best->blocks / best_spread;
  const int64_t clusters = std::min<int64_t>(call.rows, resident);
  const int64_t rounds = ceil_div(call.rows, clusters);
  const int64_t sets = std::min(ceil_div(rounds, kMaxRowsInSequence), kMaxPartials / clusters);
  plan.blocks = static_cast<int>(clusters * best_spread);
  plan.partial_sets = static_cast<int>(sets);
  plan.rows_in_sequence = static_cast<int>(std::min<int64_t>(ceil_div(rounds, sets), INT_MAX));
  plan.partials = static_cast<int>(clusters * sets);
  return true;
}

// Blocks for each tile of columns, or 0 where there are too many rows for rows and columns apart: a
// thread then adds up no more than kRows of the rows that its block takes `rows_at_once` of.
int few_splits(int64_t rows, int cols, int rows_at_once, const DeviceProperties& device) {
  constexpr int64_t kRows = 8, kMostElements = int64_t{1} << 21;
  constexpr int kMinRowsAtOnce = 16;  // shorter rows leave a block too few threads
  if (rows > kMostElements / cols || rows_at_once < kMinRowsAtOnce) return 0;
  const int most = std::min(device.max_cluster_blocks, kMaxFewSplits);
  int splits = 1;
  while (splits < most && rows > kRows * rows_at_once * splits) splits *= 2;
  return rows <= kRows * rows_at_once * splits ? splits : 0;
}

// How rows lie in registers: `groups` of so many threads a block, none where there is no room.
struct RegistersShape {
  int packs, threads, groups, shared_bytes;
};

RegistersShape registers_shape(const BackwardCall& call, int pack) {
  const int64_t row_packs = ceil_div(call.cols, pack);
  // Rows that are not whole packs are dealt out, one pack a thread. Long ones would leave few
  // groups to a block.
  constexpr int kMostDealtOut = 5 * kWarpSize;
  const bool dealt_out = call.cols % pack != 0;
  if (dealt_out && row_packs > kMostDealtOut) return {};
  // One pack a thread leaves more threads to a multiprocessor than two, but the sums of a row then
  // go over more warps, and in one warp nobody waits.
  const bool single = row_packs <= kWarpSize || dealt_out ||
                      (row_packs > 2 * kWarpSize && row_packs <= 3 * kWarpSize);
  int packs = single ? 1 : 2;
  auto threads_of = [&](int packs) {
    return static_cast<int>(std::min<int64_t>(threads_for(row_packs, packs), 1 << 20));
  };
  // Many rows that fit a part of a warp have two packs a lane, or three where fewer lanes are idle
  // then (kernels of one dtype without a gate). Of fewer rows that is slower, and mostly of up to
  // seven packs (docs/measurements.md). The sum of a row stays the same (add_up_row()).
  constexpr int64_t kManyElements = int64_t{1} << 23;
  constexpr int kMostSingle = 7, kMostOfPart = 3 * kWarpSize / 2;
  if (!dealt_out && row_packs > kMostSingle && row_packs <= kMostOfPart &&
      call.rows >= kManyElements / call.cols) {
    const bool may_be_three = !call.gated() && call.x == call.y;
    packs = may_be_three && 3 * threads_of(3) < 2 * threads_of(2) ? 3 : 2;
  }
  const int threads = threads_of(packs);

  // Shared memory holds the weight as fp32, from the output 1 / weight and shifts of two rows too,
  // for each group where columns may be listed; and rows on their way. In the end it holds the sums
  // of dweight and dbias.
  const int vector = packs * pack * 4;
  const int dy_bytes = call.dy_size() * (call.gated() ? 2 : 1);
  const int64_t row_bytes =
      dealt_out ? 0
                : int64_t{threads} * slice_queue_bytes(packs, pack, call.saved_size(), dy_bytes);
  auto vectors = [&](int groups, int count) {
    return ceil_div(int64_t{groups} * threads, kWarpSize) * kWarpSize * vector * count;
  };
  auto shared_bytes = [&](int groups) {
    const int64_t params = vectors(call.lists ? groups : 1, call.from_output ? 4 : 1);
    return std::max(params + groups * row_bytes, vectors(groups, 2));
  };
  int groups = call.x == DType::kFloat64 ? 0 : backward_threads(packs) / threads;
  while (groups > 0 && shared_bytes(groups) + kStaticShared > call.device.shared_bytes_per_block)
    groups -= std::max(kWarpSize / threads, 1);  // a block has whole warps
  return {packs, threads, groups, groups > 0 ? static_cast<int>(shared_bytes(groups)) : 0};
}

// Long rows pass through a ring in shared memory, which leaves registers to more threads; shorter
// ones too, where they would fill but a part of a block's threads, but not from the output: the
// parameters of each column are read too often there.
bool goes_by_ring(const BackwardCall& call, const RegistersShape& shape) {
  if (call.x == DType::kFloat64 || !call.bulk_copies()) return false;
  if (shape.groups == 0) return true;
  const int most = backward_threads(shape.packs);
  const bool fills = shape.threads <= most / 2 || shape.threads > most * 7 / 8;
  return !fills && shape.packs == 2 && !call.from_output;
}

void plan_registers(const BackwardCall& call, const RegistersShape& shape, NormBackwardPlan& plan) {
  const DeviceProperties& device = call.device;
  const auto [packs, threads, groups, shared_bytes] = shape;
  plan.tier = Tier::kRegisters;
  plan.packs = packs;
  plan.threads_per_row = threads;
  plan.rows_per_block = groups;
  plan.shared_bytes = shared_bytes;
  // Persistent: as many blocks as are resident at once, and no more than there is work for.
  // Kernels with named barriers have all 16 of a block's: four blocks a multiprocessor.
  const int resident =
      std::min({4, backward_blocks(packs) * backward_threads(packs) / (threads * groups),
                device.shared_bytes_per_block / (shared_bytes + kStaticShared)});
  const int gate_groups = std::max(call.gate_groups, 1);
  const int64_t most = std::max(resident * device.sm_count / gate_groups, 1);
  plan.blocks = plan.partials =
      clamp_grid(std::min(ceil_div(call.rows / gate_groups, groups), most) * gate_groups);
  // Static shared memory of the kernel for few rows, rounded up, beside its parameters.
  constexpr int kFewStatic = 8 * 1024;
  const int params = (call.from_output ? 3 : 1) * threads * packs * plan.pack * 4;
  if (!call.gated() && packs == 2 && call.x == call.y &&
      params + kFewStatic <= device.shared_bytes_per_block)
    plan.few_splits = few_splits(call.rows, call.cols, threads * plan.pack / kFewColumns, device);
}

void plan_streaming(const BackwardCall& call, NormBackwardPlan& plan) {
  plan.tier = Tier::kStreaming;
  plan.pack = 1;
  plan.threads_per_row = streamed_threads(call.cols, false, call.x, kMaxRowMeansThreads);
  plan.rows_per_block = std::max(1, kStreamedBlockThreads / plan.threads_per_row);
  plan.blocks = clamp_grid(ceil_div(call.rows, plan.rows_per_block));
  const int tile_cols = kTileThreads * streamed_columns(false, size_of(call.x) == 8 ? 8 : 4);
  plan.tiles = static_cast<int>(ceil_div(call.cols, tile_cols));
  // Eight tiles' blocks a multiprocessor hide the loads of each other. More partial rows would only
  // be summed later; but rounding errors are to stay those of a shallow tree.
  constexpr int kMaxRowsInSequence = 64;
  const int64_t wanted = std::max(ceil_div(int64_t{8} * call.device.sm_count, plan.tiles),
                                  ceil_div(call.rows, kMaxRowsInSequence));
  plan.partials = static_cast<int>(std::min({wanted, call.rows, kMaxPartials}));
}

}  // namespace

NormBackwardPlan plan_norm_backward(int64_t rows, int cols, DType x, DType y, bool from_output,
                                    bool rms, const DeviceProperties& device, int gate_groups,
                                    bool lists) {
  const BackwardCall call{rows, cols, x, y, from_output, rms, gate_groups, lists, device};
  NormBackwardPlan plan{};
  plan.overlaps = device.max_cluster_blocks > 1;
  plan.pack = pack_elements(x, y);
  // Small blocks where a multiprocessor would have large ones in turn, two at a time.
  const int64_t sum_blocks = ceil_div(cols, kWarpSize) * (rms ? 1 : 2);
  plan.sum_threads = sum_blocks > 2 * device.sm_count ? kFewSumThreads : kSumThreads;
  const RegistersShape shape = registers_shape(call, plan.pack);
  if (goes_by_ring(call, shape) && plan_ring(call, plan)) return plan;
  plan.cluster_blocks = 1;
  if (shape.groups > 0) {
    plan_registers(call, shape, plan);
  } else {
    plan_streaming(call, plan);
  }
  return plan;
}

}  // namespace fused_norm
