#include "core/softmax/plan.h"

#include <algorithm>
#include <climits>

namespace fused_norm {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpTierThreads = 128;  // of a block
constexpr int kBlockThreads = 512;
constexpr int kAheadThreads = 1024;
constexpr int kStaticShared = 4096;    // of the kernels over rows, rounded up
constexpr int kStagedSlackBytes = 64;  // rows that do not start on 16 bytes

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int clamp_grid(int64_t blocks) { return static_cast<int>(std::clamp<int64_t>(blocks, 1, INT_MAX)); }

int power_of_two_from(int64_t at_least) {
  int power = 1;
  while (power < at_least) power *= 2;
  return power;
}

int whole_warps(int64_t threads) { return static_cast<int>(ceil_div(threads, kWarp) * kWarp); }

// How one row is run: what plan_softmax() says but for the number of rows.
struct RowShape {
  RowPlace place;
  int packs, threads, cluster_blocks;
  int64_t slice_packs;
  int64_t shared_bytes;
};

// Rows by groups of lanes, 128 packs at most. Two packs a lane of each tensor are enough in flight
// where many small groups share a multiprocessor, and four keep rows in one warp.
constexpr int kMaxWarpPacks = 4 * kWarp;

RowShape warp_shape(int64_t row_packs) {
  const int packs = row_packs <= 4 ? 1 : row_packs <= 2 * kWarp ? 2 : 4;
  const int lanes = power_of_two_from(ceil_div(row_packs, packs));
  return {RowPlace::kRegisters, packs, lanes, 1, row_packs, 0};
}

int smallest_cluster(int64_t row_packs, int64_t block_packs, const DeviceProperties& device) {
  int blocks = 1;
  while (blocks < device.max_cluster_blocks && row_packs > block_packs * blocks) blocks *= 2;
  return blocks;
}

// What the threads of a cluster's blocks have in registers, `packs` each.
RowShape shape_of_registers(RowPlace place, int64_t row_packs, int packs, int cluster_blocks,
                            int64_t staged_bytes_per_pack) {
  const int64_t threads = whole_warps(ceil_div(ceil_div(row_packs, cluster_blocks), packs));
  const int64_t slice_packs = threads * packs;
  const int64_t bytes =
      place == RowPlace::kAhead ? slice_packs * staged_bytes_per_pack + kStagedSlackBytes : 0;
  return {place, packs, static_cast<int>(threads), cluster_blocks, slice_packs, bytes};
}

// Rows stay in registers, four packs a thread or eight. Where the chip has bulk copies, long rows
// are fetched ahead; it also has clusters, for rows of more than a block. Rows too long for that
// are kept in shared memory.
RowShape block_shape(SoftmaxPass pass, int64_t row_packs, int pack_bytes,
                     const DeviceProperties& device) {
  const bool backward = pass == SoftmaxPass::kBackward;
  const bool has_clusters = device.max_cluster_blocks > 1;
  const int staged_bytes = pack_bytes * (backward ? 2 : 1);
  if (row_packs <= 4 * kBlockThreads) {
    return shape_of_registers(RowPlace::kRegisters, row_packs, 4, 1, 0);
  }
  if (has_clusters && pass != SoftmaxPass::kMaskedForward) {
    const int packs = backward ? 4 : 8;
    const int cluster_blocks = smallest_cluster(row_packs, int64_t{packs} * kBlockThreads, device);
    const RowShape shape =
        shape_of_registers(RowPlace::kAhead, row_packs, packs, cluster_blocks, staged_bytes);
    if (shape.threads <= kAheadThreads) return shape;
  } else {
    const int cluster_blocks = smallest_cluster(row_packs, 8 * kBlockThreads, device);
    const RowShape shape =
        shape_of_registers(RowPlace::kRegisters, row_packs, 8, cluster_blocks, 0);
    if (shape.threads <= kBlockThreads) return shape;
  }
  const int packs = backward ? 2 : 4;
  const int64_t chunk = int64_t{packs} * kBlockThreads;
  const int cluster_blocks = device.max_cluster_blocks;
  const int64_t slice_packs = ceil_div(ceil_div(row_packs, cluster_blocks), chunk) * chunk;
  return {RowPlace::kShared, packs,       kBlockThreads,
          cluster_blocks,    slice_packs, slice_packs * staged_bytes};
}

// A block reads a few chunks at least before it meets the others of its cluster.
RowShape uncached_shape(bool backward, int64_t row_packs, const DeviceProperties& device) {
  const int packs = backward ? 2 : 4;
  const int64_t wanted = ceil_div(row_packs, packs);
  const int threads =
      wanted <= kWarp ? power_of_two_from(wanted) : std::min(whole_warps(wanted), kBlockThreads);
  const int64_t chunk = int64_t{packs} * threads;
  constexpr int kChunks = 4;
  const int cluster_blocks = smallest_cluster(row_packs, kChunks * chunk, device);
  const int64_t slice_packs = ceil_div(ceil_div(row_packs, cluster_blocks), chunk) * chunk;
  return {RowPlace::kRegisters, packs, threads, cluster_blocks, slice_packs, 0};
}

RowShape shape_in(SoftmaxTier tier, SoftmaxPass pass, int64_t row_packs, int pack_bytes,
                  const DeviceProperties& device) {
  if (tier == SoftmaxTier::kWarp) return warp_shape(row_packs);
  if (tier == SoftmaxTier::kBlock) return block_shape(pass, row_packs, pack_bytes, device);
  return uncached_shape(pass == SoftmaxPass::kBackward, row_packs, device);
}

bool holds(SoftmaxTier tier, SoftmaxPass pass, int cols, DType x, DType y,
           const DeviceProperties& device) {
  if (tier == SoftmaxTier::kUncached) return true;
  if (x == DType::kFloat64) return false;
  const int64_t row_packs = ceil_div(cols, softmax_pack(x, y));
  if (tier == SoftmaxTier::kWarp) return row_packs <= kMaxWarpPacks;
  const int pack_bytes = softmax_pack(x, y) * size_of(pass == SoftmaxPass::kBackward ? y : x);
  return block_shape(pass, row_packs, pack_bytes, device).shared_bytes + kStaticShared <=
         device.shared_bytes_per_block;
}

}  // namespace

int softmax_pack(DType x, DType y) { return 16 / std::max(size_of(x), size_of(y)); }

bool softmax_tier_holds(SoftmaxTier tier, bool backward, int cols, DType x, DType y,
                        const DeviceProperties& device) {
  if (tier == SoftmaxTier::kAuto) return true;
  if (backward) return holds(tier, SoftmaxPass::kBackward, cols, x, y, device);
  return holds(tier, SoftmaxPass::kForward, cols, x, y, device) &&
         holds(tier, SoftmaxPass::kMaskedForward, cols, x, y, device);
}

SoftmaxPlan plan_softmax(SoftmaxTier tier, SoftmaxPass pass, int64_t rows, int cols, DType x,
                         DType y, const DeviceProperties& device) {
  if (tier == SoftmaxTier::kAuto) {
    tier = SoftmaxTier::kUncached;
    for (const SoftmaxTier shorter : {SoftmaxTier::kBlock, SoftmaxTier::kWarp}) {
      if (holds(shorter, pass, cols, x, y, device)) tier = shorter;
    }
  }
  SoftmaxPlan plan{};
  plan.tier = tier;
  plan.overlap = device.max_cluster_blocks > 1;
  plan.pack = softmax_pack(x, y);
  const int pack_bytes = plan.pack * size_of(pass == SoftmaxPass::kBackward ? y : x);
  const RowShape shape = shape_in(tier, pass, ceil_div(cols, plan.pack), pack_bytes, device);
  plan.place = shape.place;
  plan.packs = shape.packs;
  plan.threads_per_row = shape.threads;
  plan.cluster_blocks = shape.cluster_blocks;
  plan.slice = static_cast<int>(std::min<int64_t>(shape.slice_packs * plan.pack, INT_MAX));
  plan.shared_bytes = static_cast<int>(shape.shared_bytes);
  // Small blocks of short rows: many are resident, and hide each other's loads.
  plan.rows_per_block = tier == SoftmaxTier::kBlock || plan.threads_per_row > kWarp
                            ? 1
                            : kWarpTierThreads / plan.threads_per_row;
  int64_t clusters = ceil_div(rows, plan.rows_per_block);
  if (plan.place == RowPlace::kAhead) {
    const int resident = plan.threads_per_row <= kBlockThreads ? 2 : 1;
    clusters = std::min<int64_t>(clusters, device.cluster_multiprocessors(plan.cluster_blocks) *
                                               resident / plan.cluster_blocks);
  }
  plan.blocks = clamp_grid(clusters * plan.cluster_blocks);
  return plan;
}

SoftmaxColumnsPlan plan_softmax_columns(bool backward, bool vectorized, int64_t outer, int cols,
                                        int64_t inner, DType x, DType y,
                                        const DeviceProperties& device) {
  SoftmaxColumnsPlan plan{};
  plan.pack = vectorized ? softmax_pack(x, y) : 1;
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
