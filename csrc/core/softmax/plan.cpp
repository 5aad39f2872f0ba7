#include "core/softmax/plan.h"

#include <algorithm>
#include <climits>

namespace fused_norm {
namespace {

constexpr int kWarp = 32;
constexpr int kBlockThreads = 512;
constexpr int kStaticShared = 2048;  // of the kernels over rows, rounded up

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
  int packs;
  int threads;
  int cluster_blocks;
  int64_t slice_packs;
  int shared_bytes;
  bool holds;  // whether the tier can hold the row at all
};

// A lane has up to eight packs of x, or four of both y and dy, in flight; rows of at least four
// packs are read by groups of at least four lanes, 64 bytes at a time.
RowShape warp_shape(bool backward, int64_t row_packs) {
  const int max_packs = backward ? 4 : 8;
  int packs = row_packs <= 4 ? 1 : row_packs <= 8 ? 2 : 4;
  if (row_packs > int64_t{packs} * kWarp) packs = max_packs;
  const int lanes = std::min(power_of_two_from(ceil_div(row_packs, packs)), kWarp);
  return {packs, lanes, 1, row_packs, 0, row_packs <= int64_t{max_packs} * kWarp};
}

// Rows in registers take four packs a thread, eight where neither block nor cluster has more
// threads to give. Longer ones are kept in shared memory.
RowShape block_shape(bool backward, int64_t row_packs, int pack_bytes,
                     const DeviceProperties& device) {
  int cluster_blocks = 1;
  for (const int packs : {4, 8}) {
    cluster_blocks = 1;
    while (cluster_blocks < device.max_cluster_blocks &&
           row_packs > int64_t{packs} * kBlockThreads * cluster_blocks) {
      cluster_blocks *= 2;
    }
    const int64_t threads = ceil_div(ceil_div(row_packs, cluster_blocks), packs);
    if (threads <= kBlockThreads) {
      const int whole = whole_warps(threads);
      return {packs, whole, cluster_blocks, int64_t{packs} * whole, 0, true};
    }
  }
  const int packs = backward ? 2 : 4;
  const int64_t chunk = int64_t{packs} * kBlockThreads;
  const int64_t slice_packs = ceil_div(ceil_div(row_packs, cluster_blocks), chunk) * chunk;
  const int64_t bytes = slice_packs * pack_bytes * (backward ? 2 : 1);
  const bool holds = bytes + kStaticShared <= device.shared_bytes_per_block;
  return {packs, kBlockThreads, cluster_blocks, slice_packs, static_cast<int>(holds ? bytes : 0),
          holds};
}

// A block reads a few chunks at least before it meets the others of its cluster.
RowShape uncached_shape(bool backward, int64_t row_packs, const DeviceProperties& device) {
  const int packs = backward ? 2 : 4;
  const int64_t wanted = ceil_div(row_packs, packs);
  const int threads =
      wanted <= kWarp ? power_of_two_from(wanted) : std::min(whole_warps(wanted), kBlockThreads);
  const int64_t chunk = int64_t{packs} * threads;
  constexpr int kChunks = 4;
  int cluster_blocks = 1;
  while (cluster_blocks < device.max_cluster_blocks &&
         row_packs > kChunks * chunk * cluster_blocks) {
    cluster_blocks *= 2;
  }
  return {packs, threads, cluster_blocks,
          ceil_div(ceil_div(row_packs, cluster_blocks), chunk) * chunk, 0, true};
}

RowShape shape_in(SoftmaxTier tier, bool backward, int64_t row_packs, int pack_bytes,
                  const DeviceProperties& device) {
  if (tier == SoftmaxTier::kWarp) return warp_shape(backward, row_packs);
  if (tier == SoftmaxTier::kBlock) return block_shape(backward, row_packs, pack_bytes, device);
  return uncached_shape(backward, row_packs, device);
}

// Bytes of a pack as it is read.
int pack_bytes_of(bool backward, DType x, DType y) {
  return softmax_pack(x, y) * size_of(backward ? y : x);
}

}  // namespace

int softmax_pack(DType x, DType y) { return 16 / std::max(size_of(x), size_of(y)); }

bool softmax_tier_holds(SoftmaxTier tier, bool backward, int cols, DType x, DType y,
                        const DeviceProperties& device) {
  if (tier == SoftmaxTier::kAuto || tier == SoftmaxTier::kUncached) return true;
  return x != DType::kFloat64 && shape_in(tier, backward, ceil_div(cols, softmax_pack(x, y)),
                                          pack_bytes_of(backward, x, y), device)
                                     .holds;
}

SoftmaxPlan plan_softmax(SoftmaxTier tier, bool backward, int64_t rows, int cols, DType x, DType y,
                         const DeviceProperties& device) {
  SoftmaxPlan plan{};
  if (tier == SoftmaxTier::kAuto) {
    tier = SoftmaxTier::kUncached;
    for (const SoftmaxTier shorter : {SoftmaxTier::kBlock, SoftmaxTier::kWarp}) {
      if (softmax_tier_holds(shorter, backward, cols, x, y, device)) tier = shorter;
    }
  }
  plan.tier = tier;
  plan.overlap = device.max_cluster_blocks > 1;
  plan.pack = softmax_pack(x, y);
  const RowShape shape = shape_in(tier, backward, ceil_div(cols, plan.pack),
                                  pack_bytes_of(backward, x, y), device);
  plan.packs = shape.packs;
  plan.threads_per_row = shape.threads;
  plan.cluster_blocks = shape.cluster_blocks;
  plan.slice = static_cast<int>(std::min<int64_t>(shape.slice_packs * plan.pack, INT_MAX));
  plan.shared_bytes = shape.shared_bytes;
  // Small blocks of short rows: many are resident, and hide each other's loads.
  constexpr int kWarpTierThreads = 128;
  plan.rows_per_block =
      plan.threads_per_row > kWarp ? 1 : kWarpTierThreads / plan.threads_per_row;
  if (tier == SoftmaxTier::kBlock) plan.rows_per_block = 1;
  plan.blocks = clamp_grid(ceil_div(rows, plan.rows_per_block) * plan.cluster_blocks);
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
