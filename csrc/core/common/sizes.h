// Numbers that plans and kernels share, and how plans count. Plain C++.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

namespace fused_norm {

constexpr int kWarpSize = 32;

// Bytes: bulk copies start and end at multiples of it (bulk_copy.cuh).
constexpr int kGranule = 16;

// Bytes of a multiprocessor's shared memory that each block takes beside its own.
constexpr int kReservedPerBlock = 1024;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of a grid.
constexpr int clamp_grid(int64_t blocks) {
  return static_cast<int>(std::clamp<int64_t>(blocks, 1, INT_MAX));
}

}  // namespace fused_norm
