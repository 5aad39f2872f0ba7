#include "core/norm/plan.h"

#include <algorithm>
#include <climits>
#include <optional>

#include "core/common/fair_share.h"
#include "core/common/sizes.h"

namespace fused_norm {
namespace {

constexpr int kBanks = 32;

// Rows up to a warp's packs take the lanes they need, as a power of two; longer rows whole warps.
int threads_for(int64_t row_packs, int packs) {
  const int64_t threads = ceil_div(row_packs, packs);
  if (threads > kWarpSize / 2) return static_cast<int>(ceil_div(threads, kWarpSize) * kWarpSize);
  int lanes = 1;
  while (lanes < threads) lanes *= 2;
  return lanes;
}

// Packs a thread in a forward kernel. In one warp those that a row does not reach cost nothing;
// longer rows have four, as more rows than a multiprocessor holds are the faster the fewer threads
// take part in a sum (2560 columns: 58 microseconds with two, 49 with four; LayerNorm, 10^8 bytes
// of bf16 on an H200).
constexpr int kMostFourPacks = 4 * kMaxForwardThreads;
int forward_packs(int64_t block_packs, int cluster_blocks) {
  if (cluster_blocks > 1 || block_packs > kMostFourPacks) return kMostPacks;
  if (block_packs <= 3 * kWarpSize / 2) return 3;
  return block_packs <= 2 * kWarpSize ? 2 : 4;
}

// Rows so few that all are at work at once: two packs in twice as many threads then shorten each
// one's way, and give the same bits (512 x 4096: 3.8 in place of 4.4 microseconds; LayerNorm's of
// fp32 would not, runs_of()).
bool takes_two_packs(int64_t rows, int64_t block_packs, const DeviceProperties& device) {
  const int threads = threads_for(block_packs, 2);
  if (threads > kMaxForwardThreads) return false;
  const int rows_at_once = forward_threads(false, 2) * forward_blocks(false) / threads;
  return rows <= int64_t{rows_at_once} * device.sm_count;
}

// kStreaming: whole warps, as many as have columns; short rows share a block. (2^31 blocks of so
// many threads reach more rows of fp64 than any memory holds.)
constexpr int kStreamedBlockThreads = 256;
int streamed_threads(int cols, bool forward, DType x, int most) {
  const int columns = streamed_columns(forward, size_of(x) == 8 ? 8 : 4);
  return static_cast<int>(std::min<int64_t>(ceil_div(cols, columns * kWarpSize) * kWarpSize, most));
}

// Partial rows: gridDim.y of the column tiles.
constexpr int64_t kMaxPartials = 65535;

// Static shared memory of the kernels, rounded up.
constexpr int kStaticShared = 5 * 1024;

// Long rows where there are bulk copies, which came with clusters: how `spread` blocks share a row,
// if they can.
//
// Blocks of less than kMaxRingThreads share a multiprocessor, up to 12 warps, and hide each other's
// barriers; more would make more partial rows. Three stages hold the row at work, the one before,
// of which dx is still to be written, and the next. There are more where these would leave too
// little on its way, or room for another block: when kernels overlap, the first multiprocessors to
// be free then get that too, and others stay empty (a block of 384 threads, the kernel alone: 100
// in place of 81 microseconds, RMSNorm, 8192 x 6144 in bf16 on an H200). Each stage beyond costs
// about 1 % for want of overlap.
struct RingShape {
  int threads, stages, shared_bytes;
  int blocks;  // of a multiprocessor
};

std::optional<RingShape> ring_shape(int spread, int cols, int pack, int saved_size, int dy_size,
                                    const RingKernel& kernel, const DeviceProperties& device) {
  constexpr int kEnoughThreads = 384, kMinStages = 3;
  constexpr int kStatic = 1024, kEnoughBytes = 40 * 1024;
  const int capacity = device.shared_bytes_per_block + kReservedPerBlock;
  const int64_t block_packs = ceil_div(ceil_div(cols, pack), spread);
  if (block_packs * pack > (kernel.most_threads - kernel.listing_threads) * kRingCols)
    return std::nullopt;
  const int threads = threads_for(block_packs, kRingCols / pack);
  const int block_cols = std::min(cols, threads * kRingCols);
  const int params = kernel.param_vectors * threads * kRingCols * 4;
  const int stage = ring_slot(block_cols * saved_size) + ring_slot(block_cols * dy_size);
  const int beside = params + kStatic + kReservedPerBlock;
  const int wanted = spread > 1 ? 1 : static_cast<int>(ceil_div(kEnoughThreads, threads));
  for (int blocks = wanted; blocks > 0; --blocks) {
    auto have_registers = [&](int blocks) {
      return blocks * (threads + kernel.listing_threads) <= kernel.most_threads;
    };
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
// and somewhat longer. (2048 x 50000 with 5, 6, 7 and 8 blocks: 189, 229, 238 and 241 microseconds,
// 1024 x 32768 with 3, 4 and 5: 73.9, 70.6 and 86.2; LayerNorm, bf16 on an H200.)
//
// Known of all chips, not asked of this one: of one model, too, they have different processing
// clusters, and a row's dx would have other bits where the sizes differ.
int64_t ring_time(int spread, int threads) {
  constexpr int kProcessingCluster = 16, kSchedulers = 4, kLonger = 2;
  const int filled = kProcessingCluster / spread * spread;
  const int64_t warps = ceil_div(threads, kWarpSize * kSchedulers);
  return (int64_t{1} << 20) * spread * (warps + kLonger) / filled;
}

// Threads of a block that does not rather become two. From 12288 columns of bf16 on that is faster
// for RMSNorm (148 in place of 165 microseconds with both stages, 8192 x 12288, of which
// ring_slot()'s whole lines are a part) and not for LayerNorm; fp32, with twice the bytes of a row
// to wait for, gains sooner (5162 x 6044: RMSNorm 108 and 105, LayerNorm 109 and 112; 4096 x 8192:
// 112 and 109, 114 and 104; H200).
int most_threads_of_one(bool rms, int saved_size) {
  if (saved_size == 4) return rms ? 352 : 480;
  return rms ? 640 : kMaxRingThreads;
}

// Fills in the plan, if so many blocks as a cluster can have can share the row. One or two do if
// they can, as these fill the chip.
bool plan_ring(int64_t rows, int cols, int saved_size, int dy_size, const RingKernel& kernel,
               bool rms, const DeviceProperties& device, NormBackwardPlan& plan) {
  // A thread adds up no more rows in sequence, so that rounding errors stay those of a shallow
  // tree.
  constexpr int kMaxRowsInSequence = 128;
  std::optional<RingShape> best;
  int best_spread = 0;
  int64_t best_time = 0;
  auto consider = [&](int spread) {
    if (device.cluster_multiprocessors(spread) == 0) return;
    const auto shape = ring_shape(spread, cols, plan.pack, saved_size, dy_size, kernel, device);
    if (!shape) return;
    if (spread == 1 && shape->threads > most_threads_of_one(rms, saved_size) &&
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
  // Larger clusters than all chips have, for the longest rows (131072 columns of bf16 would be
  // streamed otherwise) and for the parameters of an output. Where those have no room even so, the
  // input goes without too: what it takes as one kernel is then one from the output.
  if (!best && ring_shape(kMaxRingBlocks, cols, plan.pack, dy_size, dy_size,
                          ring_kernel(/*from_output=*/true, /*rms=*/false), device))
    consider(kMaxRingBlocks);
  if (!best) return false;

  plan.tier = Tier::kRing;
  plan.packs = kRingCols / plan.pack;
  plan.threads_per_row = best->threads;
  plan.rows_per_block = 1;
  plan.cluster_blocks = best_spread;
  plan.stages = best->stages;
  plan.shared_bytes = best->shared_bytes;
  const int resident = device.cluster_multiprocessors(best_spread) * best->blocks / best_spread;
  const int64_t clusters = std::min<int64_t>(rows, resident);
  const int64_t rounds = ceil_div(rows, clusters);
  const int64_t sets = std::min(ceil_div(rounds, kMaxRowsInSequence), kMaxPartials / clusters);
  plan.blocks = static_cast<int>(clusters * best_spread);
  plan.partial_sets = static_cast<int>(sets);
  plan.rows_in_sequence = static_cast<int>(std::min<int64_t>(ceil_div(rounds, sets), INT_MAX));
  plan.partials = static_cast<int>(clusters * sets);
  return true;
}

// Blocks for each tile of columns, or 0 where there are too many rows for rows and columns apart: a
// thread then adds up no more than kRows of the rows that its block takes `rows_at_once` of.
// Measured on an H200 (bf16, LayerNorm): 512 x 4096 8.3 in place of 10.0 microseconds, 1024 x 4096
// 13.7 in place of 13.1.
int few_splits(int64_t rows, int cols, int rows_at_once, const DeviceProperties& device) {
  constexpr int64_t kRows = 8, kMostElements = int64_t{1} << 21;
  constexpr int kMinRowsAtOnce = 16;  // shorter rows leave a block too few threads
  if (rows > kMostElements / cols || rows_at_once < kMinRowsAtOnce) return 0;
  const int most = std::min(device.max_cluster_blocks, kMaxFewSplits);
  int splits = 1;
  while (splits < most && rows > kRows * rows_at_once * splits) splits *= 2;
  return rows <= kRows * rows_at_once * splits ? splits : 0;
}

// Clusters that walk over the rows, in place of one for each row. Their parameters, of what
// LayerNorm reads from the second-level cache two thirds, are read but once, and the next rows are
// on their way all the time: bf16 on an H200, 2048 x 50000, LayerNorm 145 -> 114 microseconds,
// RMSNorm 122 -> 114.
ForwardRing forward_ring(const NormPlan& plan, int64_t rows, bool rms,
                         const DeviceProperties& device) {
  constexpr int kStatic = 1024, kMaxThreads = 65536 / 80;
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
  const int blocks = room(2) >= 1 && 2 * plan.threads_per_row <= kMaxThreads ? 2 : 1;
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

// What is done once a row, by each of its lanes, are most of LayerNorm's instructions for short
// rows (131072 x 128: 19.8 microseconds, 18.5 so; 198116 x 256 in fp16: 55.9 and 52.8; 500000 x 64
// would go from 36 to 44, as two lanes read too little side by side; RMSNorm, which lacks no
// instructions, from 18.2 to 18.7; H200). Four packs in half of the lanes give the same bits.
FewLanes few_lanes(const NormPlan& plan, int64_t rows, int64_t row_packs,
                   const DeviceProperties& device) {
  constexpr int kMinLanes = 4;
  const int lanes = threads_for(row_packs, kFewLanesPacks);
  if (lanes < kMinLanes || lanes >= kWarpSize || lanes == plan.threads_per_row) return {};
  const int rows_per_block = kForwardBlockThreads / lanes;
  const int blocks = clamp_grid(ceil_div(rows, rows_per_block));
  const int params = kForwardBlockThreads * params_bytes(kFewLanesPacks, true);
  return {lanes, rows_per_block, blocks,
          std::max(params, forward_share(kForwardBlockThreads, kFewLanesPacks, blocks, device))};
}

// The least columns of each lane that suffice for so many in a warp, or kFlatClasses.
int flat_class(int64_t cols) {
  int row_class = 0;
  while (row_class < kFlatClasses && kFlatUnits[row_class] * kWarpSize < cols) ++row_class;
  return row_class;
}

constexpr int kMostPartCols = kFlatUnits[kFlatClasses - 1] * kWarpSize;

// Cuts rows in parts for warps of a block, as few as there can be. False if they are too long; and
// for longer ones of even length, which are dealt out in pairs.
bool set_parts(int cols, FlatRows& flat) {
  if (cols > kBlockParts * kMostPartCols || (cols > kMostPartCols && cols % 2 == 0)) return false;
  int parts = 1;
  while (parts * kMostPartCols < cols) parts *= 2;
  cut_in_parts(cols, parts, flat);
  return true;
}

// Forward of short rows in tiles; no slots where there can be none. Longer ones are dealt out in
// registers, and are ahead of torch.compile even so. (bf16 of 128 MB on an H200, LayerNorm and
// RMSNorm, microseconds, dealt out: 129 columns 168 and 155, torch.compile 124 and 87; 513: 137 and
// 103, torch.compile 145 and 110; 1025: 123 and 90, 301 and 162; 4097: 92 and 79, 230 and 160.)
FlatRows forward_tiles(int64_t rows, int cols, const DeviceProperties& device) {
  constexpr int kMinCols = 17, kSlots = 3;
  constexpr int64_t kMostBytes = 17 * 1024;
  FlatRows flat{};
  int row_class = 0;
  while (row_class < kForwardTileClasses && kForwardTileUnits[row_class] * kWarpSize < cols)
    ++row_class;
  if (cols < kMinCols || row_class == kForwardTileClasses || device.max_cluster_blocks == 1)
    return flat;
  flat.row_class = row_class;
  // As much as there is room for, but a tile for each block, if there are so many rows.
  const int64_t share = ceil_div(rows, int64_t{kForwardTileBlocks} * device.sm_count) * cols * 2;
  const int64_t room = flat_room(flat, kSlots, kForwardTileBlocks, device);
  const int rows_at_work =
      kFlatThreads / kWarpSize * forward_tile_rows(kForwardTileUnits[row_class]);
  set_tiles(rows_at_work, cols, kSlots, std::min({share, room, kMostBytes}), flat);
  flat.shared_bytes = kSlots * flat.tile_bytes;
  const int64_t resident = resident_flat(flat, kForwardTileBlocks, device);
  flat.blocks = clamp_grid(std::min(ceil_div(rows, flat.rows), resident * device.sm_count));
  return flat;
}

// Whether backward's rows go in tiles, if they can: 16-bit rows that are not whole packs, but for
// the shortest, of which most lanes would have nothing (7 columns: 752 microseconds, as packs 276);
// and of whole packs those that would leave so many more lanes without a column as packs, which go
// to a power of two of them. From the output, whose parameters are read anew for each row, that
// must be many. (LayerNorm, bf16 of 128 MB a tensor on an H200: 33 columns 469 -> 190, 65: 338 ->
// 134, 129: 200 -> 116, 257: 219 -> 111, 513: 174 -> 108; 72: 165 -> 123, 80: 150 -> 114, 144: 152
// -> 108, 272: 131 -> 108, 384: 111 -> 105; 112 would go from 117 to 121, 256 from 106 to 109, 192
// from 122 to 114 but 100000 rows of it from 38.7 to 40.0; from the output 129: 196 -> 126, 400
// would go from 112 to 115.)
bool goes_flat(int cols, int pack, bool from_output) {
  constexpr int kMinCols = 17;
  if (cols < kMinCols) return false;
  if (cols % pack != 0) return true;
  const int row_class = flat_class(cols);
  if (row_class == kFlatClasses) return false;
  int lanes = 1;
  while (lanes * pack < cols) lanes *= 2;
  const double busy = static_cast<double>(cols) / (kFlatUnits[row_class] * kWarpSize);
  const double busy_as_packs = static_cast<double>(cols) / (lanes * pack);
  return busy > busy_as_packs + 0.12 && busy_as_packs <= (from_output ? 0.625 : 1.0);
}

// Fills in the plan for rows in tiles: always, however many they are and wherever they lie. False
// if they are too long, or there is too little shared memory.
bool plan_flat(int64_t rows, int cols, int column_vectors, const DeviceProperties& device,
               NormBackwardPlan& plan) {
  constexpr int kWarps = kFlatThreads / kWarpSize, kSlots = 3;
  FlatRows flat{};
  if (!set_parts(cols, flat)) return false;
  flat.row_class = flat_class(cols_of_part(flat, 0));
  if (flat.parts > 1) flat.row_class = std::max(flat.row_class, kShorterFlatClasses);
  // More than two parts wait for each other too often, but where as packs rows would leave much of
  // a block idle: those of more than 4096 columns (LayerNorm: 777 columns 160 -> 113, 1025: 160 ->
  // 117, 1500 would go from 112 to 124, 3333 from 129 to 142, 4097: 171 -> 127). From the output,
  // registers do not suffice for the most columns (777: 169 -> 129, 1025 167 either way).
  constexpr int kMostParts = 2, kWideCols = 4096;
  if (flat.parts > kMostParts && cols <= kWideCols) return false;
  if (flat.parts > 1 && column_vectors > 1 && flat.row_class == kFlatClasses - 1) return false;
  const int units = kFlatUnits[flat.row_class];
  const bool longer = flat.row_class >= kShorterFlatClasses;
  if (column_vectors > 1)
    flat.params_bytes = ring_slot(staged_columns(flat, units) * column_vectors * 4);
  // As much as there is room for, but a tile for each block, if there are so many rows.
  const int most_blocks = flat_backward_blocks(longer);
  const int64_t share = ceil_div(rows, int64_t{most_blocks} * device.sm_count) * cols * 2;
  const int64_t most_bytes = longer ? 17 * 1024 : 11 * 1024;
  const int64_t room = flat_room(flat, kSlots * kFlatTensors, most_blocks, device);
  const int rows_at_work = kWarps / flat.parts * flat_rows_at_once(units);
  set_tiles(rows_at_work, cols, kSlots, std::min({share, room, most_bytes}), flat);
  flat.shared_bytes = std::max(flat.params_bytes + flat.slots * kFlatTensors * flat.tile_bytes,
                               kWarps * units * kWarpSize * 2 * 4);  // in the end, its warps' sums
  const int64_t resident = resident_flat(flat, most_blocks, device);
  if (resident == 0) return false;
  flat.blocks = clamp_grid(std::min(ceil_div(rows, flat.rows), resident * device.sm_count));

  plan.tier = Tier::kFlat;
  plan.pack = 1;
  plan.packs = units;
  plan.threads_per_row = kWarpSize * flat.parts;
  plan.rows_per_block = rows_at_work;
  plan.cluster_blocks = 1;
  plan.blocks = plan.partials = flat.blocks;
  plan.shared_bytes = flat.shared_bytes;
  plan.flat = flat;
  return true;
}

}  // namespace

NormForwardPlan plan_norm_forward(int64_t rows, int cols, DType x, DType y, bool rms,
                                  const DeviceProperties& device) {
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
    plan.packs = forward_packs(block_packs, plan.cluster_blocks);
    const bool same_bits = rms || size_of(x) == 2;
    if (plan.packs == 4 && same_bits && takes_two_packs(rows, block_packs, device)) plan.packs = 2;
    plan.threads_per_row = threads_for(block_packs, plan.packs);
  }
  const bool streams = plan.tier == Tier::kStreaming;
  plan.rows_per_block =
      std::max(1, (streams ? kStreamedBlockThreads : kForwardBlockThreads) / plan.threads_per_row);
  plan.blocks = clamp_grid(ceil_div(rows, plan.rows_per_block) * plan.cluster_blocks);
  if (plan.tier == Tier::kRegisters)
    plan.shared_bytes =
        forward_share(plan.threads_per_row * plan.rows_per_block, plan.packs, plan.blocks, device);
  if (plan.cluster_blocks > 1 && x == y) plan.ring = forward_ring(plan, rows, rms, device);
  if (plan.tier == Tier::kRegisters && x == y && size_of(x) == 2 && !rms &&
      !takes_two_packs(rows, row_packs, device))
    plan.few_lanes = few_lanes(plan, rows, row_packs, device);
  if (plan.tier == Tier::kRegisters && x == y && size_of(x) == 2 && cols % plan.pack != 0)
    plan.tiles = forward_tiles(rows, cols, device);
  return plan;
}

NormBackwardPlan plan_norm_backward(int64_t rows, int cols, DType x, DType y, bool from_output,
                                    bool rms, const DeviceProperties& device, int gate_groups) {
  const bool gated = gate_groups > 0;
  gate_groups = std::max(gate_groups, 1);
  NormBackwardPlan plan{};
  plan.overlaps = device.max_cluster_blocks > 1;
  plan.pack = pack_elements(x, y);
  // Small blocks where a multiprocessor would have large ones in turn, two at a time (1024 x 32768:
  // LayerNorm 70 -> 66 microseconds, RMSNorm 59 -> 57; 8192 x 768: 14.9 and 15.6; bf16, H200).
  const int64_t sum_blocks = ceil_div(cols, kWarpSize) * (rms ? 1 : 2);
  plan.sum_threads = sum_blocks > 2 * device.sm_count ? kFewSumThreads : kSumThreads;
  const int64_t row_packs = ceil_div(cols, plan.pack);
  const bool whole_packs = cols % plan.pack == 0;
  const bool bulk_copies = device.max_cluster_blocks > 1 && !gated;  // those of rings and tiles
  const int saved_size = size_of(from_output ? y : x);
  const int param_vectors = !from_output ? 1 : rms && x == y ? 2 : 3;  // RMSNorm has no shift
  if (bulk_copies && x == y && size_of(x) == 2 && goes_flat(cols, plan.pack, from_output) &&
      plan_flat(rows, cols, from_output ? 3 : 1, device, plan))
    return plan;
  // Rows that are not whole packs are dealt out in elements or pairs to whole warps. Longer ones
  // come through shared memory, two packs to a thread, by bulk copies. The shortest would leave
  // most of a warp idle, and are shifted.
  constexpr int kFewPacks = kWarpSize / 4, kManyPacks = 5 * kWarpSize;
  plan.dealt_out =
      !whole_packs && row_packs > kFewPacks && (row_packs <= kManyPacks || bulk_copies);
  // One pack a thread leaves more threads to a multiprocessor than two, but the sums of a row then
  // go over more warps, and in one warp nobody waits. To put packs together takes registers.
  const bool single = row_packs <= kWarpSize || (plan.dealt_out && row_packs <= kManyPacks) ||
                      (whole_packs && row_packs > 2 * kWarpSize && row_packs <= 3 * kWarpSize);
  const int packs = single ? 1 : 2;
  const int needed = static_cast<int>(std::min<int64_t>(threads_for(row_packs, packs), 1 << 20));
  const int threads = plan.dealt_out ? std::max(needed, kWarpSize) : needed;
  const int block_threads = backward_threads(packs);

  // Shared memory holds the weight as fp32, and with it bias and 1 / weight, and rows on their way;
  // in the end the sums of dweight and dbias.
  const int64_t params =
      int64_t{std::max(threads, kWarpSize)} * packs * plan.pack * param_vectors * 4;
  int64_t row_bytes = int64_t{threads} *
                      slice_queue_bytes(packs, plan.pack, saved_size, size_of(y) * (gated ? 2 : 1));
  if (plan.dealt_out) {
    row_bytes = packs == 1 ? 0
                           : int64_t{kRowStages} *
                                 (ring_slot(cols * saved_size) + ring_slot(cols * size_of(y)));
  }
  auto shared_bytes = [&](int groups) {
    const int64_t sums = int64_t{groups} * threads * packs * plan.pack * 2 * 4;
    return std::max(params + groups * row_bytes, sums);
  };
  int groups = block_threads / threads;
  while (groups > 0 && shared_bytes(groups) + kStaticShared > device.shared_bytes_per_block)
    --groups;

  // Long rows pass through a ring in shared memory, which leaves registers to more threads; shorter
  // ones too, where they would fill but a part of a block's threads. Rows that are not
  // whole packs, or are taken apart by the parameters of each column, read too much there.
  const bool fills = threads <= block_threads / 2 || threads > block_threads * 7 / 8;
  const bool simple = whole_packs && !from_output;
  const bool by_ring =
      x != DType::kFloat64 && bulk_copies && (groups == 0 || (!fills && packs == 2 && simple));
  if (by_ring && plan_ring(rows, cols, saved_size, size_of(y),
                           ring_kernel(from_output, rms && x == y), rms, device, plan))
    return plan;

  plan.cluster_blocks = 1;
  if (x != DType::kFloat64 && groups > 0) {
    plan.tier = Tier::kRegisters;
    plan.packs = packs;
    plan.threads_per_row = threads;
    plan.rows_per_block = groups;
    plan.shared_bytes = static_cast<int>(shared_bytes(groups));
    // Persistent: as many blocks as are resident at once, and no more than there is work for.
    // Kernels with named barriers have all 16 of a block's: four blocks a multiprocessor.
    const int resident =
        std::min({4, backward_blocks(packs) * block_threads / (threads * groups),
                  device.shared_bytes_per_block / (plan.shared_bytes + kStaticShared)});
    const int64_t most = std::max(resident * device.sm_count / gate_groups, 1);
    plan.partials = clamp_grid(std::min(ceil_div(rows / gate_groups, groups), most) * gate_groups);
    plan.blocks = plan.partials;
    // Static shared memory of that kernel, rounded up, beside its parameters.
    constexpr int kFewStatic = 8 * 1024;
    const int params = (from_output ? 3 : 1) * threads * packs * plan.pack * 4;
    if (!gated && packs == 2 && x == y && whole_packs &&
        params + kFewStatic <= device.shared_bytes_per_block)
      plan.few_splits = few_splits(rows, cols, threads * plan.pack / kFewColumns, device);
    return plan;
  }

  plan.tier = Tier::kStreaming;
  plan.pack = 1;
  plan.packs = plan.shared_bytes = 0;
  plan.threads_per_row = streamed_threads(cols, false, x, kMaxRowMeansThreads);
  plan.rows_per_block = std::max(1, kStreamedBlockThreads / plan.threads_per_row);
  plan.blocks = clamp_grid(ceil_div(rows, plan.rows_per_block));
  const int tile_cols = kTileThreads * streamed_columns(false, size_of(x) == 8 ? 8 : 4);
  plan.tiles = static_cast<int>(ceil_div(cols, tile_cols));
  // Eight tiles' blocks a multiprocessor hide the loads of each other. More partial rows would only
  // be summed later; but a thread sums no more than 64 rows in sequence, so that rounding errors
  // stay those of a shallow tree.
  constexpr int kMaxRowsInSequence = 64;
  const int64_t wanted = std::max(ceil_div(int64_t{8} * device.sm_count, plan.tiles),
                                  ceil_div(rows, kMaxRowsInSequence));
  plan.partials = static_cast<int>(std::min({wanted, rows, kMaxPartials}));
  return plan;
}

}  // namespace fused_norm
