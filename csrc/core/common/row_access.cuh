// Reading and writing the packs of a row, wherever it lies.
#pragma once

#include "core/common/pack.cuh"

namespace fused_norm {

// Reads packs of one row. Loads are always of aligned granules; a pack that is not one lies across
// two of them, and the second comes from the next lane, which loads it anyway. Columns past the row
// read as zero. Granules may reach into the memory before and after the row, but not past that of
// the last row.
template <typename T, int N>
class RowReader {
  static constexpr int kBytes = sizeof(T) * N;

 public:
  // `lane` counts from 0 to `lanes` - 1 among the warp's lanes that share the row, with consecutive
  // packs. `rows_follow`: at least a pack's memory lies between the row's end and that of the last
  // row.
  __device__ RowReader(const T* row, int cols, bool rows_follow, int lane, int lanes)
      : row_(reinterpret_cast<const char*>(row)),
        cols_(cols),
        rows_follow_(rows_follow),
        lane_(lane),
        lanes_(lanes),
        shift_(static_cast<int>(reinterpret_cast<uintptr_t>(row) % kBytes)) {}

  // Packs as they are loaded: the granules in which they start, and for the last lane those after
  // them.
  template <int kPacks>
  struct Fetched {
    Words<kBytes> granules[kPacks], edges[kPacks];
  };

  // Loads the packs at columns col, col + step, ..., all of them in flight at once.
  template <int kPacks>
  __device__ __forceinline__ void fetch(Fetched<kPacks>& fetched, int col, int step) const {
    if (rows_follow_) {
      fetch_granules<false>(fetched, col, step);
    } else {
      fetch_granules<true>(fetched, col, step);
    }
  }

  // Makes packs of what was fetched. All lanes of a warp take part.
  template <int kPacks>
  __device__ __forceinline__ void extract(const Fetched<kPacks>& fetched,
                                          Pack<T, N> (&packs)[kPacks], int col, int step) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Words<kBytes>& low = fetched.granules[p];
      Words<kBytes> high;
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) {
        high.at[i] = __shfl_down_sync(0xffffffffu, low.at[i], 1, lanes_);
        if (lane_ == lanes_ - 1) high.at[i] = fetched.edges[p].at[i];
      }
      packs[p] = finish(detail::shifted_bytes<kBytes>(low, high, shift_), col + p * step);
    }
  }

  template <int kPacks>
  __device__ __forceinline__ void load(Pack<T, N> (&packs)[kPacks], int col, int step) const {
    Fetched<kPacks> fetched;
    fetch(fetched, col, step);
    extract(fetched, packs, col, step);
  }

 private:
  template <bool kGuarded, int kPacks>
  __device__ __forceinline__ void fetch_granules(Fetched<kPacks>& fetched, int col,
                                                 int step) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) fetched.granules[p] = granule<kGuarded>(col + p * step, 0);
    if (lane_ != lanes_ - 1 || shift_ == 0) return;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) fetched.edges[p] = granule<kGuarded>(col + p * step, kBytes);
  }

  // The granule `offset` bytes after the one in which the pack at `col` starts, if the row reaches
  // it. Guarded, nothing past the row is read.
  template <bool kGuarded>
  __device__ __forceinline__ Words<kBytes> granule(int col, int offset) const {
    Words<kBytes> words{};
    const int first = col + (offset - shift_) / static_cast<int>(sizeof(T));
    if (first >= cols_) return words;
    const char* const start = row_ + static_cast<int64_t>(first) * sizeof(T);
    if (!kGuarded || first + N <= cols_) {
      words = detail::load_words<kBytes>(start);
    } else if (cols_ > 0) {
      words = detail::load_elements<T, N>(start, cols_ - first);
    }
    return words;
  }

  // Sets the columns past the row to zero.
  __device__ __forceinline__ Pack<T, N> finish(Words<kBytes> words, int col) const {
    if (cols_ - col < N) {
      const int bytes = (cols_ - col) * static_cast<int>(sizeof(T));
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) {
        words.at[i] = bytes >= 4 * i + 4 ? words.at[i] : bytes > 4 * i ? words.at[i] & 0xffff : 0;
      }
    }
    return {words};
  }

  const char* row_;
  int cols_;
  bool rows_follow_;
  int lane_, lanes_, shift_;
};

namespace detail {

// Bytes [first, kBytes) of a granule, in pieces of 2, 4 and 8.
template <typename T, int kBytes>
__device__ __forceinline__ void store_from(char* start, const Words<kBytes>& words, int first) {
  if constexpr (sizeof(T) == 2) {
    if (first & 2) {
      *reinterpret_cast<uint16_t*>(start + first) =
          static_cast<uint16_t>(word_at(words, first) >> 16);
      first += 2;
    }
  }
  if (first & 4) {
    *reinterpret_cast<uint32_t*>(start + first) =
        kBytes == 8 || first < 8 ? words.at[1] : words.at[kBytes / 4 - 1];
    first += 4;
  }
  if (kBytes == 16 && first == 8)
    *reinterpret_cast<uint2*>(start + 8) = {words.at[kBytes / 8], words.at[kBytes / 4 - 1]};
}

// Bytes [0, end) of a granule.
template <typename T, int kBytes>
__device__ __forceinline__ void store_to(char* start, const Words<kBytes>& words, int end) {
  if (kBytes == 16 && (end & 8)) *reinterpret_cast<uint2*>(start) = {words.at[0], words.at[1]};
  if (end & 4)
    *reinterpret_cast<uint32_t*>(start + (end & 8)) =
        kBytes == 8 || !(end & 8) ? words.at[0] : words.at[kBytes / 8];
  if constexpr (sizeof(T) == 2) {
    if (end & 2) {
      *reinterpret_cast<uint16_t*>(start + (end & 12)) = static_cast<uint16_t>(word_at(words, end));
    }
  }
}

// Elements [begin, end) of a pack that starts at column `col`.
template <typename T, int N>
__device__ void store_elements(T* row, int col, const Pack<T, N>& pack, int begin, int end) {
  T elements[N];
  memcpy(elements, &pack, sizeof(pack));
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i >= begin && i < end) row[col + i] = elements[i];
  }
}

}  // namespace detail

// Writes packs of one row; the counterpart of RowReader. All lanes that share the row in a warp
// call store() together, with consecutive packs in consecutive lanes: in a row that does not start
// on a pack boundary each lane writes the aligned granule that ends with its own first columns and
// begins with its neighbour's last ones.
template <typename T, int N>
class RowWriter {
 public:
  // `lane` counts from 0 to `lanes` - 1 among the warp's lanes that share the row, `mask` names
  // those lanes.
  __device__ RowWriter(T* row, int cols, int lane, int lanes, unsigned mask)
      : row_(row),
        cols_(cols),
        lane_(lane),
        lanes_(lanes),
        shift_(static_cast<int>(reinterpret_cast<uintptr_t>(row) % kBytes)),
        mask_(mask) {}

  __device__ __forceinline__ void store(int col, const Pack<T, N>& pack) const {
    const int count = cols_ - col;  // N or more: a whole pack; 0 or less: nothing
    if (shift_ == 0) {
      if (count >= N) {
        detail::store_words<kBytes>(address(col), pack.words);
      } else {
        detail::store_elements(row_, col, pack, 0, count);
      }
      return;
    }
    const int head =
        (kBytes - shift_) /
        static_cast<int>(sizeof(T));  // own columns in the granule shared with the pack before
    const Words<kBytes>& own = pack.words;
    const bool has_before = lane_ > 0;
    Words<kBytes> before;
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      before.at[i] = __shfl_up_sync(mask_, own.at[i], 1, lanes_);
    }
    const Words<kBytes> granule = detail::shifted_bytes<kBytes>(before, own, kBytes - shift_);
    char* const start = address(col) - shift_;
    if (count >= N) {
      if (has_before) {
        detail::store_words<kBytes>(start, granule);
      } else {
        detail::store_from<T>(start, granule, shift_);
      }
      // The next lane writes this one's tail with its own head, if it has all of that.
      if (lane_ + 1 == lanes_ || count - N < head) {
        detail::store_to<T>(start + kBytes,
                            detail::shifted_bytes<kBytes>(own, own, kBytes - shift_), shift_);
      }
    } else if (count > 0) {  // the row's end
      if (has_before && count >= head) {
        detail::store_words<kBytes>(start, granule);
        detail::store_elements(row_, col, pack, head, count);
      } else {
        detail::store_elements(row_, col, pack, 0, count);
      }
    }
  }

 private:
  static constexpr int kBytes = sizeof(T) * N;

  __device__ char* address(int col) const {
    return reinterpret_cast<char*>(row_) + static_cast<int64_t>(col) * sizeof(T);
  }

  T* row_;
  int cols_, lane_, lanes_, shift_;
  unsigned mask_;
};

// n / divisor, for n below 2^31.
__device__ __forceinline__ uint32_t divide(uint32_t n, const Divider& by) {
  return (__umulhi(n, by.multiplier) + n) >> by.shift;
}

// Where row `row` starts.
template <typename T>
__device__ __forceinline__ T* row_start(T* base, const RowLayout& layout, int64_t row) {
  if (layout.inner == 0) return base + row * layout.stride;
  const uint32_t index = static_cast<uint32_t>(row);
  const uint32_t outer = divide(index, {layout.inner, layout.multiplier, layout.shift});
  return base + outer * layout.outer_stride + (index - outer * layout.inner) * layout.stride;
}

// Whether rows after `row` reach at least `elements` further in memory.
__device__ __forceinline__ bool rows_follow(const RowLayout& layout, int64_t row, int64_t rows,
                                            int cols, int elements) {
  if (layout.inner == 0) {
    // Neither factor need be known beyond `elements`.
    const int64_t most = elements;
    const int left = static_cast<int>(min(rows - 1 - row, most));
    return left * static_cast<int>(min(min(layout.stride, int64_t{cols}), most)) >= elements;
  }
  const char* const base = nullptr;
  return row < rows && row_start(base, layout, rows - 1) - row_start(base, layout, row) >= elements;
}

// A row of a tensor, for a group; past the last of them, an empty one. By reference: what a
// kernel's parameters hold takes no registers before it is used.
template <int N, typename T, typename Group>
__device__ RowReader<T, N> open_row(const T* const& base, const RowLayout& layout, int64_t row,
                                    const int64_t& rows, const int& cols, const Group& group) {
  return {row_start(base, layout, row), row < rows ? cols : 0,
          rows_follow(layout, row, rows, cols, N), group.lane(), group.lanes()};
}

}  // namespace fused_norm
