// How rows go in tiles (tile_ring.cuh) and to warps (warp_rows.cuh). Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/common/types.h"

namespace fused_norm {

// Rows of one 16-bit dtype.
struct FlatRows {
  int rows;          // of a tile
  int blocks;        // of the grid; 0: rows do not go in tiles
  int shared_bytes;  // of a block
  int row_class;     // which of the numbers of columns a lane that there are kernels for
  int tile_bytes;
};

// Tiles in a block's shared memory: the one at work and those on their way.
constexpr int kFlatSlots = 3;
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

// Tiles of so many tensors, in blocks of which registers leave room for `most_blocks` on a
// multiprocessor. Each has `rows_at_work` rows at work at a time, a multiple of its warps, so that
// tiles are whole granules. No blocks if there is no room for one.
inline FlatRows plan_tiles(int64_t rows, int cols, int row_class, int rows_at_work, int tensors,
                           int most_blocks, const DeviceProperties& device) {
  constexpr int64_t kMostBytes = 17 * 1024;
  const int capacity = device.shared_bytes_per_block + kReservedPerBlock;
  const int beside = kReservedPerBlock + kFlatStatic;
  const int64_t room = (capacity / most_blocks - beside) / (kFlatSlots * tensors) / 128 * 128;
  // As much as there is room for, but a tile for each block, if there are so many rows.
  const int row_bytes = cols * 2;
  const int64_t share = ceil_div(rows, int64_t{most_blocks} * device.sm_count) * row_bytes;
  const int64_t times = std::min({share, room, kMostBytes}) / (int64_t{rows_at_work} * row_bytes);
  FlatRows flat{};
  flat.row_class = row_class;
  flat.rows = rows_at_work * static_cast<int>(std::max<int64_t>(1, times));
  // Copies fill slots that start at multiples of 128 up to 7 % faster (H200).
  flat.tile_bytes = (flat.rows * row_bytes + 127) / 128 * 128;
  flat.shared_bytes = kFlatSlots * tensors * flat.tile_bytes;
  const int64_t resident = std::min(most_blocks, capacity / (flat.shared_bytes + beside));
  if (resident == 0) return {};
  flat.blocks = clamp_grid(std::min(ceil_div(rows, flat.rows), resident * device.sm_count));
  return flat;
}

}  // namespace fused_norm
