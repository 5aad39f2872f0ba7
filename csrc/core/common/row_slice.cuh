// A thread's share of a row: kPacks packs, those of a warp next to each other in memory. Pack p of
// lane l of warp w starts at column ((w * kPacks + p) * 32 + l) * N, whatever the row's alignment.
// Rows that are not whole packs are dealt out element by element within those 32 * N columns: pack
// p then holds column (w * kPacks + p) * 32 * N + l and those 32, 64, ... further on. (For 32 read
// the group's lanes, where it is less than a warp.)
#pragma once

#include "core/common/row_access.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

// How the rows of a launch lie. Kernels hold all forms and branch once.
enum class RowsLie {
  kRegular,   // each starts on a pack boundary and is a whole number of packs
  kShifted,   // whole packs, which start anywhere
  kElements,  // not whole packs
};

// How far apart the columns of a pack are, where a group is whole warps.
constexpr int columns_apart(RowsLie lie) { return lie == RowsLie::kElements ? kWarpSize : 1; }

// First column of a thread's packs, and the distance from one to the next.
template <int N, int kPacks, RowsLie kLie = RowsLie::kRegular, typename Group>
__device__ __forceinline__ int slice_column(const Group& group) {
  const int of_warp = group.thread() / kWarpSize * kPacks * kWarpSize * N;
  return of_warp + group.lane() * (kLie == RowsLie::kElements ? 1 : N);
}
template <int N>
constexpr int kSliceStep = kWarpSize* N;
template <int N, typename Group>
__device__ __forceinline__ int slice_step(const Group& group) {
  return group.lanes() * N;
}

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

  // The same, all of it, as values.
  template <typename Group>
  __device__ __forceinline__ void extract(const Loaded& loaded, int left, const Group& group,
                                          float (&values)[kPacks][N]) const {
    extract(loaded, left, group, [&](int p, const Pack<T, N>& pack) { unpack(pack, values[p]); });
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

// Calls visit(i, inside) for the elements of a pack of a row that is not whole packs, of which
// `left` columns remain from the thread's first element on. Where the row ends within the group's
// pack, only as far as that, with `inside` for whether this thread's element lies in the row.
template <int N, typename Group, typename Visit>
__device__ __forceinline__ void visit_elements(const Group& group, int left, Visit visit) {
  const int lanes = group.lanes(), left_of_all = left + group.lane();
  if (left_of_all >= N * lanes) {
#pragma unroll
    for (int i = 0; i < N; ++i) visit(i, true);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i * lanes >= left_of_all) break;
      visit(i, i * lanes < left);
    }
  }
}

// Reads slices of such rows. Each access of a warp is of neighbours.
template <typename T, int N, int kPacks>
class ElementReader {
 public:
  // Elements stay apart until all are asked for: to put them together waits for them.
  struct Loaded {
    uint32_t bits[kPacks][N] = {};
  };

  template <typename Group>
  __device__ __forceinline__ void fetch(const T* at, int left, bool, const Group& group,
                                        Loaded& loaded) const {
    const int step = slice_step<N>(group);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      visit_elements<N>(group, left - p * step, [&](int i, bool inside) {
        if (inside) loaded.bits[p][i] = load_bits_streamed(at + p * step + i * group.lanes());
      });
    }
  }

  template <typename Group, typename Put>
  __device__ __forceinline__ void extract(const Loaded& loaded, int, const Group&, Put put) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) put(p, pack_of<T>(loaded.bits[p]));
  }
  template <typename Group>
  __device__ __forceinline__ void extract(const Loaded& loaded, int, const Group&,
                                          float (&values)[kPacks][N]) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < N; ++i) values[p][i] = value_of<T>(loaded.bits[p][i]);
    }
  }
};

// Writes them.
template <typename T, int N, int kPacks>
class ElementWriter {
 public:
  __device__ __forceinline__ void open(T* at, int left) {
    at_ = at;
    left_ = left;
  }

  template <typename Group>
  __device__ __forceinline__ void store(int p, const Pack<T, N>& pack, const Group& group) const {
    const int step = slice_step<N>(group);
    visit_elements<N>(group, left_ - p * step, [&](int i, bool inside) {
      if (inside)
        __stcs(reinterpret_cast<Bits<T>*>(at_ + p * step + i * group.lanes()), bits_of(pack, i));
    });
  }

 private:
  T* at_;
  int left_;
};

// Parameters of a pack's columns in such rows, from `col` on, in the accumulator's precision.
template <typename T, int N, typename Group, typename A>
__device__ __forceinline__ void load_params_apart(const void* data, int col, int cols,
                                                  const Group& group, A (&out)[N]) {
  const T* const from = static_cast<const T*>(data) + col;
  T values[N] = {};
  // Outside of the row the group's first, so that no load waits for a condition.
  visit_elements<N>(group, cols - col, [&](int i, bool inside) {
    values[i] = __ldg(from + (inside ? i * group.lanes() : -group.lane()));
  });
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = static_cast<A>(values[i]);
}
template <int N, typename Group, typename A>
__device__ __forceinline__ void load_params_apart(const ParamVector& params, int col, int cols,
                                                  const Group& group, A (&out)[N]) {
  if (params.dtype == DType::kBFloat16) {
    load_params_apart<__nv_bfloat16>(params.data, col, cols, group, out);
  } else if (params.dtype == DType::kFloat32) {
    load_params_apart<float>(params.data, col, cols, group, out);
  } else {
    load_params_apart<__half>(params.data, col, cols, group, out);
  }
}

template <typename T, int N, RowsLie kLie, int kPacks>
using ReaderOf = std::conditional_t<kLie == RowsLie::kElements, ElementReader<T, N, kPacks>,
                                    SliceReader<T, N, kLie == RowsLie::kRegular, kPacks>>;
template <typename T, int N, RowsLie kLie, int kPacks>
using WriterOf = std::conditional_t<kLie == RowsLie::kElements, ElementWriter<T, N, kPacks>,
                                    SliceWriter<T, N, kLie == RowsLie::kRegular, kPacks>>;

}  // namespace fused_norm
