// How a norm runs on a chip: a pure function of sizes and device properties, tested on the host.
//
// What shapes a row's reduction tree depends on the row's length, the dtypes and the kind of norm
// alone, so a row's result never depends on how many rows come with it. The number of rows chooses
// the grid, how it is spread, and splits of the same tree: in forward whether four packs of a
// thread are two threads' (slice_statistics.cuh), in backward how many packs a lane of a short row
// has (add_up_row()).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/common/flat_rows.h"
#include "core/common/types.h"

namespace fused_norm {

enum class Tier : uint8_t {
  kRegisters,  // the row stays in the registers of its threads: read once
  kRing,       // backward: long rows pass through shared memory by bulk copies, read once
  kStreaming,  // any length: the row is read twice
};

// A pack is 16 bytes of the wider of the two tensors; kStreaming: an element. kStreaming has no
// packs a thread, and its kernels of backward do not overlap.
struct NormPlan : KernelPlan {
  Tier tier;
};

// Forward: a row of less than a warp's share has up to four packs in each of some lanes, others two
// or four in each thread of whole warps, and the longest kMostPacks in kMaxForwardThreads, which
// blocks of a cluster may share.
constexpr int kMostPacks = 8;
constexpr int kMaxForwardThreads = 512;

// What bounds a forward kernel's registers: so many threads in so many blocks. Twice 576 threads
// leave 56 registers each, and so have three blocks of 384 or nine of 128 resident.
constexpr int forward_threads(bool adds, int packs) {
  return adds || packs == kMostPacks ? kMaxForwardThreads : 576;
}
constexpr int forward_blocks(bool adds) { return adds ? 1 : 2; }

// Forward: whether a kernel has code of its own for rows that are dealt out, in elements or pairs,
// where all parameters are of the rows' type. Others have one that deals out elements, whatever the
// parameters' types and the norm. (Short 16-bit rows go in tiles.)
constexpr bool deals_out_typed(bool adds, bool one_dtype, int packs, bool whole_warps, int size) {
  return one_dtype && !adds && (size == 4 || (whole_warps && packs != kMostPacks));
}

// Shared memory of a thread for weight and (bias) bias of so many packs, as they are. Behind those
// of all threads (lists): kListedBytes for a listed value of each of a row's first listed_ahead()
// threads. 192, not all, so that two blocks of LayerNorm with 16384 columns of 16 bit take 132 KB,
// and the first-level cache has the rest.
constexpr int params_bytes(int packs, bool bias) { return 16 * packs * (bias ? 2 : 1); }
constexpr int kListedBytes = 4;
constexpr int listed_ahead(int packs, int threads) {
  return packs != kMostPacks && threads > 192 ? 192 : threads;
}

// kRegisters, clusters, one dtype: where rows are regular, and all parameters there and of that
// dtype too, clusters that walk over the rows do the same, if `slots` is not zero
// (forward_ring.cuh).
struct ForwardRing {
  int slots;   // for rows in shared memory, those on their way
  int blocks;  // of the grid
  int shared_bytes;
};
constexpr int kMaxForwardSlots = 4;
constexpr int kForwardRingThreads = 800;  // that a multiprocessor has registers for

struct NormForwardPlan : NormPlan {
  ForwardRing ring;
  // kRegisters, one 16-bit dtype, short rows that are not whole packs: without an addend they go in
  // tiles (flat.cu), if `tiles.blocks` is not zero, wherever they lie.
  FlatRows tiles;
};

// The kernels that add have no streaming tier: where the plan says so, x is added up before.
// lists: whether the call has room for listed columns; backward: whether its forward call had.
NormForwardPlan plan_norm_forward(int64_t rows, int cols, DType x, DType y, bool rms,
                                  const DeviceProperties& device, bool lists = false);

// With a gate, `gate_groups` of its groups make a row of the weight: kRegisters for whole packs, or
// kStreaming, which has no gate; blocks and partials are a multiple of gate_groups.
//
// kRegisters, kRing: one kernel gives dx and a partial row of dweight and dbias per block,
// or some. kStreaming: a kernel for the sums of each row (threads_per_row), then one over tiles.
struct NormBackwardPlan : NormPlan {
  int partials;  // rows of partial sums: one or more a block, or row chunks of the tiles
  int tiles;     // kStreaming: column tiles of kTileThreads threads
  // kRegisters, few rows: blocks for each tile of kFewColumns columns in the one kernel that then
  // does all, without partial sums, or 0.
  int few_splits;
  // kRing: rows in shared memory at once; partial rows a block (or cluster), and the rows in each.
  int stages, partial_sets, rows_in_sequence;
  int sum_threads;  // of a block that adds up partial rows: kSumThreads or kFewSumThreads
};

// Forward in tiles: a warp has so many columns of a row in each lane, the least that suffice, and
// so many rows at a time; and blocks of a multiprocessor that registers leave room for.
constexpr int kForwardTileClasses = 8;
constexpr int kForwardTileUnits[kForwardTileClasses] = {2, 3, 4, 5, 7, 9, 13, 17};
constexpr int kForwardTileBlocks = 3;
// Rows of a tile that a warp has at a time.
constexpr int forward_tile_rows(int units) { return units <= 4 ? 4 : units <= 5 ? 2 : 1; }

constexpr int kFewColumns = 32;
constexpr int kMaxFewSplits = 4;

// kRing: a thread's columns, and the most threads that a kernel's registers leave room for on a
// multiprocessor: 80 a thread, or 128 from the output, which hold weights and scales too. Shared
// memory has so many parameters of a column: the weight, or the shifts of two rows.
constexpr int kRingCols = 16, kMaxRingThreads = 768;
constexpr int kMaxRingStages = 6;
constexpr int ring_threads(bool from_output) { return from_output ? 512 : kMaxRingThreads; }
constexpr int ring_params(bool from_output) { return from_output ? 2 : 1; }

// Threads of a block of kRegisters, and blocks of that size that its registers leave room for: 80 a
// thread suffice for one pack's columns, two packs' take 128, three packs' 168.
constexpr int backward_threads(int packs) { return packs == 1 ? 256 : packs == 2 ? 512 : 384; }
constexpr int backward_blocks(int packs) { return packs == 1 ? 3 : 1; }

// Shared memory of each thread for the packs of two rows of both tensors, which in the end holds
// its sums of dweight and dbias.
constexpr int slice_queue_bytes(int packs, int pack, int saved_size, int dy_size) {
  return 2 * packs * pack * (saved_size + dy_size);
}

// Bytes of shared memory for so many of a row: copies start and end at multiples of 16, where the
// row's first byte need not lie. Slots start at multiples of 128, which copies fill faster.
constexpr int ring_slot(int bytes) { return (bytes + 2 * kGranule - 1 + 127) / 128 * 128; }

// kStreaming: a thread's columns at a time, by the bytes of an accumulator; in backward's second
// kernel they are the thread's in all rows. Most threads of a block for rows, and those for a tile.
constexpr int streamed_columns(bool forward, int accumulator_size) {
  return (forward ? 64 : 16) / accumulator_size;
}
constexpr int kMaxRowMeansThreads = 512, kTileThreads = 128;
constexpr int kSumThreads = 512, kFewSumThreads = 128;

NormBackwardPlan plan_norm_backward(int64_t rows, int cols, DType x, DType y, bool from_output,
                                    bool rms, const DeviceProperties& device, int gate_groups = 0,
                                    bool lists = false);

// Rows up to a warp's packs take the lanes they need, as a power of two; longer rows whole warps.
inline int threads_for(int64_t row_packs, int packs) {
  const int64_t threads = ceil_div(row_packs, packs);
  if (threads > kWarpSize / 2) return static_cast<int>(ceil_div(threads, kWarpSize) * kWarpSize);
  int lanes = 1;
  while (lanes < threads) lanes *= 2;
  return lanes;
}

// kStreaming: whole warps, as many as have columns; short rows share a block. (2^31 blocks of so
// many threads reach more rows of fp64 than any memory holds.)
constexpr int kStreamedBlockThreads = 256;
inline int streamed_threads(int cols, bool forward, DType x, int most) {
  const int columns = streamed_columns(forward, size_of(x) == 8 ? 8 : 4);
  return static_cast<int>(std::min<int64_t>(ceil_div(cols, columns * kWarpSize) * kWarpSize, most));
}

}  // namespace fused_norm
