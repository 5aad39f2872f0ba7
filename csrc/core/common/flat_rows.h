// How short rows go in tiles (tile_ring.cuh). Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/common/types.h"

namespace fused_norm {

// Short rows of one 16-bit dtype, in tiles of so many.
struct FlatRows {
  int slots;           // of shared memory, for the tiles at work and those on their way
  int rows;            // of a tile: whole 16-byte granules
  int rows_per_block;  // at work at a time
  int blocks;          // of the grid
  int row_class;       // where the compiler knows how many columns a lane has: which number
  int params_bytes, tile_bytes, shared_bytes;
};
constexpr int kMaxFlatSlots = 4;
constexpr int kFlatThreads = 256;

// Static shared memory of the kernels, rounded up.
constexpr int kFlatStatic = 2048;

// Bytes of shared memory for a tile: copies fill slots that start at multiples of 128 up to 7 %
// faster (H200).
constexpr int flat_tile_bytes(int bytes) { return (bytes + 127) / 128 * 128; }

// Tiles up to `most_bytes` if they can be; a block has so many rows at work at a time.
inline FlatRows tiles_of(int rows_at_work, int cols, int slots, int64_t most_bytes) {
  constexpr int kElementBytes = 2, kGranuleRows = 16 / kElementBytes;
  FlatRows flat{};
  flat.slots = slots;
  flat.rows_per_block = rows_at_work;
  const int least = std::max(rows_at_work, kGranuleRows);  // both are powers of two
  const int64_t times = most_bytes / (int64_t{least} * cols * kElementBytes);
  flat.rows = least * static_cast<int>(std::max<int64_t>(1, times));
  flat.tile_bytes = flat_tile_bytes(flat.rows * cols * kElementBytes);
  return flat;
}

// Blocks of a multiprocessor, of so many that its registers leave room for.
inline int resident_flat(const FlatRows& flat, int most, const DeviceProperties& device) {
  constexpr int kReservedPerBlock = 1024;
  const int capacity = device.shared_bytes_per_block + kReservedPerBlock;
  return std::min(most, capacity / (flat.shared_bytes + kFlatStatic + kReservedPerBlock));
}

}  // namespace fused_norm
