// How rows go in tiles (tile_ring.cuh) and to warps (warp_rows.cuh). Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/common/types.h"

namespace fused_norm {

// Rows of one 16-bit dtype.
struct FlatRows {
  int slots;         // of shared memory, for the tiles at work and those on their way
  int rows;          // of a tile
  int blocks;        // of the grid
  int shared_bytes;  // of a block
  int row_class;     // where the compiler knows how many columns a lane has: which number
  int params_bytes, tile_bytes;
};

constexpr int kMaxFlatSlots = 3;
constexpr int kFlatThreads = 256;
constexpr int kFlatWarps = kFlatThreads / kWarpSize;

// Static shared memory of the kernels, rounded up.
constexpr int kFlatStatic = 2048;

// The first of the classes, of so many columns a lane each, whose columns suffice for a warp's row;
// their number if none does.
template <int kClasses>
constexpr int flat_class_of(const int (&units)[kClasses], int64_t cols) {
  int row_class = 0;
  while (row_class < kClasses && units[row_class] * kWarpSize < cols) ++row_class;
  return row_class;
}

// How many columns every lane has in rows of a class: those of the class before.
template <int kClasses>
constexpr int sure_units(const int (&units)[kClasses], int row_class) {
  return row_class == 0 ? 0 : units[row_class - 1];
}

// Bytes for a tile where so many blocks hold so many beside parameters.
inline int flat_room(const FlatRows& flat, int tiles, int blocks, const DeviceProperties& device) {
  const int capacity = (device.shared_bytes_per_block + kReservedPerBlock) / blocks;
  const int left = capacity - kReservedPerBlock - kFlatStatic - flat.params_bytes;
  return left / tiles / 128 * 128;
}

// Fills in the tiles of so many tensors, of `most_bytes` at most if they can be, in blocks of which
// registers leave room for `most_blocks` on a multiprocessor. Each has `rows_at_work` rows at work
// at a time, a multiple of its warps, so that tiles are whole granules; and at least so many bytes
// of shared memory. False if there is no room for one.
inline bool plan_tiles(int64_t rows, int cols, int rows_at_work, int tensors, int most_blocks,
                       int64_t most_bytes, const DeviceProperties& device, FlatRows& flat,
                       int least_bytes = 0) {
  // As much as there is room for, but a tile for each block, if there are so many rows.
  const int row_bytes = cols * 2;
  const int64_t share = ceil_div(rows, int64_t{most_blocks} * device.sm_count) * row_bytes;
  const int64_t times = std::min(share, most_bytes) / (int64_t{rows_at_work} * row_bytes);
  flat.slots = kMaxFlatSlots;
  flat.rows = rows_at_work * static_cast<int>(std::max<int64_t>(1, times));
  // Copies fill slots that start at multiples of 128 up to 7 % faster (H200).
  flat.tile_bytes = (flat.rows * row_bytes + 127) / 128 * 128;
  flat.shared_bytes =
      std::max(flat.params_bytes + flat.slots * tensors * flat.tile_bytes, least_bytes);
  const int capacity = device.shared_bytes_per_block + kReservedPerBlock;
  const int64_t resident =
      std::min(most_blocks, capacity / (flat.shared_bytes + kFlatStatic + kReservedPerBlock));
  flat.blocks = clamp_grid(std::min(ceil_div(rows, flat.rows), resident * device.sm_count));
  return resident > 0;
}

// Of a kernel whose warps have so many columns of a row in each lane.
inline KernelPlan plan_of_tiles(const FlatRows& flat, int units, int rows_at_work) {
  return {1, units, kWarpSize, rows_at_work, 1, flat.blocks, flat.shared_bytes, true};
}

}  // namespace fused_norm
