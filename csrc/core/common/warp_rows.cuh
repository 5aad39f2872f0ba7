// Rows of a 16-bit type whose columns are dealt out to the lanes of warps one by one: neighbouring
// columns are neighbouring lanes'.
#pragma once

#include "core/common/flat_rows.h"
#include "core/common/pack.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

// A lane's columns of a row: its own and those a warp's width, two, ... further on, kUnits
// in all. The first kSure of them every lane has.
template <int kUnits, int kSure>
struct LaneColumns {
  int cols, first, left;  // of the row; the lane's first; columns of the row from that on
  __device__ __forceinline__ explicit LaneColumns(int cols)
      : cols(cols), first(threadIdx.x % kWarpSize), left(cols - first) {}
  __device__ __forceinline__ bool inside(int i) const { return i < kSure || i * kWarpSize < left; }
};

// A lane's values of kRows rows that follow each other, of which its first column is at `own`;
// `filler` past the row's end.
template <int kRows, int kUnits, int kSure, typename X>
__device__ __forceinline__ void load_rows(const X* own, const LaneColumns<kUnits, kSure>& columns,
                                          float filler, float (&values)[kRows][kUnits]) {
  const Bits<X>* const bits = reinterpret_cast<const Bits<X>*>(own);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      values[k][i] = filler;
      if (columns.inside(i)) values[k][i] = value_of<X>(bits[k * columns.cols + i * kWarpSize]);
    }
  }
}

// Rounds them, and writes them there.
template <int kRows, int kUnits, int kSure, typename X>
__device__ __forceinline__ void store_rows(X* own, const LaneColumns<kUnits, kSure>& columns,
                                           const float (&values)[kRows][kUnits]) {
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    Bits<X>* const bits = reinterpret_cast<Bits<X>*>(own) + k * columns.cols;
#pragma unroll
    for (int i = 0; i < kUnits; i += 2) {
      const bool two = i + 1 < kUnits;
      const uint32_t pair = round_pair(values[k][i], two ? values[k][i + two] : 0.0f, X());
      if (columns.inside(i)) bits[i * kWarpSize] = static_cast<uint16_t>(pair);
      if (two && columns.inside(i + 1))
        bits[(i + 1) * kWarpSize] = static_cast<uint16_t>(pair >> 16);
    }
  }
}

// The sum over a lane's columns of a row, of add(i, sum) each: two chains.
template <int kUnits, typename Add>
__device__ __forceinline__ float chain_sum(Add add) {
  float chains[2] = {};
#pragma unroll
  for (int i = 0; i < kUnits; ++i) chains[i % 2] = add(i, chains[i % 2]);
  return chains[0] + chains[1];
}

}  // namespace fused_norm
