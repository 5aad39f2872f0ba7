// Slices of rows: reading and writing a thread's columns (row_columns.cuh).
#pragma once

#include "core/common/row_access.cuh"
#include "core/common/row_units.cuh"

namespace fused_norm {

// Walks over the rows of a tensor, `stride` rows a step: where a thread's slice starts, at column
// `col`.
template <typename T>
class RowCursor {
 public:
  __device__ RowCursor(T* base, const RowLayout& layout, int64_t row, int64_t stride, int col)
      : base_(base + col), layout_(layout), at_(row_start(base_, layout, row)), stride_(stride) {}

  __device__ __forceinline__ T* at() const { return at_; }
  // To `row`, the next.
  __device__ __forceinline__ void step(int64_t row) {
    at_ = layout_.inner == 0 ? at_ + stride_ * layout_.stride : row_start(base_, layout_, row);
  }

 private:
  T* base_;
  const RowLayout& layout_;
  T* at_;
  int64_t stride_;
};

// Reads slices of regular rows.
template <typename T, int N, int kPacks>
class PackReader {
  static constexpr int kBytes = sizeof(T) * N;

 public:
  // A slice as it is loaded; must start as zeros: what lies past the row's end is never loaded.
  struct Loaded {
    Words<kBytes> packs[kPacks] = {};
  };

  // Loads the slice that starts at `at`; `left` columns remain of the row from there on.
  template <typename Group>
  __device__ __forceinline__ void fetch(const T* at, int left, const Group& group, Loaded& loaded) {
    const char* const start = reinterpret_cast<const char*>(at);
    const int step = slice_step<N>(group);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * step < left) loaded.packs[p] = load(start + p * step * sizeof(T));
    }
  }

  // Calls put(p, pack) with what was fetched last; zero past the row's end.
  template <typename Group, typename Put>
  __device__ __forceinline__ void extract(const Loaded& loaded, const Group&, Put put) const {
#pragma unroll  // the other way round the compiler spills registers of short rows
    for (int p = kPacks - 1; p >= 0; --p) put(p, Pack<T, N>{loaded.packs[p]});
  }

 private:
  // The longest rows leave the first-level cache to the parameters (forward 4 % faster on an H200).
  __device__ __forceinline__ static Words<kBytes> load(const void* from) {
    return kPacks > 4 ? load_streamed<kBytes>(from) : load_words<kBytes>(from);
  }
};

// Writes a slice of a regular row, pack by pack. It starts at `at`; `left` columns of the row
// remain from there on, 0 for no row.
template <typename T, int N>
struct PackWriter {
  T* at;
  int left;

  template <typename Group>
  __device__ __forceinline__ void store(int p, const Pack<T, N>& pack, const Group& group) const {
    const int step = p * slice_step<N>(group);
    if (step < left) store_streamed<sizeof(T) * N>(at + step, pack.words);
  }
};

template <typename T, int N, RowsLie kLie, int kPacks>
using ReaderOf =
    std::conditional_t<dealt_out(kLie), UnitReader<T, N, kLie, kPacks>, PackReader<T, N, kPacks>>;
template <typename T, int N, RowsLie kLie>
using WriterOf = std::conditional_t<dealt_out(kLie), UnitWriter<T, N, kLie>, PackWriter<T, N>>;

}  // namespace fused_norm
