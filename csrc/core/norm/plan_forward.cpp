#include <algorithm>
#include <cstdint>

#include "core/common/fair_share.h"
#include "core/norm/plan.h"

namespace fused_norm {
namespace {

// Rows so few that all are at work at once: two packs in twice as many threads then shorten each
// one's way, and give the same bits (LayerNorm's of fp32 would not, runs_of()).
bool takes_two_packs(int64_t rows, int64_t block_packs, const DeviceProperties& device) {
  const int threads = threads_for(block_packs, 2);
  if (threads > kMaxForwardThreads) return false;
  const int rows_at_once = forward_threads(false, 2) * forward_blocks(false) / threads;
  return rows <= int64_t{rows_at_once} * device.sm_count;
}

// Clusters that walk over the rows, in place of one for each row. Their parameters, of what
// LayerNorm reads from the second-level cache two thirds, are read but once, and the next rows are
// on their way all the time.
ForwardRing forward_ring(const NormPlan& plan, int64_t rows, bool rms,
                         const DeviceProperties& device) {
  constexpr int kStatic = 1024;
  ForwardRing ring{};
  const int clusters = device.cluster_multiprocessors(plan.cluster_blocks) / plan.cluster_blocks;
  const int slot = plan.threads_per_row * plan.packs * 16;
  const int params = plan.threads_per_row * params_bytes(plan.packs, !rms);
  const int capacity = device.shared_bytes_per_block + kReservedPerBlock;
  const int beside = params + kStatic + kReservedPerBlock;
  auto room = [&](int blocks) {
    return std::min((capacity / blocks - beside) / slot, kMaxForwardSlots);
  };
  // One row is on its way while another is in registers, more do no good. Two blocks a
  // multiprocessor hide each other's barriers; one takes so many slots that no second one, of the
  // next kernel, has room beside it (as in ring_shape()).
  const int blocks = room(2) >= 1 && 2 * plan.threads_per_row <= kForwardRingThreads ? 2 : 1;
  // Where some have no more than two rows to walk over, others have one.
  if (room(blocks) < 1 || rows < int64_t{3} * clusters * blocks || clusters == 0) return ring;
  auto fill = [&](int slots) { return (blocks + 1) * (beside + slots * slot) > capacity; };
  ring.slots = 1;
  while (ring.slots < room(blocks) && (ring.slots < 2 || !fill(ring.slots))) ++ring.slots;
  ring.blocks = clusters * plan.cluster_blocks * blocks;
  ring.shared_bytes = params + ring.slots * slot;
  return ring;
}

// Four warps keep the number of blocks low where rows are short.
constexpr int kForwardBlockThreads = 128;

// Shared memory of a forward kernel's blocks for their fair share of the chip (fair_share.h).
int forward_share(int block_threads, int packs, int blocks, const DeviceProperties& device) {
  if (device.max_cluster_blocks == 1) return 0;  // kernels do not overlap
  const int resident = forward_threads(false, packs) * forward_blocks(false) / block_threads;
  return fair_shared_bytes(blocks, resident, device);
}

// Packs a thread, and threads, of a row or of a block's part of it. Lanes of a warp have up to
// three packs: those that a row does not reach cost nothing. Longer rows have four, as more rows
// than a multiprocessor holds are the faster the fewer threads take part in a sum. may_halve: half
// the lanes, with four packs each where others have two, may take a short row, with the same bits.
// Most instructions are there those that each lane executes once a row, in LayerNorm, and where
// columns may be listed in RMSNorm too. Two lanes would read too little side by side.
void set_threads(int64_t rows, int64_t block_packs, bool same_bits, bool may_halve,
                 const DeviceProperties& device, NormPlan& plan) {
  constexpr int kMostInLanes = 3 * kWarpSize / 2, kMostFourPacks = 4 * kMaxForwardThreads;
  const bool few_rows = takes_two_packs(rows, block_packs, device);
  plan.packs = 4;
  if (plan.cluster_blocks > 1 || block_packs > kMostFourPacks) {
    plan.packs = kMostPacks;
  } else if (block_packs > kMostInLanes &&
             (block_packs <= 2 * kWarpSize || (same_bits && few_rows))) {
    plan.packs = 2;
  }
  plan.threads_per_row = threads_for(block_packs, block_packs <= kMostInLanes ? 3 : plan.packs);
  const int half = threads_for(block_packs, 4);
  if (may_halve && !few_rows && half > 2 && half < kWarpSize) {
    plan.packs = 4;
    plan.threads_per_row = half;
  }
}

// Forward of short rows in tiles; no blocks where there can be none. Longer ones are dealt out.
FlatRows forward_tiles(int64_t rows, int cols, const DeviceProperties& device) {
  const int row_class = flat_class_of(kForwardTileUnits, cols);
  if (row_class == kForwardTileClasses || device.max_cluster_blocks == 1) return {};
  const int rows_at_work = kFlatWarps * forward_tile_rows(kForwardTileUnits[row_class]);
  return plan_tiles(rows, cols, row_class, rows_at_work, /*tensors=*/1, kForwardTileBlocks, device);
}

}  // namespace

NormForwardPlan plan_norm_forward(int64_t rows, int cols, DType x, DType y, bool rms,
                                  const DeviceProperties& device, bool lists) {
  NormForwardPlan plan{};
  plan.overlaps = device.max_cluster_blocks > 1;  // both came with compute capability 9.0
  plan.pack = pack_elements(x, y);
  const int64_t row_packs = ceil_div(cols, plan.pack);
  constexpr int kMaxBlockPacks = kMostPacks * kMaxForwardThreads;
  plan.cluster_blocks = 1;
  while (plan.cluster_blocks < device.max_cluster_blocks &&
         row_packs > int64_t{kMaxBlockPacks} * plan.cluster_blocks) {
    plan.cluster_blocks *= 2;
  }
  const int64_t block_packs = ceil_div(row_packs, plan.cluster_blocks);
  if (x == DType::kFloat64 || block_packs > kMaxBlockPacks) {
    plan.tier = Tier::kStreaming;
    plan.cluster_blocks = plan.pack = 1;
    plan.threads_per_row = streamed_threads(cols, true, x, kMaxForwardThreads);
  } else {
    plan.tier = Tier::kRegisters;
    const bool may_halve = x == y && size_of(x) == 2 && (!rms || lists) && cols % plan.pack == 0;
    set_threads(rows, block_packs, rms || size_of(x) == 2, may_halve, device, plan);
  }
  const bool streams = plan.tier == Tier::kStreaming;
  plan.rows_per_block =
      std::max(1, (streams ? kStreamedBlockThreads : kForwardBlockThreads) / plan.threads_per_row);
  plan.blocks = clamp_grid(ceil_div(rows, plan.rows_per_block) * plan.cluster_blocks);
  if (plan.tier == Tier::kRegisters)
    plan.shared_bytes =
        forward_share(plan.threads_per_row * plan.rows_per_block, plan.packs, plan.blocks, device);
  if (plan.cluster_blocks > 1 && x == y) plan.ring = forward_ring(plan, rows, rms, device);
  if (plan.tier == Tier::kRegisters && x == y && size_of(x) == 2 && cols % plan.pack != 0)
    plan.tiles = forward_tiles(rows, cols, device);
  return plan;
}

}  // namespace fused_norm
