// What a norm reads and writes. A fusion is another policy here, not another kernel.
//
// A LOAD policy opens a row and gives packs of its input type; a STORE policy opens a row and takes
// the normalized values of a pack.
#pragma once

#include "core/common/row_slice.cuh"
#include "core/norm/plan.h"

namespace fused_norm {

// How the rows of a launch lie, their type, and that of its parameters if it is known at compile
// time.
template <RowsLie kRowsLie, typename InputType, typename ParamType>
struct RowForm {
  static constexpr RowsLie kLie = kRowsLie;
  using Input = InputType;
  using Param = ParamType;
};

// Rows of x as they are.
template <typename T>
struct InputLoad {
  using Input = T;
  static constexpr bool kAdds = false, kGates = false;
  const T* x;
  RowLayout layout;
  int64_t rows;
  int cols;

  __device__ __forceinline__ T value(int64_t row, int col) const {
    return row_start(x, layout, row)[col];
  }

  // A thread's slice of a row, from column `col` on.
  template <int N, RowsLie kLie, int kPacks>
  class Slice {
   public:
    __device__ Slice(const InputLoad& load, int64_t row, int col)
        : at_(row_start(load.x + col, load.layout, min(row, load.rows - 1))),
          left_(row < load.rows ? load.cols - col : -N) {}  // past the end: nothing is read

    template <typename Group>
    __device__ __forceinline__ void fetch(const Group& group) {
      reader_.fetch(at_, left_, group, loaded_);
    }

    // Calls put(p, pack) with what was fetched.
    template <typename Group, typename Put>
    __device__ __forceinline__ void extract(const Group& group, Put put) const {
      reader_.extract(loaded_, group, put);
    }

    // Where a column of the row lies, counted from the slice's first.
    __device__ __forceinline__ const T* at(int col) const { return at_ + col; }

   private:
    using Reader = ReaderOf<T, N, kLie, kPacks>;
    const T* at_;
    int left_;
    Reader reader_;
    typename Reader::Loaded loaded_;
  };
};

// x + addend, rounded to x's type, which is normalized and written to `sum` on the way: one more
// tensor read and one written, and the registers of a second row in flight. Without an addend, x:
// seldom asked for, where the types are two, and so no kernel of its own.
template <typename T, typename Addend>
struct AddLoad {
  using Input = T;
  static constexpr bool kAdds = true, kGates = false;
  InputLoad<T> x;
  InputLoad<Addend> addend;
  T* sum;  // rows x cols, contiguous; null: no addend, where the types are two
  int64_t rows;
  int cols;

  __device__ __forceinline__ bool adds() const { return std::is_same_v<T, Addend> || sum; }
  // After the slice was extracted.
  __device__ __forceinline__ T value(int64_t row, int col) const {
    return adds() ? sum[row * cols + col] : x.value(row, col);
  }

  template <int N, RowsLie kLie, int kPacks>
  class Slice {
   public:
    __device__ Slice(const AddLoad& load, int64_t row, int col)
        : adds_(load.adds()),
          x_(load.x, row, col),
          addend_(load.addend, row, col),
          sum_{load.sum + row * load.cols + col, row < load.rows ? load.cols - col : 0} {}

    template <typename Group>
    __device__ __forceinline__ void fetch(const Group& group) {
      x_.fetch(group);
      if (adds_) addend_.fetch(group);
    }

    template <typename Group, typename Put>
    __device__ __forceinline__ void extract(const Group& group, Put put) {
      if (!adds_) return x_.extract(group, put);
      Pack<T, N> sums[kPacks];
      x_.extract(group, [&](int p, const Pack<T, N>& pack) { sums[p] = pack; });
      addend_.extract(group, [&](int p, const Pack<Addend, N>& pack) {
        Accumulator<T> value[N], added[N];
        unpack(sums[p], value);
        unpack(pack, added);
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] += added[i];
        round_to(sums[p], value);
        put(p, sums[p]);
      });
#pragma unroll
      for (int p = 0; p < kPacks; ++p) sum_.store(p, sums[p], group);
    }

   private:
    bool adds_;
    typename InputLoad<T>::template Slice<N, kLie, kPacks> x_;
    typename InputLoad<Addend>::template Slice<N, kLie, kPacks> addend_;
    WriterOf<T, N, kLie> sum_;
  };
};

// y = xhat * (weight + offset) + bias, rounded once. The parameters come from L1: every row uses
// the same columns.
template <typename T>
struct AffineStore {
  using Output = T;
  T* y;
  int cols;
  ParamVector weight, bias;
  Accumulator<T> weight_offset;

  // Weight and (kBias) bias of a pack's columns from `col` on; Param is their type where they are
  // there and the offset is zero, or void: found out here. Where there is no bias, nothing is
  // added: not even zero, to which -0 would give way.
  template <typename Form, bool kBias, int N, typename Group, typename A>
  __device__ __forceinline__ void load(int col, const Group& group, A (&g)[N], A (&b)[N]) const {
    using Param = typename Form::Param;
    auto get_as = [&](auto type, const ParamVector& params, A(&out)[N]) {
      if constexpr (dealt_out(Form::kLie)) {
        load_params_apart<decltype(type), Form::kLie>(params.data, col, cols, group, out);
      } else {
        load_params_of<decltype(type)>(params.data, col, out);
      }
    };
    auto get = [&](const ParamVector& params, A(&out)[N]) {
      if constexpr (std::is_void_v<Param>) {
        with_param_type<typename Form::Input>(params.dtype,
                                              [&](auto type) { get_as(type, params, out); });
      } else {
        get_as(Param(), params, out);
      }
    };
    if constexpr (!std::is_void_v<Param>) {
      get(weight, g);
      if constexpr (kBias) get(bias, b);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        g[i] = A(1);
        b[i] = A(-0.0);
      }
      if (weight.data) {
        get(weight, g);
#pragma unroll
        for (int i = 0; i < N; ++i) g[i] += static_cast<A>(weight_offset);
      }
      if (kBias && bias.data) get(bias, b);
    }
  }

  template <bool kBias, int N, typename A>
  __device__ __forceinline__ Pack<T, N> apply(const A (&xhat)[N], const A (&g)[N],
                                              const A (&b)[N]) const {
    A y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = kBias ? fma(xhat[i], g[i], b[i]) : xhat[i] * g[i];
    Pack<T, N> out;
    round_to(out, y);
    return out;
  }

  // Whether there are all parameters, in that dtype, and the weight as it is.
  __host__ __device__ __forceinline__ bool all_of(DType dtype, bool has_bias) const {
    return weight_offset == 0 && weight.data && weight.dtype == dtype &&
           (!has_bias || (bias.data && bias.dtype == dtype));
  }

  // Calls run(form) with the row form that fits best. Chosen once, at the top of a kernel. kTypes:
  // deals_out_typed().
  template <typename X, bool kBias, bool kTypes, typename Run>
  __device__ __forceinline__ void with_form(RowsLie lie, Run run) const {
    if (lie == RowsLie::kRegular) {
      if (!std::is_same_v<X, float> && all_of(DType::kFloat32, kBias))
        return run(RowForm<RowsLie::kRegular, X, float>());
      if (all_of(kDTypeOf<X>, kBias)) return run(RowForm<RowsLie::kRegular, X, X>());
      return run(RowForm<RowsLie::kRegular, X, void>());
    }
    if constexpr (kTypes) {
      if constexpr (kInPairs<X>) {
        if (lie == RowsLie::kPairs) return run(RowForm<RowsLie::kPairs, X, X>());
      }
      run(RowForm<RowsLie::kElements, X, X>());
    }
  }
};

}  // namespace fused_norm
