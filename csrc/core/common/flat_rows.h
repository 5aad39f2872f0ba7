// How rows go in tiles (tile_ring.cuh) and to warps (warp_rows.cuh). Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/common/types.h"

namespace fused_norm {

// Rows of one 16-bit dtype.
struct FlatRows {
  int parts = 1;       // warps that share a row, a power of two of them
  int part_cols;       // columns for each of them
  int slots;           // of shared memory, for the tiles at work and those on their way
  int rows;            // of a tile
  int rows_per_block;  // at work at a time
  int blocks;          // of the grid
  int row_class;       // where the compiler knows how many columns a lane has: which number
  int params_bytes, tile_bytes, shared_bytes;
};

// Columns that the warps of a row may ask for, of so many a lane: their last part's too. Even.
constexpr int staged_columns(const FlatRows& flat, int units) {
  return ((flat.parts - 1) * flat.part_cols + units * 32 + 1) / 2 * 2;
}
constexpr int kMaxFlatSlots = 4;
constexpr int kFlatThreads = 256;
constexpr int kMaxParts = 8;  // all of a block's warps

// Static shared memory of the kernels, rounded up.
constexpr int kFlatStatic = 2048;

// Bytes of shared memory for a tile: copies fill slots that start at multiples of 128 up to 7 %
// faster (H200).
constexpr int flat_tile_bytes(int bytes) { return (bytes + 127) / 128 * 128; }

// Sets tiles up to `most_bytes` if they can be; a block has so many rows at work at a time.
inline void set_tiles(int rows_at_work, int cols, int slots, int64_t most_bytes, FlatRows& flat) {
  constexpr int kElementBytes = 2, kGranule = 16;
  flat.slots = slots;
  flat.rows_per_block = rows_at_work;
  const int64_t times = most_bytes / (int64_t{rows_at_work} * cols * kElementBytes);
  flat.rows = rows_at_work * static_cast<int>(std::max<int64_t>(1, times));
  // Those that are not whole granules begin and end in the middle of one.
  const int bytes = flat.rows * cols * kElementBytes;
  flat.tile_bytes = flat_tile_bytes(bytes % kGranule == 0 ? bytes : bytes + 2 * kGranule);
}

// Blocks of a multiprocessor, of so many that its registers leave room for.
constexpr int kReservedPerBlock = 1024;
inline int resident_flat(const FlatRows& flat, int most, const DeviceProperties& device) {
  const int capacity = device.shared_bytes_per_block + kReservedPerBlock;
  return std::min(most, capacity / (flat.shared_bytes + kFlatStatic + kReservedPerBlock));
}
// Bytes for a tile where so many blocks hold so many beside parameters.
inline int flat_room(const FlatRows& flat, int tiles, int blocks, const DeviceProperties& device) {
  const int capacity = (device.shared_bytes_per_block + kReservedPerBlock) / blocks;
  const int left = capacity - kReservedPerBlock - kFlatStatic - flat.params_bytes;
  return left / tiles / 128 * 128 - 2 * 16;
}

}  // namespace fused_norm
