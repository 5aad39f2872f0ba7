// How a softmax runs on a chip: a pure function of sizes and device properties, tested on the host.
//
// What shapes a row's reduction tree (tier, packs, threads, cluster and slices) depends on the
// row's length and dtypes alone, so a row's result never depends on how many rows come with it. The
// number of rows chooses only the grid, and how a ring's warps are dealt out to blocks, of which
// its tree is independent.
#pragma once

#include <cstdint>

#include "core/common/flat_rows.h"
#include "core/common/types.h"
#include "core/softmax/tier.h"

namespace fused_norm {

// Where a row of SoftmaxTier::kWarp or kBlock lies. kRing: in shared memory, on its way through
// (span_ring.cuh). kFlat: on its way in a tile of rows, each of which is a warp's (flat.cu), where
// the tier is the plan's choice.
enum class RowPlace : uint8_t { kRegisters, kRing, kFlat };

// kUncached: columns that a thread reads at a time, of each of the tensors.
// Exponentials of fp64 are long, so that those of columns past a short row would count.
constexpr int streamed_elements(int tensors, bool fp64) { return fp64 ? 2 : 16 / tensors; }

// Threads of a block of SoftmaxTier::kWarp, and most of one of the other tiers.
constexpr int kWarpTierThreads = 128, kBlockTierThreads = 512;

// Of kFlat: warps have so many columns of a row in each lane, exactly as many as it takes, and so
// many rows at a time. In backward those of more columns have a kernel of their own, as they take
// more registers.
constexpr int kSoftmaxFlatClasses = 5, kShorterSoftmaxClasses = 4;
constexpr int kSoftmaxFlatUnits[kSoftmaxFlatClasses] = {3, 5, 9, 17, 33};
constexpr int softmax_flat_rows(int units) { return units <= 3 ? 4 : units <= 9 ? 2 : 1; }
constexpr int softmax_flat_blocks(bool longer) { return longer ? 2 : 3; }

// Of kRing: each warp has a span of the row, which comes in pieces of so many packs a lane, of each
// of the tensors, two in backward, through a ring of slots.
constexpr int span_piece_packs(int tensors) { return 4 / tensors; }
constexpr int kMaxSpanWarps = 16;  // of a block
constexpr int kSpanSlotBytes = 4 * kWarpSize * kGranule, kSpanEdgeBytes = 2 * kGranule;

// Whether there are also pieces of the next row in the ring.
constexpr int span_edge_sets(int pieces, int slots) { return slots > pieces ? 2 : 1; }
// Shared memory of a warp: slots, edges and barriers. In whole lines of 128 bytes, so that each
// warp's slots start on one: copies fill them up to 5 % faster (bf16, 2048 x 151936, H200).
constexpr int span_ring_bytes(int tensors, int pieces, int slots) {
  const int edges = span_edge_sets(pieces, slots);
  const int bytes = slots * kSpanSlotBytes + tensors * edges * kSpanEdgeBytes + slots * 8;
  return (bytes + 127) / 128 * 128;
}

// A pack is 16 bytes of the wider of the two tensors; kRing: a granule of what is read; kFlat and
// kUncached: an element. Packs of kRing and kUncached are those that a thread has at a time.
struct SoftmaxPlan : KernelPlan {
  SoftmaxPass pass;
  SoftmaxTier tier;
  RowPlace place;
  int slice;          // columns of the row for each block; kRing: for each of their warps
  int pieces, slots;  // kRing: of a warp's span, and of its ring
  FlatRows flat;      // kFlat
};

SoftmaxPlan plan_softmax(SoftmaxTier tier, SoftmaxPass pass, int64_t rows, int cols, DType x,
                         DType y, const DeviceProperties& device);

// Over another dimension than the last (columns.cu): `splits` threads share the columns of a pack
// of neighbours, and a block holds `lanes` such packs.
struct SoftmaxColumnsPlan {
  int pack;
  int lanes, splits;
  int blocks;
  int shared_bytes;  // what the block reads is kept there; 0: in registers, or nowhere
};

constexpr int kColumnThreads = 256;
// Packs that a thread has in registers, of each tensor.
constexpr int kForwardColumnItems = 8, kBackwardColumnItems = 4;

// `vectorized`: inner is a multiple of a pack, and the pointers are aligned to it.
SoftmaxColumnsPlan plan_softmax_columns(bool backward, bool vectorized, int64_t outer, int cols,
                                        int64_t inner, DType x, DType y,
                                        const DeviceProperties& device);

}  // namespace fused_norm
