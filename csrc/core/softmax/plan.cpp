#include "core/softmax/plan.h"

#include <algorithm>
#include <climits>

#include "core/common/fair_share.h"
#include "core/common/types.h"

namespace fused_norm {
namespace {

// Static shared memory of the kernels with a ring, rounded up.
constexpr int kRingStaticShared = 1024;

int power_of_two_from(int64_t at_least) {
  int power = 1;
  while (power < at_least) power *= 2;
  return power;
}

int whole_warps(int64_t threads) {
  return static_cast<int>(ceil_div(threads, kWarpSize) * kWarpSize);
}

// How one row is run: plan_softmax() adds what depends on the number of rows. The slice is in
// packs.
SoftmaxPlan row_plan(int packs, int threads, int cluster_blocks, int64_t slice_packs) {
  SoftmaxPlan plan{};
  plan.packs = packs;
  plan.threads_per_row = threads;
  plan.cluster_blocks = cluster_blocks;
  plan.slice = static_cast<int>(slice_packs);
  return plan;
}

// Rows by groups of lanes, 128 packs at most. Two packs a lane of each tensor are enough in flight
// where many small groups share a multiprocessor, and four keep rows in one warp. Forward, which
// lacks instructions rather than memory, takes four where two would leave lanes without a column:
// fewer lanes, and what is past the row is left out by the pack. Backward does where more than a
// quarter of the columns would be missing. (Figures of this file: docs/measurements.md, beside
// numbers of the plans.)
constexpr int kMaxWarpPacks = 4 * kWarpSize;

SoftmaxPlan warp_shape(bool backward, int64_t row_packs) {
  const bool fills = backward ? row_packs <= kWarpSize || row_packs >= 3 * kWarpSize / 2
                              : row_packs == power_of_two_from(row_packs);
  const int packs = row_packs == 1 ? 1 : row_packs <= 2 * kWarpSize && fills ? 2 : 4;
  const int lanes = power_of_two_from(ceil_div(row_packs, packs));
  return row_plan(packs, lanes, 1, row_packs);
}

// The smallest cluster whose blocks need take no more than `block_packs` each.
int cluster_for(int64_t row_packs, int64_t block_packs, const DeviceProperties& device) {
  int blocks = 1;
  while (blocks < device.max_cluster_blocks && row_packs > block_packs * blocks) blocks *= 2;
  return blocks;
}

// Where there are bulk copies, which came with clusters. One block takes all of a multiprocessor's
// shared memory, and a row as few blocks as can hold it; of a cluster's blocks, as few as have room
// for the start of the next row too. Forward's rows, of one tensor, leave a block alone sooner, as
// more than one next row then has room. Without packs: not even a cluster can.
SoftmaxPlan ring_shape(int tensors, int64_t row_packs, const DeviceProperties& device) {
  const int piece_packs = span_piece_packs(tensors);
  if (device.max_cluster_blocks == 1) return {};
  const int room = (device.shared_bytes_per_block - kRingStaticShared) / kMaxSpanWarps;
  for (int blocks = 1; blocks <= device.max_cluster_blocks; blocks *= 2) {
    const int64_t lane_packs = ceil_div(row_packs, int64_t{kWarpSize} * kMaxSpanWarps * blocks);
    const int64_t pieces = ceil_div(lane_packs, piece_packs);
    if (pieces * kSpanSlotBytes > room) continue;
    constexpr int kMostAlone = 14;  // packs of a lane
    if (tensors == 1 && blocks == 1 && lane_packs > kMostAlone) continue;
    const int needed = static_cast<int>(pieces);
    int slots = 2 * needed;
    while (slots >= needed && span_ring_bytes(tensors, needed, slots) > room) --slots;
    const bool tight = slots == needed && blocks > 1 && blocks < device.max_cluster_blocks;
    if (slots < needed || tight) continue;
    SoftmaxPlan plan =
        row_plan(piece_packs, kMaxSpanWarps * kWarpSize, blocks, lane_packs * kWarpSize);
    plan.place = RowPlace::kRing;
    plan.pieces = needed;
    plan.slots = slots;
    plan.shared_bytes = span_ring_bytes(tensors, needed, slots) * kMaxSpanWarps;
    return plan;
  }
  return {};
}

// Deals a ring's warps out to the blocks of the largest cluster, if the rows leave half of the chip
// without work. No other rows follow then: each has a cluster, of which some share their
// multiprocessors.
void spread_ring(int tensors, int64_t rows, const DeviceProperties& device, SoftmaxPlan& plan) {
  if (2 * rows * plan.cluster_blocks > device.sm_count) return;
  const int times = device.max_cluster_blocks / plan.cluster_blocks;
  plan.cluster_blocks *= times;
  plan.threads_per_row /= times;
  plan.slots = plan.pieces;
  plan.shared_bytes =
      span_ring_bytes(tensors, plan.pieces, plan.slots) * (plan.threads_per_row / kWarpSize);
}

// Elements of a granule of what a ring is filled with.
int ring_pack(SoftmaxPass pass, DType x, DType y) {
  return kGranule / size_of(is_backward(pass) ? y : x);
}

// Rows stay in registers: four packs a thread of each tensor, which leaves room for two blocks of
// 512 threads on a multiprocessor, or eight for what is longer and still one block's; forward,
// where these are of one tensor, they leave as much room. Longer rows pass through a ring where the
// chip has them: those of whole packs, as others must be put together of what they share with their
// neighbours, and lie in a cluster's registers if these hold them; so do rows that come as 16 bit
// and leave as fp32. What these do not hold passes through a ring as well. Masked rows take
// clusters before eight packs, as their scores are fp32, and so does log_softmax's gradient of
// fp32. Without packs: no block holds the row.
SoftmaxPlan block_shape(SoftmaxPass pass, int cols, DType x, DType y,
                        const DeviceProperties& device) {
  const int pack = pack_elements(x, y), most_blocks = device.max_cluster_blocks;
  const int64_t row_packs = ceil_div(cols, pack);
  constexpr int64_t kFourPacks = 4 * kBlockTierThreads, kMostPacks = 2 * kFourPacks;
  // Small blocks hide each other's waiting for their clusters.
  auto in_registers = [&](int packs, int64_t block_packs) {
    const int blocks = cluster_for(row_packs, block_packs, device);
    const int threads = whole_warps(ceil_div(ceil_div(row_packs, blocks), packs));
    return row_plan(packs, threads, blocks, int64_t{packs} * threads);
  };
  if (row_packs <= kFourPacks) return in_registers(4, kFourPacks);
  if (pass == SoftmaxPass::kMaskedForward)
    return row_packs <= kFourPacks * most_blocks ? in_registers(4, kFourPacks) : SoftmaxPlan{};
  if (pass == SoftmaxPass::kLogBackward && size_of(y) == 4 && most_blocks > 1 &&
      row_packs <= kMostPacks)
    return in_registers(4, 4 * 320);
  if (row_packs <= kMostPacks) return in_registers(8, kMostPacks);
  const bool backward = is_backward(pass), held = row_packs <= kMostPacks * most_blocks;
  if (!held || (cols % pack == 0 && (backward || x == y)))
    return ring_shape(backward ? 2 : 1, ceil_div(cols, ring_pack(pass, x, y)), device);
  return in_registers(8, kFourPacks);
}

// What is read twice, column by column: a block of a cluster has a few turns of its threads at
// least before it meets the others.
SoftmaxPlan uncached_shape(SoftmaxPass pass, int cols, DType x, const DeviceProperties& device) {
  const int elements = streamed_elements(is_backward(pass) ? 2 : 1, x == DType::kFloat64);
  const int threads = std::min(whole_warps(ceil_div(cols, elements)), kBlockTierThreads);
  constexpr int kLeastSlice = 32 * 1024;
  const int blocks = cluster_for(cols, kLeastSlice, device), turn = elements * threads;
  return row_plan(elements, threads, blocks, ceil_div(ceil_div(cols, blocks), turn) * turn);
}

// Without packs: the tier does not hold the row.
SoftmaxPlan shape_in(SoftmaxTier tier, SoftmaxPass pass, int cols, DType x, DType y,
                     const DeviceProperties& device) {
  if (tier == SoftmaxTier::kUncached) return uncached_shape(pass, cols, x, device);
  if (x == DType::kFloat64) return {};
  if (tier == SoftmaxTier::kBlock) return block_shape(pass, cols, x, y, device);
  const int64_t row_packs = ceil_div(cols, pack_elements(x, y));
  return row_packs <= kMaxWarpPacks ? warp_shape(is_backward(pass), row_packs) : SoftmaxPlan{};
}

// What no block or cluster holds is read again from the L2 cache.
SoftmaxTier choose_tier(SoftmaxPass pass, int cols, DType x, DType y,
                        const DeviceProperties& device) {
  for (SoftmaxTier tier : {SoftmaxTier::kWarp, SoftmaxTier::kBlock}) {
    if (softmax_tier_holds(tier, pass, cols, x, y, device)) return tier;
  }
  return SoftmaxTier::kUncached;
}

// Rows in tiles: 16-bit ones a little longer than a power of two of packs, half of whose lanes
// would have nothing. Whole packs only where they would no longer be a warp's. Without packs:
// others, and where a multiprocessor has no room for three tiles, the least.
SoftmaxPlan flat_plan(SoftmaxTier tier, SoftmaxPass pass, int64_t rows, int cols, DType x, DType y,
                      const DeviceProperties& device) {
  SoftmaxPlan plan{};
  const int row_class = flat_class_of(kSoftmaxFlatUnits, cols), pack = pack_elements(x, y);
  if (device.max_cluster_blocks == 1 || x != y || size_of(x) != 2 ||
      pass == SoftmaxPass::kMaskedForward || row_class == kSoftmaxFlatClasses ||
      cols <= (kSoftmaxFlatUnits[row_class] - 1) * kWarpSize ||
      (cols % pack == 0 && cols <= kMaxWarpPacks * pack))
    return plan;
  const int units = kSoftmaxFlatUnits[row_class], tensors = is_backward(pass) ? 2 : 1;
  const int most_blocks = softmax_flat_blocks(tensors == 2 && row_class >= kShorterSoftmaxClasses);
  const int rows_at_work = kFlatWarps * softmax_flat_rows(units);
  const FlatRows flat =
      plan_tiles(rows, cols, row_class, rows_at_work, tensors, most_blocks, device);
  if (flat.blocks == 0) return plan;
  static_cast<KernelPlan&>(plan) = {1, units,       kWarpSize,         rows_at_work,
                                    1, flat.blocks, flat.shared_bytes, true};
  plan.pass = pass;
  plan.tier = tier;
  plan.place = RowPlace::kFlat;
  plan.slice = cols;
  plan.flat = flat;
  return plan;
}

}  // namespace

bool softmax_tier_holds(SoftmaxTier tier, SoftmaxPass pass, int cols, DType x, DType y,
                        const DeviceProperties& device) {
  return tier == SoftmaxTier::kAuto || shape_in(tier, pass, cols, x, y, device).packs > 0;
}

SoftmaxPlan plan_softmax(SoftmaxTier tier, SoftmaxPass pass, int64_t rows, int cols, DType x,
                         DType y, const DeviceProperties& device) {
  if (tier == SoftmaxTier::kAuto) {
    tier = choose_tier(pass, cols, x, y, device);
    const SoftmaxPlan plan = flat_plan(tier, pass, rows, cols, x, y, device);
    if (plan.packs > 0) return plan;
  }
  SoftmaxPlan plan = shape_in(tier, pass, cols, x, y, device);
  if (plan.place == RowPlace::kRing) spread_ring(is_backward(pass) ? 2 : 1, rows, device, plan);
  plan.pass = pass;
  plan.tier = tier;
  plan.overlaps = device.max_cluster_blocks > 1;
  plan.pack = tier == SoftmaxTier::kUncached  ? 1
              : plan.place == RowPlace::kRing ? ring_pack(pass, x, y)
                                              : pack_elements(x, y);
  plan.slice = static_cast<int>(std::min<int64_t>(int64_t{plan.slice} * plan.pack, INT_MAX));
  // Small blocks of short rows: many are resident, and hide each other's loads.
  const int threads = tier == SoftmaxTier::kWarp ? kWarpTierThreads : kBlockTierThreads;
  plan.rows_per_block = tier == SoftmaxTier::kBlock || plan.threads_per_row > kWarpSize
                            ? 1
                            : threads / plan.threads_per_row;
  int64_t clusters = ceil_div(rows, plan.rows_per_block);
  if (plan.place == RowPlace::kRing) {  // they go round
    const int resident = (device.shared_bytes_per_block + kReservedPerBlock) /
                         (plan.shared_bytes + kRingStaticShared + kReservedPerBlock);
    const int multiprocessors = device.cluster_multiprocessors(plan.cluster_blocks);
    clusters = std::min<int64_t>(
        clusters, multiprocessors / plan.cluster_blocks *
                      std::min(resident, kMaxSpanWarps * kWarpSize / plan.threads_per_row));
  }
  plan.blocks = clamp_grid(clusters * plan.cluster_blocks);
  if (tier == SoftmaxTier::kWarp && plan.overlaps) {
    constexpr int kResident = 9;  // or more
    plan.shared_bytes = fair_shared_bytes(plan.blocks, kResident, device);
  }
  return plan;
}

SoftmaxColumnsPlan plan_softmax_columns(bool backward, bool vectorized, int64_t outer, int cols,
                                        int64_t inner, DType x, DType y,
                                        const DeviceProperties& device) {
  SoftmaxColumnsPlan plan{};
  plan.pack = vectorized ? pack_elements(x, y) : 1;
  // At least eight packs side by side, 128 bytes where the tensors are 16 bit.
  constexpr int kMaxSplits = 32;
  const int items = backward ? kBackwardColumnItems : kForwardColumnItems;
  plan.splits = std::min(power_of_two_from(ceil_div(cols, items)), kMaxSplits);
  plan.lanes = kColumnThreads / plan.splits;
  plan.blocks = clamp_grid(ceil_div(outer * (inner / plan.pack), plan.lanes));
  const int64_t turn = int64_t{items} * plan.splits;
  const int64_t bytes = ceil_div(cols, turn) * turn * plan.lanes * plan.pack *
                        size_of(backward ? y : x) * (backward ? 2 : 1);
  constexpr int kColumnsStaticShared = 16 * 1024;  // partial sums
  if (cols > turn && bytes + kColumnsStaticShared <= device.shared_bytes_per_block) {
    plan.shared_bytes = static_cast<int>(bytes);
  }
  return plan;
}

}  // namespace fused_norm
