// How rows go in tiles (tile_ring.cuh) and to warps (warp_rows.cuh). Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/common/sizes.h"
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

// Bytes of shared memory for a tile: copies fill slots that start at multiples of 128 up to 7 %
// faster (H200).
constexpr int flat_tile_bytes(int bytes) { return (bytes + 127) / 128 * 128; }

// Sets tiles up to `most_bytes` if they can be; a block has so many rows at work at a time, a
// multiple of its warps: tiles are whole granules.
inline void set_tiles(int rows_at_work, int cols, int slots, int64_t most_bytes, FlatRows& flat) {
  constexpr int kElementBytes = 2;
  flat.slots = slots;
  const int64_t times = most_bytes / (int64_t{rows_at_work} * cols * kElementBytes);
  flat.rows = rows_at_work * static_cast<int>(std::max<int64_t>(1, times));
  flat.tile_bytes = flat_tile_bytes(flat.rows * cols * kElementBytes);
}

// Blocks of a multiprocessor, of so many that its registers leave room for.
inline int resident_flat(const FlatRows& flat, int most, const DeviceProperties& device) {
  const int capacity = device.shared_bytes_per_block + kReservedPerBlock;
  return std::min(most, capacity / (flat.shared_bytes + kFlatStatic + kReservedPerBlock));
}
// Bytes for a tile where so many blocks hold so many beside parameters.
inline int flat_room(const FlatRows& flat, int tiles, int blocks, const DeviceProperties& device) {
  const int capacity = (device.shared_bytes_per_block + kReservedPerBlock) / blocks;
  const int left = capacity - kReservedPerBlock - kFlatStatic - flat.params_bytes;
  return left / tiles / 128 * 128;
}

// Fills in the tiles of so many tensors, of `most_bytes` at most, in blocks of which registers
// leave room for `most_blocks` on a multiprocessor. Each has `rows_at_work` rows at work at a time,
// and at least so many bytes of shared memory. False if there is no room for one.
inline bool plan_tiles(int64_t rows, int cols, int rows_at_work, int tensors, int most_blocks,
                       int64_t most_bytes, const DeviceProperties& device, FlatRows& flat,
                       int least_bytes = 0) {
  // As much as there is room for, but a tile for each block, if there are so many rows.
  const int64_t share = ceil_div(rows, int64_t{most_blocks} * device.sm_count) * cols * 2;
  set_tiles(rows_at_work, cols, kMaxFlatSlots, std::min(share, most_bytes), flat);
  flat.shared_bytes =
      std::max(flat.params_bytes + flat.slots * tensors * flat.tile_bytes, least_bytes);
  const int64_t resident = resident_flat(flat, most_blocks, device);
  flat.blocks = clamp_grid(std::min(ceil_div(rows, flat.rows), resident * device.sm_count));
  return resident > 0;
}

}  // namespace fused_norm
