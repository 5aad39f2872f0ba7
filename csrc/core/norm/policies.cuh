// What a norm reads and writes. A fusion is another policy here, not another kernel.
//
// A LOAD policy opens a row and gives packs of its input type; a STORE policy opens a row and takes
// the normalized values of a pack.
#pragma once

#include "core/common/row_slice.cuh"
#include "core/norm/plan.h"

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
  static constexpr int kThreads = forward_threads(false);
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

  // A thread's slices of kRows rows, groups() apart, and then of those `stride` rows further on.
  template <int N, bool kRegular, int kPacks, int kRows>
  class Slices {
   public:
    __device__ Slices(const InputLoad& load, int64_t row, int64_t stride, int col)
        : load_(load),
          at_(load.x, load.layout, min(row, load.rows - 1), stride, col),
          left_(load.cols - col) {}

    // Loads those of `row` and the ones with it, as far as they exist.
    template <typename Group>
    __device__ __forceinline__ void fetch(int64_t row, const Group& group) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int ahead = r * group.groups();
        if (row + ahead >= load_.rows) continue;
        const bool follow =
            kRegular || rows_follow(load_.layout, row + ahead, load_.rows, load_.cols, N);
        reader_[r].fetch(at_.at(row, ahead), left_, follow, group, loaded_[r]);
      }
    }

    // Calls put(p, pack) with row r's of those that were loaded last, the first of which is `row`.
    template <typename Group, typename Put>
    __device__ __forceinline__ void extract(int r, int64_t row, const Group& group, Put put) const {
      reader_[r].extract(loaded_[r], left_, group, put);
    }

    // To `row`, the next.
    __device__ __forceinline__ void step(int64_t row) { at_.step(row); }

   private:
    using Reader = SliceReader<T, N, kRegular, kPacks>;
    const InputLoad& load_;
    RowCursor<const T> at_;
    int left_;
    Reader reader_[kRows];
    typename Reader::Loaded loaded_[kRows];
  };
};

// x + addend, rounded to x's type, which is normalized and written to `sum` on the way: one more
// tensor read and one written, and the registers of a second row in flight.
template <typename T, typename Addend>
struct AddLoad {
  using Input = T;
  static constexpr int kThreads = forward_threads(true);
  InputLoad<T> x;
  InputLoad<Addend> addend;
  T* sum;  // rows x cols, contiguous
  int64_t rows;
  int cols;

  template <int N, bool kRegular, int kPacks, int kRows>
  class Slices {
   public:
    __device__ Slices(const AddLoad& load, int64_t row, int64_t stride, int col)
        : x_(load.x, row, stride, col),
          addend_(load.addend, row, stride, col),
          load_(load),
          sum_(load.sum + row * load.cols + col),
          step_(stride * load.cols),
          left_(load.cols - col) {}

    template <typename Group>
    __device__ __forceinline__ void fetch(int64_t row, const Group& group) {
      x_.fetch(row, group);
      addend_.fetch(row, group);
    }

    template <typename Group, typename Put>
    __device__ __forceinline__ void extract(int r, int64_t row, const Group& group, Put put) const {
      Pack<T, N> sums[kPacks];
      x_.extract(r, row, group, [&](int p, const Pack<T, N>& pack) { sums[p] = pack; });
      addend_.extract(r, row, group, [&](int p, const Pack<Addend, N>& pack) {
        Accumulator<T> value[N], added[N];
        unpack(sums[p], value);
        unpack(pack, added);
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] += added[i];
        round_to(sums[p], value);
        put(p, sums[p]);
      });
      const int ahead = r * group.groups();
      SliceWriter<T, N, kRegular, kPacks> writer;
      writer.open(sum_ + int64_t{ahead} * load_.cols, row + ahead < load_.rows ? left_ : 0);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) writer.store(p, sums[p], group);
    }

    __device__ __forceinline__ void step(int64_t row) {
      x_.step(row);
      addend_.step(row);
      sum_ += step_;
    }

   private:
    typename InputLoad<T>::template Slices<N, kRegular, kPacks, kRows> x_;
    typename InputLoad<Addend>::template Slices<N, kRegular, kPacks, kRows> addend_;
    const AddLoad& load_;
    T* sum_;
    int64_t step_;
    int left_;
  };
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
