// Slices of rows: reading and writing a thread's columns (row_columns.cuh), wherever a row lies.
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

// Reads slices of rows. Loads are always of aligned granules; in an irregular row a pack lies
// across two of them, and the second is the next lane's, or the first lane's next one: a slice
// costs its last lane one granule more.
template <typename T, int N, bool kRegular, int kPacks>
class SliceReader {
  static constexpr int kBytes = sizeof(T) * N;

 public:
  // A slice as it is loaded; must start as zeros. In regular rows what lies past the row's end is
  // never loaded and so stays zero.
  struct Loaded {
    Words<kBytes> granules[kPacks] = {};
    Words<kBytes> edge = {};
  };

  // Loads the slice that starts at `at`; `left` columns remain of the row from there on.
  // `rows_follow`: at least a pack's memory lies between the row's end and that of the last row.
  template <typename Group>
  __device__ __forceinline__ void fetch(const T* at, int left, bool rows_follow, const Group& group,
                                        Loaded& loaded) {
    const char* const start = reinterpret_cast<const char*>(at);
    if constexpr (kRegular) {
      const int step = slice_step<N>(group);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (p * step < left) loaded.granules[p] = load(start + p * step * sizeof(T));
      }
    } else {
      shift_ = static_cast<int>(reinterpret_cast<uintptr_t>(at) % kBytes);
      if (rows_follow) {
        fetch_granules<false>(start, left, group, loaded);
      } else {
        fetch_granules<true>(start, left, group, loaded);
      }
    }
  }

  // Calls put(p, pack) with what was fetched last; zero past the row's end. All lanes of a warp
  // take part.
  template <typename Group, typename Put>
  __device__ __forceinline__ void extract(const Loaded& loaded, int left, const Group& group,
                                          Put put) const {
    const int step = slice_step<N>(group);
    Words<kBytes> above = loaded.edge;
#pragma unroll
    for (int p = kPacks - 1; p >= 0; --p) {
      const Words<kBytes>& low = loaded.granules[p];
      if constexpr (kRegular) {
        put(p, Pack<T, N>{low});
      } else {
        Words<kBytes> high;
#pragma unroll
        for (int i = 0; i < kBytes / 4; ++i) {
          const uint32_t next = __shfl_sync(kFullMask, low.at[i], group.lane() + 1, group.lanes());
          high.at[i] = group.lane() == group.lanes() - 1 ? above.at[i] : next;
          above.at[i] = next;
        }
        put(p, cut(detail::shifted_bytes<kBytes>(low, high, shift_), left - p * step));
      }
    }
  }

 private:
  // The shortest and the longest rows leave the first-level cache to the parameters (measured on an
  // H200: backward 2 % faster at one pack a thread, 3 % slower at two; forward 4 % faster at
  // eight).
  __device__ __forceinline__ static Words<kBytes> load(const char* from) {
    constexpr bool kPast = kPacks == 1 || kPacks > 4;
    return kPast ? detail::load_streamed<kBytes>(from) : detail::load_words<kBytes>(from);
  }

  template <bool kGuarded, typename Group>
  __device__ __forceinline__ void fetch_granules(const char* start, int left, const Group& group,
                                                 Loaded& loaded) const {
    const int step = slice_step<N>(group);
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
      fetch_granule<kGuarded>(start, left, p * step, loaded.granules[p]);
    if (group.lane() == group.lanes() - 1)
      fetch_granule<kGuarded>(start, left, (kPacks - 1) * step + N, loaded.edge);
  }

  // The granule in which the pack at `col` (from this thread's first) starts, if the row reaches
  // it. Guarded, nothing past the row is read.
  template <bool kGuarded>
  __device__ __forceinline__ void fetch_granule(const char* start, int left, int col,
                                                Words<kBytes>& words) const {
    const char* const from = start + int64_t{col} * sizeof(T) - shift_;
    const int count = left - col + shift_ / static_cast<int>(sizeof(T));
    if (count <= 0) return;
    if (!kGuarded || count >= N) {
      words = load(from);
    } else {
      words = detail::load_elements<T, N>(from, count);
    }
  }

  // The first `count` columns of a pack, and zeros.
  __device__ __forceinline__ static Pack<T, N> cut(Words<kBytes> words, int count) {
    if (count < N) {
      const int bytes = count * static_cast<int>(sizeof(T));
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) {
        words.at[i] = bytes >= 4 * i + 4 ? words.at[i] : bytes > 4 * i ? words.at[i] & 0xffff : 0;
      }
    }
    return {words};
  }

  int shift_ = 0;
};

// Writes a slice, pack by pack in order; the counterpart of SliceReader. All lanes that share the
// row in a warp call store() together. In an irregular row each lane writes the aligned granule
// that ends with its own first columns and begins with the last ones of the lane before, or for
// the first lane of the last lane's pack before; only the slice's two ends are written in pieces.
template <typename T, int N, bool kRegular, int kPacks>
class SliceWriter {
  static constexpr int kBytes = sizeof(T) * N;

 public:
  // The slice starts at `at`; `left` columns remain of the row from there on, 0 for no row.
  __device__ __forceinline__ void open(T* at, int left) {
    start_ = reinterpret_cast<char*>(at);
    end_ = left;
    shift_ = kRegular ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(at) % kBytes);
  }

  template <typename Group>
  __device__ __forceinline__ void store(int p, const Pack<T, N>& pack, const Group& group) {
    const int step = slice_step<N>(group);
    const int count = end_ - p * step;  // N or more: a whole pack; 0 or less: nothing
    char* const own = start_ + int64_t{p} * step * sizeof(T);
    if constexpr (kRegular) {
      if (count > 0) detail::store_streamed<kBytes>(own, pack.words);
      return;
    }
    if (shift_ == 0) {
      if (count >= N) {
        detail::store_streamed<kBytes>(own, pack.words);
      } else if (count > 0) {
        detail::store_elements<T, N>(own, pack.words, 0, count);
      }
      return;
    }
    Words<kBytes> before;
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      const uint32_t previous =
          __shfl_sync(group.mask(), pack.words.at[i], group.lane() - 1, group.lanes());
      before.at[i] = group.lane() == 0 ? carried_.at[i] : previous;
      carried_.at[i] = previous;
    }
    // Own columns in the granule shared with the lane before.
    const int head = (kBytes - shift_) / static_cast<int>(sizeof(T));
    const bool starts = p == 0 && group.lane() == 0, whole = !starts && count >= head;
    if (whole) {
      detail::store_streamed<kBytes>(
          own - shift_, detail::shifted_bytes<kBytes>(before, pack.words, kBytes - shift_));
    }
    // The next lane writes this one's other columns with its own head, if it has all of that.
    const bool ends = p == kPacks - 1 && group.lane() == group.lanes() - 1;
    const int begin = whole ? head : 0, end = !ends && count >= N + head ? head : min(count, N);
    if (begin < end) detail::store_elements<T, N>(own, pack.words, begin, end);
  }

 private:
  char* start_;
  int end_, shift_;
  Words<kBytes> carried_ = {};
};

template <typename T, int N, RowsLie kLie, int kPacks>
using ReaderOf = std::conditional_t<dealt_out(kLie), UnitReader<T, N, kLie, kPacks>,
                                    SliceReader<T, N, kLie == RowsLie::kRegular, kPacks>>;
template <typename T, int N, RowsLie kLie, int kPacks>
using WriterOf = std::conditional_t<dealt_out(kLie), UnitWriter<T, N, kLie, kPacks>,
                                    SliceWriter<T, N, kLie == RowsLie::kRegular, kPacks>>;

}  // namespace fused_norm
