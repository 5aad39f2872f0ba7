// What softmax reads and writes. A fusion is another policy here, not another kernel.
//
// A LOAD policy opens a row; the row gives raw packs of its input type, and prepares those as the
// scores that softmax is taken of: -inf where there is none. A STORE policy opens a row and takes
// packs of results; it also says where its lanes' packs lie in the runs of a row (RunPlace).
#pragma once

#include <limits>

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
      const auto words = load_words<kBytes>(address);
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

// N elements of a row of a mask, as terms to add: 0 or -inf for a boolean one.
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

// What is masked out of scale * x + mask. The mask is read where it lies, broadcast by strides.
struct ScoreMask {
  SoftmaxMask mask;
  bool causal;
  Divider queries;
  float of_empty;  // what a row of nothing but -inf gives: 0, or NaN where there is a scale alone

  // How many of the row's first columns `causal` does not mask out.
  __device__ int visible(int64_t row, int cols) const {
    if (!causal || cols == 0) return cols;
    const uint32_t index = static_cast<uint32_t>(row);
    const int query = index - divide(index, queries) * queries.divisor;
    return max(0, min(cols, query + 1 + cols - static_cast<int>(queries.divisor)));
  }

  // Where the mask of a row starts, of which some columns are visible.
  __device__ int64_t row_offset(int64_t index) const {
    if (!mask.data) return 0;
    uint32_t row = static_cast<uint32_t>(index);
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

  // The score of an element that is visible or not, given the mask's term for it.
  template <typename A>
  __device__ __forceinline__ A score(A x, A scale, A term, bool is_visible) const {
    const bool out = term == kLowest<A> && !mask.additive;
    return out || !is_visible ? kLowest<A> : fma(x, scale, term);
  }
};

inline ScoreMask score_mask_of(const SoftmaxForwardParams& params) {
  const bool masks = params.causal || params.mask.data != nullptr;
  return {params.mask, params.causal, make_divider(params.causal ? params.queries : 1),
          masks ? 0.0f : std::numeric_limits<float>::quiet_NaN()};
}

// Rows of scale * x + mask, causal or not.
template <typename T>
struct MaskedLoad {
  using Input = T;
  static constexpr bool kMasked = true;
  Rows<T> x;
  float scale;
  ScoreMask masking;

  template <int N, bool kRegular>
  struct Row {
    using Kept = Scores<float, N>;
    RunReader<T, N, kRegular, Filler::kZero> reader;
    const MaskedLoad& load;
    int visible;
    int64_t mask_offset;

    template <int kPacks>
    __device__ __forceinline__ void prepare(const Pack<T, N> (&packs)[kPacks], Kept (&kept)[kPacks],
                                            int col) const {
      // All packs' masks first: they are in flight together with the packs.
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const PackColumns columns = reader.place.template columns<kPacks>(p, col);
        load_mask(load.masking.mask, mask_offset, columns, visible, kept[p].at);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const PackColumns columns = reader.place.template columns<kPacks>(p, col);
        float x[N];
        unpack(packs[p], x);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          float& score = kept[p].at[i];
          score = load.masking.score(x[i], load.scale, score, columns.at(i) < visible);
        }
      }
    }
  };

  template <int N, bool kRegular>
  __device__ Row<N, kRegular> open(int64_t row, const RunPlace<N, kRegular>& place) const {
    const int visible = masking.visible(row, row < x.rows ? x.cols : 0);
    return {x.template open_first<Filler::kZero>(row, visible, place), *this, visible,
            visible > 0 ? masking.row_offset(row) : 0};
  }
};

// Rows of a contiguous tensor, rounded once.
template <typename T>
struct RoundedStore {
  using Output = T;
  T* data;
  int64_t rows;
  int cols;

  template <int N, bool kRegular, typename Group>
  __device__ RunPlace<N, kRegular> place(int64_t row, const Group& group) const {
    return {group.lane(), group.lanes(), turn_of<N, kRegular>(data + row * cols)};
  }

  template <int N, bool kRegular>
  struct Row {
    RunWriter<T, N, kRegular> writer;

    // Pack p of a run of kPacks.
    template <int kPacks>
    __device__ __forceinline__ void store(int p, int col, const Accumulator<T> (&values)[N]) const {
      Pack<T, N> pack;
      round_to(pack, values);
      writer.template store<kPacks>(p, col, pack);
    }
  };

  template <int N, bool kRegular>
  __device__ Row<N, kRegular> open(int64_t row, const RunPlace<N, kRegular>& place) const {
    return {{data + row * cols, row < rows ? cols : 0, place}};
  }

  // Without runs, in packs of N at pack boundaries.
  // The first column of a row that lies at a pack boundary.
  template <int N>
  __device__ __forceinline__ int first_boundary(int64_t row) const {
    return (N - turn_of<N, false>(data + row * cols)) % N;
  }

  // N results from such a column on, or one from any, as far as the row reaches; two accesses where
  // they are wider than a granule.
  template <bool kRegular, int N>
  __device__ __forceinline__ void put(int64_t row, int col, const float (&values)[N]) const {
    constexpr int kMost = kGranule / sizeof(T), kWidth = N < kMost ? N : kMost;
#pragma unroll
    for (int first = 0; first < N; first += kWidth) {
      float part[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) part[i] = values[first + i];
      Pack<T, kWidth> pack;
      round_to(pack, part);
      T* const at = data + row * cols + col + first;
      const int left = cols - col - first;
      if (left >= kWidth) {
        store_words<sizeof(T) * kWidth>(at, pack.words);
      } else if (!kRegular) {
#pragma unroll
        for (int i = 0; i < kWidth - 1; ++i) {
          if (i < left) reinterpret_cast<Bits<T>*>(at)[i] = bits_of(pack, i);
        }
      }
    }
  }
};

}  // namespace fused_norm
