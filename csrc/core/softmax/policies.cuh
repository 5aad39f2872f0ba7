// What softmax reads and writes. A fusion is another policy here, not another kernel.
//
// A LOAD policy opens a row; the row gives raw packs of its input type, and prepares those as the
// scores that softmax is taken of: -inf where there is none. A STORE policy opens a row and takes
// packs of results; it also says where its lanes' packs lie in the runs of a row (RunPlace).
#pragma once

#include "core/common/row_run.cuh"
#include "core/softmax/exp_sum.cuh"
#include "core/softmax/softmax.h"

namespace fused_norm {

// Rows of a tensor. A row index past the end opens an empty row.
template <typename T>
struct Rows {
  const T* data;
  RowLayout layout;
  int64_t rows;
  int cols;

  template <Filler kFiller, int N, bool kRegular>
  __device__ RunReader<T, N, kRegular, kFiller> open(int64_t row,
                                                     const RunPlace<N, kRegular>& place) const {
    return open_first<kFiller>(row, cols, place);
  }
  // The first `count` columns alone.
  template <Filler kFiller, int N, bool kRegular>
  __device__ RunReader<T, N, kRegular, kFiller> open_first(
      int64_t row, int count, const RunPlace<N, kRegular>& place) const {
    return {row_start(data, layout, row), row < rows ? count : 0,
            kRegular || rows_follow(layout, row, rows, cols, N), place};
  }
};

// Rows of x as they are: a pack is its own scores.
template <typename T>
struct PlainLoad {
  using Input = T;
  static constexpr bool kMasked = false;
  Rows<T> x;

  template <int N, bool kRegular>
  struct Row {
    using Kept = Pack<T, N>;
    RunReader<T, N, kRegular, Filler::kLowest> reader;

    template <int kPacks>
    __device__ __forceinline__ void prepare(const Pack<T, N> (&packs)[kPacks], Kept (&kept)[kPacks],
                                            int) const {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) kept[p] = packs[p];
    }
  };

  template <int N, bool kRegular>
  __device__ Row<N, kRegular> open(int64_t row, const RunPlace<N, kRegular>& place) const {
    return {x.template open<Filler::kLowest>(row, place)};
  }
};

// Prepared scores that are no longer what was read.
template <typename A, int N>
struct Scores {
  A at[N];
};

template <typename A, int N>
__device__ __forceinline__ void unpack(const Scores<A, N>& scores, A (&out)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = scores.at[i];
}
template <typename A, int N>
__device__ __forceinline__ A element_of(const Scores<A, N>& scores, int i) {
  return scores.at[i];
}

template <typename A, int N, int kPacks>
__device__ __forceinline__ void forget_elements(Scores<A, N> (&)[kPacks]) {}

// N elements of a row of a mask, as terms to add: 0 or -inf for a boolean one.
template <int N, typename A>
__device__ __forceinline__ void load_mask(const SoftmaxMask& mask, int64_t row_offset,
                                          const PackColumns& columns, int cols, A (&terms)[N]);

// Rows of scale * x + mask, causal or not. The mask is read where it lies, broadcast by strides.
template <typename T>
struct MaskedLoad {
  using Input = T;
  using A = Accumulator<T>;
  static constexpr bool kMasked = true;
  Rows<T> x;
  A scale;
  SoftmaxMask mask;
  bool causal;
  Divider queries;

  template <int N, bool kRegular>
  struct Row {
    using Kept = Scores<A, N>;
    RunReader<T, N, kRegular, Filler::kZero> reader;
    const MaskedLoad& load;
    int cols;  // those that are not masked out by `causal`
    int64_t mask_offset;

    template <int kPacks>
    __device__ __forceinline__ void prepare(const Pack<T, N> (&packs)[kPacks], Kept (&kept)[kPacks],
                                            int col) const {
      // All packs' masks first: they are in flight together with the packs.
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const PackColumns columns = reader.place.template columns<kPacks>(p, col);
        load_mask(load.mask, mask_offset, columns, cols, kept[p].at);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const PackColumns columns = reader.place.template columns<kPacks>(p, col);
        A x[N];
        unpack(packs[p], x);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          A& score = kept[p].at[i];
          const bool out = score == kLowest<A> && !load.mask.additive;
          score = out || columns.at(i) >= cols ? kLowest<A> : fma(x[i], load.scale, score);
        }
      }
    }
  };

  template <int N, bool kRegular>
  __device__ Row<N, kRegular> open(int64_t row, const RunPlace<N, kRegular>& place) const {
    int count = row < x.rows ? x.cols : 0;
    const uint32_t index = static_cast<uint32_t>(row);
    if (causal && count > 0) {
      const int query = index - divide(index, queries) * queries.divisor;
      count = max(0, min(count, query + 1 + x.cols - static_cast<int>(queries.divisor)));
    }
    return {x.template open_first<Filler::kZero>(row, count, place), *this, count,
            mask.data && count > 0 ? mask_row_offset(index) : 0};
  }

 private:
  __device__ int64_t mask_row_offset(uint32_t row) const {
    int64_t offset = 0;
#pragma unroll
    for (int d = 0; d < SoftmaxMask::kMaxDims; ++d) {
      if (d >= mask.dims) break;
      const uint32_t rest = divide(row, mask.sizes[d]);
      offset += (row - rest * mask.sizes[d].divisor) * mask.strides[d];
      row = rest;
    }
    return offset;
  }
};

// The elements of type M at `columns` below `cols`, of a row that starts at `offset`, as term_of()
// them; zero for other columns. One access where it is aligned and the elements are neighbours.
template <typename M, int N, typename A, typename TermOf>
__device__ __forceinline__ void load_mask_as(const SoftmaxMask& mask, int64_t offset,
                                             const PackColumns& columns, int cols, A (&terms)[N],
                                             TermOf term_of) {
  const M* const row = static_cast<const M*>(mask.data) + offset;
  constexpr int kBytes = sizeof(M) * N;
  if constexpr (kBytes >= 4 && kBytes <= 16) {
    const M* const address = row + columns.first;
    if (mask.col_stride == 1 && columns.wrapped == 0 && columns.first + N <= cols &&
        reinterpret_cast<uintptr_t>(address) % kBytes == 0) {
      const auto words = detail::load_words<kBytes>(reinterpret_cast<const char*>(address));
      M elements[N];
      memcpy(elements, &words, kBytes);
#pragma unroll
      for (int i = 0; i < N; ++i) terms[i] = term_of(elements[i]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int col = columns.at(i);
    terms[i] = col < cols ? term_of(__ldg(row + col * mask.col_stride)) : A(0);
  }
}

template <int N, typename A>
__device__ __forceinline__ void load_mask(const SoftmaxMask& mask, int64_t row_offset,
                                          const PackColumns& columns, int cols, A (&terms)[N]) {
  auto add = [&](auto element) {
    using M = decltype(element);
    load_mask_as<M>(mask, row_offset, columns, cols, terms,
                    [](M m) { return static_cast<A>(static_cast<Accumulator<M>>(m)); });
  };
  if (!mask.data || columns.first >= cols) {
#pragma unroll
    for (int i = 0; i < N; ++i) terms[i] = 0;
  } else if (!mask.additive) {
    load_mask_as<uint8_t>(mask, row_offset, columns, cols, terms,
                          [](uint8_t masked_out) { return masked_out ? kLowest<A> : A(0); });
  } else if (mask.dtype == DType::kBFloat16) {
    add(__nv_bfloat16());
  } else if (mask.dtype == DType::kFloat16) {
    add(__half());
  } else if (mask.dtype == DType::kFloat32) {
    add(float());
  } else if constexpr (std::is_same_v<A, double>) {
    add(double());
  }
}

// Which dtype the results of rows of T may have, beside T: fp32 where T is a 16-bit one (forward),
// or a 16-bit one where T is fp32 (backward).
enum class ResultTypes { kWider, kNarrower };

// Calls run(U()) with the type of `dtype`: one uniform branch, or none.
template <typename T, ResultTypes kResults, typename Run>
__device__ __forceinline__ void with_result_type(DType dtype, Run run) {
  constexpr bool kWider = kResults == ResultTypes::kWider;
  if constexpr (kWider && sizeof(T) == 2) {
    if (dtype == DType::kFloat32) return run(float());
  } else if constexpr (!kWider && std::is_same_v<T, float>) {
    if (dtype == DType::kFloat16) return run(__half());
    if (dtype == DType::kBFloat16) return run(__nv_bfloat16());
  }
  run(T());
}

// Rows of a contiguous tensor, rounded once.
template <typename T, ResultTypes kResults>
struct RoundedStore {
  void* data;
  DType dtype;
  int64_t rows;
  int cols;

  template <int N, bool kRegular, typename Group>
  __device__ RunPlace<N, kRegular> place(int64_t row, const Group& group) const {
    int turn = 0;
    with_result_type<T, kResults>(dtype, [&](auto type) {
      turn = turn_of<N, kRegular>(static_cast<const decltype(type)*>(data) + row * cols);
    });
    return {group.lane(), group.lanes(), turn};
  }

  template <int N, bool kRegular>
  struct Row {
    const RoundedStore& store_to;
    int64_t first;
    int count;
    RunPlace<N, kRegular> place;

    // Pack p of a run of kPacks.
    template <int kPacks>
    __device__ __forceinline__ void store(int p, int col, const Accumulator<T> (&values)[N]) const {
      with_result_type<T, kResults>(store_to.dtype, [&](auto type) {
        using U = decltype(type);
        Pack<U, N> pack;
        round_to(pack, values);
        RunWriter<U, N, kRegular>(static_cast<U*>(store_to.data) + first, count, place)
            .template store<kPacks>(p, col, pack);
      });
    }
  };

  template <int N, bool kRegular>
  __device__ Row<N, kRegular> open(int64_t row, const RunPlace<N, kRegular>& place) const {
    return {*this, row * cols, row < rows ? cols : 0, place};
  }
};

// The same without runs, in packs of N at pack boundaries.
template <typename T, ResultTypes kResults>
struct BoundaryStore {
  void* data;
  DType dtype;
  int cols;

  // The first column of a row that lies at a pack boundary.
  template <int N>
  __device__ __forceinline__ int first_boundary(int64_t row) const {
    int first = 0;
    with_result_type<T, kResults>(dtype, [&](auto type) {
      first = (N - turn_of<N, false>(static_cast<const decltype(type)*>(data) + row * cols)) % N;
    });
    return first;
  }

  // N results from such a column on, or one from any, as far as the row reaches.
  template <bool kRegular, int N>
  __device__ __forceinline__ void put(int64_t row, int col, const float (&values)[N]) const {
    with_result_type<T, kResults>(dtype, [&](auto type) {
      using U = decltype(type);
      Pack<U, N> pack;
      round_to(pack, values);
      U* const at = static_cast<U*>(data) + row * cols + col;
      if (cols - col >= N) {
        detail::store_words<sizeof(U) * N>(reinterpret_cast<char*>(at), pack.words);
      } else if (!kRegular) {
#pragma unroll
        for (int i = 0; i < N - 1; ++i) {
          if (i < cols - col) reinterpret_cast<Bits<U>*>(at)[i] = bits_of(pack, i);
        }
      }
    });
  }
};

}  // namespace fused_norm
