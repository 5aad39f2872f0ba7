// Rows of a Hopper kernel's tiles: hidden ones made zero, finished ones written.
#pragma once

#include <cstdint>

#include "core/attention/hopper_ptx.cuh"
#include "core/attention/hopper_work.cuh"

namespace fused_norm::hopper {

// Rows of a tile for which hidden(row) become zeros, whatever they were: a NaN there
// would survive its weight of 0. By a warpgroup, before its own products and a barrier of its
// threads; others may do the same at the same time.
template <typename Tile, typename Hidden>
__device__ __forceinline__ void clear_rows(char* tile, Hidden hidden) {
  constexpr int kParts = Tile::kRowBytes / 16;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < Tile::kRows * kParts * Tile::kPanels; i += 128) {
    if (hidden(i / kParts % Tile::kRows)) reinterpret_cast<int4*>(tile)[i] = make_int4(0, 0, 0, 0);
  }
  CopyBarrier::order_writes();
}

// Row `row` of a head of the sequence of a tile's own side.
template <typename T>
__device__ __forceinline__ T* row_of(const AttentionTensor& tensor, const WorkTile& work, int head,
                                     int row) {
  return static_cast<T*>(tensor.data) + work.batch * tensor.batch_stride +
         head * tensor.head_stride + int64_t{work.query_begin + row} * tensor.row_stride;
}

// Thirty-two columns at a time, the four threads of a row give each other parts, so that each
// stores 16 bytes in a row.
template <typename T, int kCount>
__device__ __forceinline__ void store_row(const float (&values)[kCount], int row, float factor,
                                          T* out, int columns) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int block = 0; block < kCount / 16; ++block) {
    uint32_t parts[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 16 * block + 4 * i + 2 * row;
      parts[i] = round_pair(values[at] * factor, values[at + 1] * factor, T());
    }
    // Part i of thread t goes to thread i, as its t-th.
    const bool odd = lane & 1, high = lane & 2;
    uint32_t a = __shfl_xor_sync(~0u, odd ? parts[0] : parts[1], 1);
    uint32_t b = __shfl_xor_sync(~0u, odd ? parts[2] : parts[3], 1);
    const uint32_t low0 = odd ? a : parts[0], low1 = odd ? parts[1] : a;
    const uint32_t high0 = odd ? b : parts[2], high1 = odd ? parts[3] : b;
    a = __shfl_xor_sync(~0u, high ? low0 : high0, 2);
    b = __shfl_xor_sync(~0u, high ? low1 : high1, 2);
    const uint4 pack = high ? make_uint4(a, b, high0, high1) : make_uint4(low0, low1, a, b);
    const int column = 32 * block + 8 * lane;
    if (out != nullptr && column < columns) *reinterpret_cast<uint4*>(out + column) = pack;
  }
}

// The same in fp32, of a row that is there; each thread stores what it has.
template <int kCount>
__device__ __forceinline__ void store_row(const float (&values)[kCount], int row, float factor,
                                          float* out, int columns) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const int column = 8 * i + threadIdx.x % 4 * 2, at = 4 * i + 2 * row;
    if (column >= columns) return;
    *reinterpret_cast<float2*>(out + column) =
        make_float2(values[at] * factor, values[at + 1] * factor);
  }
}

}  // namespace fused_norm::hopper
