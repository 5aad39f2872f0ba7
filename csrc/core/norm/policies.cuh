// What a norm reads and writes. A fusion is another policy here, not another kernel.
//
// A LOAD policy opens a row and gives packs of its input type; a STORE policy opens a row and takes
// the normalized values of a pack.
#pragma once

#include "core/common/row_slice.cuh"

namespace fused_norm {

// How the rows of a launch lie (common/pack.cuh), and the type of its parameters if it is known at
// compile time.
template <bool kIsRegular, typename ParamType>
struct RowForm {
  static constexpr bool kRegular = kIsRegular;
  using Param = ParamType;
};

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
    return {row_start(x, layout, row), row < rows ? cols : 0,
            kRegular || rows_follow(layout, row, rows, cols, N), group.lane(), group.lanes()};
  }
};

// y = xhat * (weight + offset) + bias, rounded once. The parameters come from L1: every row uses
// the same columns.
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

  // Weight and bias of the columns from `col` on; Param is their type where both are there and the
  // offset is zero, or void: found out here.
  template <typename Param, bool kBias, bool kRegular, int N, typename A>
  __device__ __forceinline__ void load(int col, A (&g)[N], A (&b)[N]) const {
    if constexpr (!std::is_void_v<Param>) {
      load_params_of<Param, kRegular>(weight.data, col, cols, g);
      if constexpr (kBias) load_params_of<Param, kRegular>(bias.data, col, cols, b);
    } else {
      const bool inside = kRegular || col < cols;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        g[i] = A(1);
        b[i] = A(0);
      }
      if (weight.data && inside) {
        load_params<kRegular>(weight, col, cols, g);
#pragma unroll
        for (int i = 0; i < N; ++i) g[i] += static_cast<A>(weight_offset);
      }
      if (bias.data && inside) load_params<kRegular>(bias, col, cols, b);
    }
  }

  template <typename Param, bool kBias, int N, typename A>
  __device__ __forceinline__ Pack<T, N> apply(const A (&xhat)[N], const A (&g)[N],
                                              const A (&b)[N]) const {
    A y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      y[i] = kBias || std::is_void_v<Param> ? fma(xhat[i], g[i], b[i]) : xhat[i] * g[i];
    }
    Pack<T, N> out;
    round_to(out, y);
    return out;
  }

  // Calls run(form) with the row form that fits best: RowForm<regular, Param>. Chosen once, at the
  // top of a kernel.
  template <typename X, bool kBias, typename Run>
  __device__ __forceinline__ void with_form(bool regular, Run run) const {
    auto all_of = [&](DType dtype) {
      return regular && weight_offset == 0 && weight.data && weight.dtype == dtype &&
             (!kBias || (bias.data && bias.dtype == dtype));
    };
    if (all_of(kDTypeOf<X>)) {
      run(RowForm<true, X>());
    } else if (!std::is_same_v<X, float> && all_of(DType::kFloat32)) {
      run(RowForm<true, float>());
    } else if (regular) {
      run(RowForm<true, void>());
    } else {
      run(RowForm<false, void>());
    }
  }
};

}  // namespace fused_norm
