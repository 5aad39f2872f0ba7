// Rows whose dtype is known at run time alone, for kernels that need not be fast. Values are of the
// precision A: fp64 for rows of fp64, fp32 for all others.
//
// Columns are dealt out one by one (RowsLie::kElements): a thread has N columns, a warp's width
// apart, and neighbouring lanes have neighbouring columns. So no access depends on how a row is
// aligned.
#pragma once

#include "core/common/pack.cuh"
#include "core/common/row_access.cuh"
#include "core/common/row_columns.cuh"

namespace fused_norm {

// The first of a thread's columns, of the N * threads that a group reads at a time.
template <int N, typename Group>
__device__ __forceinline__ int any_column(const Group& group) {
  return slice_column<N, 1, RowsLie::kElements>(group);
}

struct AnyRows {
  const void* data;
  DType dtype;
  RowLayout layout;

  // Reads a thread's columns of a row: element i is column col + i * kWarpSize. Zero past `cols`.
  template <typename A, int N>
  __device__ __forceinline__ void load(int64_t row, int col, int cols, A (&out)[N]) const {
    const int64_t from = row_offset(layout, row) + col;
    const int left = cols - col;
    with_param_type<A>(dtype, [&](auto type) {
      using T = decltype(type);
      const T* const first = static_cast<const T*>(data) + from;
      T values[N];
#pragma unroll
      for (int i = 0; i < N; ++i)
        values[i] = i * kWarpSize < left ? __ldg(first + i * kWarpSize) : T(0.0f);
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = static_cast<A>(values[i]);
    });
  }
};
// Rows to be written, contiguous.
struct AnyOutput {
  void* data;
  DType dtype;

  // Writes a thread's columns of a row, as AnyRows has them, each rounded once.
  template <typename A, int N>
  __device__ __forceinline__ void store(int64_t row, int col, int cols,
                                        const A (&values)[N]) const {
    const int64_t to = row * cols + col;
    const int left = cols - col;
    with_param_type<A>(dtype, [&](auto type) {
      using T = decltype(type);
      T* const first = static_cast<T*>(data) + to;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (i * kWarpSize < left) first[i * kWarpSize] = static_cast<T>(values[i]);
      }
    });
  }
};

}  // namespace fused_norm
