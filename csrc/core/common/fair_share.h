// How the blocks of small grids are spread evenly over a chip. Plain C++.
#pragma once

#include "core/common/types.h"

namespace fused_norm {

// Shared memory that each block of a kernel asks for, needed or not, so that a multiprocessor takes
// no more than its share of a grid that does not fill the chip. Kernels that overlap otherwise pile
// up where the one before ends first, and leave other multiprocessors empty. `resident`: blocks
// that a multiprocessor has room for. Shares of up to four lose more than they gain, and so do
// those that leave room for one more alone (docs/measurements.md).
inline int fair_shared_bytes(int blocks, int resident, const DeviceProperties& device) {
  constexpr int kFew = 4, kStatic = 2 * 1024;
  const int share = static_cast<int>(ceil_div(blocks, device.sm_count));
  if (share <= kFew || share >= resident - 1) return 0;
  const int capacity = device.shared_bytes_per_block + kReservedPerBlock;
  return capacity / share / 128 * 128 - kReservedPerBlock - kStatic;
}

}  // namespace fused_norm
