// Runs: what a warp holds of a row, kPacks packs a lane, each pack of all lanes next to each other.
//
// The lanes write aligned packs wherever the row lies. In an output row that starts `turn` elements
// after a pack boundary they hold the packs of memory, which begin `turn` columns early, and the
// columns that a run so loses at its end take the place of those that it gains at its start: in the
// first elements of the first lane's first pack. Column c of a run is then at place
// (c + turn) % (kPacks * lanes * N). Turning a run changes no sum that is taken by halving strides
// over packs, then over elements, then over lanes, if elements are first brought back to their
// lanes (sum_of_run), so that a row's sums do not depend on where it lies.
#pragma once

#include "core/common/row_access.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

// The columns of a pack: consecutive ones from `first` on, but for its first `wrapped` elements,
// which are `jump` columns further.
struct PackColumns {
  int first, wrapped, jump;
  __device__ __forceinline__ int at(int i) const { return first + i + (i < wrapped ? jump : 0); }
};

// Where a lane's packs lie in the runs of a row. `lane` counts from 0 to `lanes` - 1 among the
// warp's lanes that share the row.
template <int N, bool kRegular>
struct RunPlace {
  int lane, lanes;
  int turn;  // 0 in a regular row

  // Pack p of a run whose pack 0 would start at column `col` in a regular row.
  template <int kPacks>
  __device__ __forceinline__ PackColumns columns(int p, int col) const {
    const int step = lanes * N;
    if constexpr (kRegular) return {col + p * step, 0, 0};
    return {col + p * step - turn, p == 0 && lane == 0 ? turn : 0, kPacks * step};
  }
};

// By how many elements of a pack `row` misses a pack boundary.
template <int N, bool kRegular, typename T>
__device__ __forceinline__ int turn_of(const T* row) {
  return kRegular ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % N);
}

enum class Filler { kZero, kLowest };  // -inf, which a maximum and exponentials pass over

// A word of a pack of the filler.
template <typename T, Filler kFiller>
__device__ __forceinline__ constexpr uint32_t filler_word() {
  return kFiller == Filler::kZero           ? 0
         : std::is_same_v<T, float>         ? 0xff800000u
         : std::is_same_v<T, __nv_bfloat16> ? 0xff80ff80u
                                            : 0xfc00fc00u;
}

// The first `count` elements of `low`, and the others of `high`.
template <typename T, int kBytes>
__device__ __forceinline__ Words<kBytes> spliced(const Words<kBytes>& low,
                                                 const Words<kBytes>& high, int count) {
  const int bits = count * static_cast<int>(sizeof(T)) * 8;
  Words<kBytes> out;
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) {
    const uint32_t from_low = __funnelshift_lc(0xffffffffu, 0, max(bits - 32 * i, 0));
    out.at[i] = (low.at[i] & from_low) | (high.at[i] & ~from_low);
  }
  return out;
}

// Reads runs of one row; columns past its end become the filler. Loads are of aligned granules: a
// pack that is not one takes the next lane's too. Granules may reach into the memory before and
// after the row, but not past that of the last row.
template <typename T, int N, bool kRegular, Filler kFiller>
class RunReader {
  static constexpr int kBytes = sizeof(T) * N;

 public:
  // `rows_follow`: at least a pack's memory lies between the row's end and that of the last row.
  __device__ RunReader(const T* row, int cols, bool rows_follow, const RunPlace<N, kRegular>& place)
      : place(place),
        row_(row),
        cols_(cols),
        rows_follow_(rows_follow),
        shift_(kRegular ? 0 : turn_of<N, false>(row - place.turn)) {}

  const RunPlace<N, kRegular> place;

  // A run as it is loaded: the granules in which the packs begin, and that after them.
  template <int kPacks>
  struct Fetched {
    Words<kBytes> granules[kPacks], edge;
  };

  template <int kPacks>
  __device__ __forceinline__ void fetch(Fetched<kPacks>& fetched, int col) const {
    const int first = col - place.turn - shift_, step = place.lanes * N;
    auto fetch_all = [&](auto load) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) load(fetched.granules[p], p);
      if (!kRegular && place.lane == 0 && place.turn + shift_ != 0) load(fetched.edge, kPacks);
    };
    if (kRegular || rows_follow_) {
      const char* const start = reinterpret_cast<const char*>(row_ + first);
      const int left = cols_ - first;
      fetch_all([&](Words<kBytes>& words, int p) {
        if constexpr (kRegular) words = filler();
        if (p * step < left && (kRegular || p > 0 || first + N > 0))
          words = load_words<kBytes>(start + p * step * sizeof(T));
      });
    } else {
      fetch_all([&](Words<kBytes>& words, int p) { words = guarded(first + p * step); });
    }
  }

  // All lanes of a warp take part.
  template <int kPacks>
  __device__ __forceinline__ void extract(const Fetched<kPacks>& fetched,
                                          Pack<T, N> (&packs)[kPacks], int col) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) packs[p].words = fetched.granules[p];
    if constexpr (!kRegular) {
      Words<kBytes> edge = fetched.edge;
      const int first = col - place.turn, left = cols_ - first, step = place.lanes * N;
      if (__any_sync(kFullMask, shift_ != 0)) {
        shift(packs, edge);
        if (place.lane == 0 && place.turn != 0) {
          const int next = first + kPacks * step - shift_;
          edge = shifted_bytes<kBytes>(guarded(next), guarded(next + N), shift_ * sizeof(T));
        }
      }
      if (cols_ - col < (kPacks + 1) * step) {  // the row may end here
#pragma unroll
        for (int p = 0; p < kPacks; ++p) fill(packs[p].words, left - p * step);
        fill(edge, left - kPacks * step);
      }
      if (place.lane == 0) packs[0].words = spliced<T>(edge, packs[0].words, place.turn);
    }
  }

  template <int kPacks>
  __device__ __forceinline__ void load(Pack<T, N> (&packs)[kPacks], int col) const {
    Fetched<kPacks> fetched;
    fetch(fetched, col);
    extract(fetched, packs, col);
  }

 private:
  // Of an input that lies otherwise than the output: makes packs of granules.
  template <int kPacks>
  __device__ __forceinline__ void shift(Pack<T, N> (&packs)[kPacks],
                                        const Words<kBytes>& edge) const {
    // Each lane needs the granule after its own: the next lane's, or the first lane's next.
    const int next = place.lane + 1;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Words<kBytes>& low = packs[p].words;
      const Words<kBytes>& after = p + 1 < kPacks ? packs[p + 1 < kPacks ? p + 1 : p].words : edge;
      Words<kBytes> high;
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) {
        high.at[i] =
            __shfl_sync(kFullMask, place.lane == 0 ? after.at[i] : low.at[i], next, place.lanes);
      }
      // (Lanes of one have themselves for a neighbour, and so their own next granule.)
      packs[p].words = shifted_bytes<kBytes>(low, high, shift_ * sizeof(T));
    }
  }

  // The granule that starts at column `first`, nothing past the row's end, nor of a row that is
  // none.
  __device__ __forceinline__ Words<kBytes> guarded(int first) const {
    if (first >= cols_ || first + N <= 0 || cols_ == 0) return {};
    if (first + N <= cols_) return load_words<kBytes>(row_ + first);
    return load_elements<T, N>(row_ + first, cols_ - first);
  }

  __device__ __forceinline__ static Words<kBytes> filler() {
    Words<kBytes> words;
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) words.at[i] = filler_word<T, kFiller>();
    return words;
  }
  __device__ __forceinline__ static void fill(Words<kBytes>& words, int left) {
    if (left < N) words = spliced<T>(words, filler(), left);
  }

  const T* row_;
  int cols_;
  bool rows_follow_;
  int shift_;  // elements by which the lanes' packs miss a pack boundary
};

// Writes runs of one row, whose turn is that of `place`.
template <typename T, int N, bool kRegular>
class RunWriter {
 public:
  __device__ RunWriter(T* row, int cols, const RunPlace<N, kRegular>& place)
      : place_(place), row_(row), cols_(cols) {}

  // Pack p of a run of kPacks (RunPlace).
  template <int kPacks>
  __device__ __forceinline__ void store(int p, int col, const Pack<T, N>& pack) const {
    const PackColumns columns = place_.template columns<kPacks>(p, col);
    T* const at = row_ + columns.first;
    const int left = cols_ - columns.first;
    if (columns.wrapped == 0 && left >= N) {
      store_words<sizeof(T) * N>(at, pack.words);
    } else if (!kRegular && left > 0) {
      T elements[N];
      memcpy(elements, &pack, sizeof(pack));
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (i >= columns.wrapped && i < left) at[i] = elements[i];
      }
      if (columns.wrapped > 0) {
        T* const jumped = at + columns.jump;
        const int end = min(columns.wrapped, left - columns.jump);
#pragma unroll
        for (int i = 0; i < N - 1; ++i) {
          if (i < end) jumped[i] = elements[i];
        }
      }
    }
  }

 private:
  const RunPlace<N, kRegular> place_;
  T* row_;
  int cols_;
};

}  // namespace fused_norm
