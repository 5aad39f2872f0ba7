// What the plans of forward and of backward share. Plain C++.
#pragma once

#include <algorithm>

#include "core/norm/plan.h"

namespace fused_norm {

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
