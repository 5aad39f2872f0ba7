// A thread's share of a row: kPacks packs, those of a warp next to each other in memory. Pack p of
// lane l of warp w starts at column ((w * kPacks + p) * 32 + l) * N, whatever the row's alignment.
#pragma once

#include "core/common/row_access.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

// First column of a thread's packs, and the distance from one to the next (groups of less than a
// warp have one pack a thread).
template <int N, int kPacks, typename Group>
__device__ __forceinline__ int slice_column(const Group& group) {
  return (group.thread() / kWarpSize * kPacks * kWarpSize + group.lane()) * N;
}
template <int N>
constexpr int kSliceStep = kWarpSize* N;

// Walks over the rows of a tensor, `stride` rows a step: where a thread's slice starts, at column
// `col`.
template <typename T>
class RowCursor {
 public:
  __device__ RowCursor(T* base, const RowLayout& layout, int64_t row, int64_t stride, int col)
      : base_(base + col), layout_(layout), at_(row_start(base_, layout, row)), stride_(stride) {}

  // `ahead` rows after the cursor's, which is `row`.
  __device__ __forceinline__ T* at(int64_t row, int ahead) const {
    if (ahead == 0) return at_;
    return layout_.inner == 0 ? at_ + ahead * layout_.stride
                              : row_start(base_, layout_, row + ahead);
  }
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
  static constexpr int kStep = kSliceStep<N>;

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
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (p * kStep < left) loaded.granules[p] = load(start + p * kStep * sizeof(T));
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
        put(p, cut(detail::shifted_bytes<kBytes>(low, high, shift_), left - p * kStep));
      }
    }
  }

 private:
  // Short rows leave the first-level cache to the parameters (measured on an H200: 2 % faster at
  // one pack a thread, 3 % slower at two).
  __device__ __forceinline__ static Words<kBytes> load(const char* from) {
    return kPacks == 1 ? detail::load_streamed<kBytes>(from) : detail::load_words<kBytes>(from);
  }

  template <bool kGuarded, typename Group>
  __device__ __forceinline__ void fetch_granules(const char* start, int left, const Group& group,
                                                 Loaded& loaded) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
      fetch_granule<kGuarded>(start, left, p * kStep, loaded.granules[p]);
    if (group.lane() == group.lanes() - 1)
      fetch_granule<kGuarded>(start, left, (kPacks - 1) * kStep + N, loaded.edge);
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
  static constexpr int kStep = kSliceStep<N>;

 public:
  // The slice starts at `at`; `left` columns remain of the row from there on, 0 for no row.
  __device__ __forceinline__ void open(T* at, int left) {
    start_ = reinterpret_cast<char*>(at);
    end_ = left;
    shift_ = kRegular ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(at) % kBytes);
  }

  template <typename Group>
  __device__ __forceinline__ void store(int p, const Pack<T, N>& pack, const Group& group) {
    const int count = end_ - p * kStep;  // N or more: a whole pack; 0 or less: nothing
    char* const own = start_ + int64_t{p} * kStep * sizeof(T);
    if (kRegular || shift_ == 0) {
      if (kRegular ? count > 0 : count >= N) {
        detail::store_streamed<kBytes>(own, pack.words);
      } else if (!kRegular) {
        store_elements(own, pack, 0, count);
      }
      return;
    }
    const Words<kBytes>& words = pack.words;
    Words<kBytes> before;
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      const uint32_t previous =
          __shfl_sync(group.mask(), words.at[i], group.lane() - 1, group.lanes());
      before.at[i] = group.lane() == 0 ? carried_.at[i] : previous;
      carried_.at[i] = previous;
    }
    const Words<kBytes> granule = detail::shifted_bytes<kBytes>(before, words, kBytes - shift_);
    // Own columns in the granule shared with the lane before.
    const int head = (kBytes - shift_) / static_cast<int>(sizeof(T));
    const bool starts = p == 0 && group.lane() == 0;
    const bool ends = p == kPacks - 1 && group.lane() == group.lanes() - 1;
    if (count >= N) {
      if (starts) {
        detail::store_from<T>(own - shift_, granule, shift_);
      } else {
        detail::store_streamed<kBytes>(own - shift_, granule);
      }
      // The next lane writes this one's tail with its own head, if it has all of that.
      if (ends || count - N < head) {
        detail::store_to<T>(own - shift_ + kBytes,
                            detail::shifted_bytes<kBytes>(words, words, kBytes - shift_), shift_);
      }
    } else if (count > 0) {  // the row's end
      const bool whole = !starts && count >= head;
      if (whole) detail::store_streamed<kBytes>(own - shift_, granule);
      store_elements(own, pack, whole ? head : 0, count);
    }
  }

 private:
  __device__ static void store_elements(char* start, const Pack<T, N>& pack, int begin, int end) {
    T elements[N];
    memcpy(elements, &pack, sizeof(pack));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= begin && i < end) reinterpret_cast<T*>(start)[i] = elements[i];
    }
  }

  char* start_;
  int end_, shift_;
  Words<kBytes> carried_ = {};
};

}  // namespace fused_norm
