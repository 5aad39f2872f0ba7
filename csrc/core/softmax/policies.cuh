// What softmax reads and writes. A fusion is another policy here, not another kernel.
//
// A LOAD policy opens a row; the row gives raw packs of its input type, and prepares those as the
// scores that softmax is taken of: -inf where there is none. A STORE policy opens a row and takes
// packs of results.
#pragma once

#include "core/common/row_access.cuh"
#include "core/common/row_group.cuh"
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

  template <int N, bool kRegular, typename Group>
  __device__ RowReader<T, N, kRegular> open(int64_t row, const Group& group) const {
    return open_first<N, kRegular>(row, cols, group);
  }
  // The first `count` columns alone.
  template <int N, bool kRegular, typename Group>
  __device__ RowReader<T, N, kRegular> open_first(int64_t row, int count,
                                                  const Group& group) const {
    return {row_start(data, layout, row), row < rows ? count : 0,
            kRegular || rows_follow(layout, row, rows, cols, N), group.lane(), group.lanes()};
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
    RowReader<T, N, kRegular> reader;
    int cols;

    template <int kPacks>
    __device__ __forceinline__ void prepare(const Pack<T, N> (&packs)[kPacks], Kept (&kept)[kPacks],
                                            int col, int step) const {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        kept[p] = packs[p];
        pad_with_lowest<kRegular>(kept[p], cols - (col + p * step));
      }
    }
  };

  template <int N, bool kRegular, typename Group>
  __device__ Row<N, kRegular> open(int64_t row, const Group& group) const {
    return {x.template open<N, kRegular>(row, group), row < x.rows ? x.cols : 0};
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

template <typename A, int N, int kPacks>
__device__ __forceinline__ void forget_elements(Scores<A, N> (&)[kPacks]) {}

// N elements of a row of a mask, as terms to add: 0 or -inf for a boolean one.
template <int N, typename A>
__device__ __forceinline__ void load_mask(const SoftmaxMask& mask, int64_t row_offset, int col,
                                          int count, A (&terms)[N]);

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
    RowReader<T, N, kRegular> reader;
    const MaskedLoad& load;
    int cols;  // those that are not masked out by `causal`
    int64_t mask_offset;

    template <int kPacks>
    __device__ __forceinline__ void prepare(const Pack<T, N> (&packs)[kPacks], Kept (&kept)[kPacks],
                                            int col, int step) const {
      // All packs' masks first: they are in flight together with the packs.
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        load_mask(load.mask, mask_offset, col + p * step, cols - (col + p * step), kept[p].at);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        A x[N];
        unpack(packs[p], x);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          A& score = kept[p].at[i];
          const bool out = score == kLowest<A> && !load.mask.additive;
          score = out || col + p * step + i >= cols ? kLowest<A> : fma(x[i], load.scale, score);
        }
      }
    }
  };

  template <int N, bool kRegular, typename Group>
  __device__ Row<N, kRegular> open(int64_t row, const Group& group) const {
    int count = row < x.rows ? x.cols : 0;
    const uint32_t index = static_cast<uint32_t>(row);
    if (causal && count > 0) {
      const int query = index - divide(index, queries) * queries.divisor;
      count = max(0, min(count, query + 1 + x.cols - static_cast<int>(queries.divisor)));
    }
    return {x.template open_first<N, kRegular>(row, count, group), *this, count,
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

// The first `count` of N elements of type M from `address`, as term_of() them; zero after. One
// access where it is aligned and the elements are neighbours.
template <typename M, int N, typename A, typename TermOf>
__device__ __forceinline__ void load_mask_as(const SoftmaxMask& mask, int64_t offset, int count,
                                             A (&terms)[N], TermOf term_of) {
  const M* const address = static_cast<const M*>(mask.data) + offset;
  constexpr int kBytes = sizeof(M) * N;
  if constexpr (kBytes >= 4 && kBytes <= 16) {
    if (mask.col_stride == 1 && count >= N && reinterpret_cast<uintptr_t>(address) % kBytes == 0) {
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
    terms[i] = i < count ? term_of(__ldg(address + i * mask.col_stride)) : A(0);
  }
}

template <int N, typename A>
__device__ __forceinline__ void load_mask(const SoftmaxMask& mask, int64_t row_offset, int col,
                                          int count, A (&terms)[N]) {
  const int64_t offset = row_offset + col * mask.col_stride;
  auto add = [&](auto element) {
    using M = decltype(element);
    load_mask_as<M>(mask, offset, count, terms,
                    [](M m) { return static_cast<A>(static_cast<Accumulator<M>>(m)); });
  };
  if (!mask.data || count <= 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) terms[i] = 0;
  } else if (!mask.additive) {
    load_mask_as<uint8_t>(mask, offset, count, terms,
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

// Rows of a contiguous tensor, rounded once.
template <typename T>
struct RoundedStore {
  using Output = T;
  T* data;
  int64_t rows;
  int cols;

  template <int N, bool kRegular>
  struct Row {
    RowWriter<T, N, kRegular> writer;
    Pack<T, N> previous;

    // Pack p of a run of `packs`.
    __device__ __forceinline__ void store(int p, int packs, int col,
                                          const Accumulator<T> (&values)[N]) {
      Pack<T, N> pack;
      round_to(pack, values);
      writer.store_in_run(col, pack, previous, p == 0, p + 1 == packs);
      previous = pack;
    }
  };

  template <int N, bool kRegular, typename Group>
  __device__ Row<N, kRegular> open(int64_t row, const Group& group) const {
    return {{data + row * cols, row < rows ? cols : 0, group.lane(), group.lanes(), group.mask()},
            {}};
  }
};

}  // namespace fused_norm
