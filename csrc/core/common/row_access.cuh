// Where rows start, and stores of parts of a granule.
#pragma once

#include "core/common/pack.cuh"

namespace fused_norm {

namespace detail {

// Bytes [first, kBytes) of a granule, in pieces of 2, 4 and 8.
template <typename T, int kBytes>
__device__ __forceinline__ void store_from(char* start, const Words<kBytes>& words, int first) {
  if constexpr (sizeof(T) == 2) {
    if (first & 2) {
      *reinterpret_cast<uint16_t*>(start + first) =
          static_cast<uint16_t>(word_at(words, first) >> 16);
      first += 2;
    }
  }
  if (first & 4) {
    *reinterpret_cast<uint32_t*>(start + first) =
        kBytes == 8 || first < 8 ? words.at[1] : words.at[kBytes / 4 - 1];
    first += 4;
  }
  if (kBytes == 16 && first == 8)
    *reinterpret_cast<uint2*>(start + 8) = {words.at[kBytes / 8], words.at[kBytes / 4 - 1]};
}

// Bytes [0, end) of a granule.
template <typename T, int kBytes>
__device__ __forceinline__ void store_to(char* start, const Words<kBytes>& words, int end) {
  if (kBytes == 16 && (end & 8)) *reinterpret_cast<uint2*>(start) = {words.at[0], words.at[1]};
  if (end & 4)
    *reinterpret_cast<uint32_t*>(start + (end & 8)) =
        kBytes == 8 || !(end & 8) ? words.at[0] : words.at[kBytes / 8];
  if constexpr (sizeof(T) == 2) {
    if (end & 2) {
      *reinterpret_cast<uint16_t*>(start + (end & 12)) = static_cast<uint16_t>(word_at(words, end));
    }
  }
}

// Elements [begin, end) of a pack that starts at column `col`.
template <typename T, int N>
__device__ void store_elements(T* row, int col, const Pack<T, N>& pack, int begin, int end) {
  T elements[N];
  memcpy(elements, &pack, sizeof(pack));
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i >= begin && i < end) row[col + i] = elements[i];
  }
}

}  // namespace detail

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
  const char* const base = nullptr;
  return row < rows && row_start(base, layout, rows - 1) - row_start(base, layout, row) >= elements;
}

}  // namespace fused_norm
