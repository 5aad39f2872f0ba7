// How a softmax runs on a chip: a pure function of sizes and device properties, tested on the host.
//
// What shapes a row's reduction tree (tier, packs, threads, cluster and slices) depends on the
// row's length and dtypes alone, so a row's result never depends on how many rows come with it. The
// number of rows chooses only the grid.
#pragma once

#include <cstdint>

#include "core/common/types.h"
#include "core/softmax/tier.h"

namespace fused_norm {

// Elements a pack: 16 bytes of the wider of the two tensors.
int softmax_pack(DType x, DType y);

// Where a row of SoftmaxTier::kBlock lies.
enum class RowPlace : uint8_t { kRegisters, kShared };

struct SoftmaxPlan {
  SoftmaxTier tier;
  RowPlace place;
  int pack;             // elements
  int packs;            // packs a thread (kShared and kUncached: at a time)
  int threads_per_row;  // 1 to 32 lanes, or whole warps, of each block that shares the row
  int rows_per_block;
  int cluster_blocks;  // blocks that share a row
  int slice;           // columns of the row for each of these
  int blocks;
  int shared_bytes;  // dynamic
  bool overlap;      // programmatic dependent launch, from Hopper on
};

SoftmaxPlan plan_softmax(SoftmaxTier tier, bool backward, bool log, int64_t rows, int cols, DType x,
                         DType y, const DeviceProperties& device);

// Over another dimension than the last (columns.cuh): `splits` threads share the columns of a pack
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
