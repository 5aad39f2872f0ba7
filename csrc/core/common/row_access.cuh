// Where rows start.
#pragma once

#include "core/common/pack.cuh"

namespace fused_norm {

// n / divisor, for n below 2^31.
__device__ __forceinline__ uint32_t divide(uint32_t n, const Divider& by) {
  return (__umulhi(n, by.multiplier) + n) >> by.shift;
}

// Where row `row` starts.
template <typename T>
__device__ __forceinline__ T* row_start(T* base, const RowLayout& layout, int64_t row) {
  if (layout.inner == 0) return base + row * layout.stride;
  const uint32_t index = static_cast<uint32_t>(row);
  const uint32_t outer = divide(index, {layout.inner, layout.multiplier, layout.shift});
  return base + outer * layout.outer_stride + (index - outer * layout.inner) * layout.stride;
}
// The same in elements from the first row on.
__device__ __forceinline__ int64_t row_offset(const RowLayout& layout, int64_t row) {
  const char* const base = nullptr;
  return row_start(base, layout, row) - base;
}

// Whether the rows after `row` reach at least `elements` further in memory.
__device__ __forceinline__ bool rows_follow(const RowLayout& layout, int64_t row, int64_t rows,
                                            int cols, int elements) {
  if (layout.inner == 0) {
    // Neither factor need be known beyond `elements`.
    const int64_t most = elements;
    const int left = static_cast<int>(min(rows - 1 - row, most));
    return left * static_cast<int>(min(min(layout.stride, int64_t{cols}), most)) >= elements;
  }
  return row < rows && row_offset(layout, rows - 1) - row_offset(layout, row) >= elements;
}

}  // namespace fused_norm
