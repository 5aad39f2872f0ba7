// What a norm reads and writes. A fusion is another policy here, not another kernel.
//
// A LOAD policy opens a row and gives packs of its input type; a STORE policy opens a row and takes the normalized
// values of a pack.
#pragma once

#include "core/common/pack.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

// Rows of x as they are.
template <typename T>
struct InputLoad {
  using Input = T;
  const T* x;
  RowLayout layout;
  int64_t rows;
  int cols;

  // A row index past the end opens an empty row.
  template <int N, bool kRegular, typename Group>
  __device__ RowReader<T, N, kRegular> open(int64_t row, const Group& group) const {
    return {row_start(x, layout, row, rows), row < rows ? cols : 0, group.lane(), group.lanes()};
  }
};

// y = xhat * (weight + offset) + bias, rounded once. The parameters come from L1: every row uses the same columns.
template <typename T>
struct AffineStore {
  using Output = T;
  T* y;
  int64_t rows;
  int cols;
  ParamVector weight, bias;
  Accumulator<T> weight_offset;

  template <int N, bool kRegular, typename Group>
  __device__ RowWriter<T, N, kRegular> open(int64_t row, const Group& group) const {
    return {y + row * cols, row < rows ? cols : 0, group.lane(), group.lanes(), group.mask()};
  }

  template <int N, bool kRegular, typename A>
  __device__ __forceinline__ void store(const RowWriter<T, N, kRegular>& row, int col, A (&xhat)[N]) const {
    if (kRegular && col >= cols) return;
    A g[N], b[N];
    if (weight.data && (kRegular || col < cols)) {
      load_params<kRegular>(weight, col, cols, g);
      if (weight_offset != 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) g[i] += static_cast<A>(weight_offset);
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) g[i] = A(1);
    }
    if (bias.data && (kRegular || col < cols)) {
      load_params<kRegular>(bias, col, cols, b);
#pragma unroll
      for (int i = 0; i < N; ++i) xhat[i] = fma(xhat[i], g[i], b[i]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) xhat[i] *= g[i];
    }
    Pack<T, N> out;
    round_to(out, xhat);
    row.store(col, out);
  }
};

}  // namespace fused_norm
