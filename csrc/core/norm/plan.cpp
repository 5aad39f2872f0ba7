#include "core/norm/plan.h"

#include <algorithm>
#include <climits>

namespace fused_norm {
namespace {

constexpr int kWarp = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int pack_elements(DType x, DType y) { return 16 / std::max(size_of(x), size_of(y)); }

// Rows up to a warp's packs take the lanes they need, as a power of two; longer rows whole warps.
int threads_for(int64_t row_packs, int packs) {
  const int64_t threads = ceil_div(row_packs, packs);
  if (threads > kWarp / 2) return static_cast<int>(ceil_div(threads, kWarp) * kWarp);
  int lanes = 1;
  while (lanes < threads) lanes *= 2;
  return lanes;
}

// Packs a thread in a forward kernel: as many as keep few threads idle. The more, the fewer threads
// take part in the row's sums; kernels that add have none for 3, to keep their number low.
int forward_packs(int64_t block_packs, bool adds, int cluster_blocks) {
  if (cluster_blocks > 1 || block_packs > 4 * kMaxForwardThreads) return kMostPacks;
  int best = 2;
  for (int packs = adds ? 4 : 3; packs <= 4; ++packs) {
    const int threads = threads_for(block_packs, packs);
    if (packs > kMaxShortPacks && threads < kWarp) break;
    if (8 * packs * threads <= 9 * best * threads_for(block_packs, best)) best = packs;
  }
  return best;
}

int clamp_grid(int64_t blocks) { return static_cast<int>(std::clamp<int64_t>(blocks, 1, INT_MAX)); }

// Static shared memory of the kernels, rounded up.
constexpr int kStaticShared = 5 * 1024;

}  // namespace

NormPlan plan_norm_forward(int64_t rows, int cols, DType x, DType y, bool adds,
                           const DeviceProperties& device) {
  // Four warps keep the number of blocks low where rows are short.
  constexpr int kBlockThreads = 128;

  NormPlan plan{};
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
    plan.cluster_blocks = 1;
    plan.packs = 4;
    plan.threads_per_row = std::min(threads_for(row_packs, plan.packs), kMaxForwardThreads);
  } else {
    plan.tier = Tier::kRegisters;
    plan.packs = forward_packs(block_packs, adds, plan.cluster_blocks);
    plan.threads_per_row = threads_for(block_packs, plan.packs);
  }
  plan.rows_per_block = std::max(1, kBlockThreads / plan.threads_per_row);
  plan.blocks = clamp_grid(ceil_div(rows, plan.rows_per_block) * plan.cluster_blocks);
  return plan;
}

NormBackwardPlan plan_norm_backward(int64_t rows, int cols, DType x, DType y, bool from_output,
                                    const DeviceProperties& device) {
  // dweight and dbias take two fp32 accumulators a column, in registers: 16 columns a thread leave
  // 128 registers to each of 512 threads, and so bound a block's columns at 8192. Longer rows are
  // spread over a cluster.
  constexpr int kBlockThreads = 512;
  constexpr int kMaxColsPerThread = 16;

  NormBackwardPlan plan{};
  plan.overlaps = device.max_cluster_blocks > 1;
  plan.pack = pack_elements(x, y);
  const int64_t row_packs = ceil_div(cols, plan.pack);
  // Staged as fp32: the weight, and bias and 1 / weight; in the end the block's sums of dweight and
  // dbias.
  const int column_vectors = from_output ? 3 : 2;

  const int max_packs = kMaxColsPerThread / plan.pack;
  plan.cluster_blocks = 1;
  while (plan.cluster_blocks < device.max_cluster_blocks &&
         ceil_div(row_packs, plan.cluster_blocks) > int64_t{kBlockThreads} * max_packs) {
    plan.cluster_blocks *= 2;
  }
  const int64_t block_packs = ceil_div(row_packs, plan.cluster_blocks);
  int packs = block_packs <= kWarp ? 1 : 2;
  while (packs < max_packs && threads_for(block_packs, packs) > kBlockThreads / 2) packs *= 2;
  const int threads = threads_for(block_packs, packs);
  const int64_t staged = int64_t{threads} * packs * plan.pack * column_vectors * 4;
  if (x != DType::kFloat64 && threads <= kBlockThreads &&
      staged + kStaticShared <= device.shared_bytes_per_block) {
    plan.tier = Tier::kRegisters;
    plan.packs = packs;
    plan.threads_per_row = threads;
    plan.rows_per_block = plan.cluster_blocks > 1 ? 1 : kBlockThreads / threads;
    plan.shared_bytes = static_cast<int>(staged);
    // Persistent: as many blocks as are resident at once, and no more than there is work for.
    const int usable = device.cluster_multiprocessors(plan.cluster_blocks) / plan.cluster_blocks;
    plan.partials =
        clamp_grid(std::min<int64_t>(ceil_div(rows, plan.rows_per_block), std::max(1, usable)));
    plan.blocks = plan.partials * plan.cluster_blocks;
    return plan;
  }

  plan.tier = Tier::kStreaming;
  plan.cluster_blocks = 1;
  plan.packs = 4;
  plan.threads_per_row = std::min(threads_for(row_packs, plan.packs), kBlockThreads);
  plan.rows_per_block = std::max(1, 128 / plan.threads_per_row);
  plan.blocks = clamp_grid(ceil_div(rows, plan.rows_per_block));
  plan.tiles = static_cast<int>(ceil_div(row_packs, kTileThreads));
  // Eight tiles' blocks a multiprocessor hide the loads of each other. More partial rows would only
  // be summed later; but a thread sums no more than 64 rows in sequence, so that rounding errors
  // stay those of a shallow tree.
  constexpr int kMaxRowsInSequence = 64;
  const int64_t wanted = std::max(ceil_div(int64_t{8} * device.sm_count, plan.tiles),
                                  ceil_div(rows, kMaxRowsInSequence));
  plan.partials = static_cast<int>(std::min({wanted, rows, int64_t{65535}}));
  return plan;
}

}  // namespace fused_norm
