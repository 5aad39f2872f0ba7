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

// Word i of a pack of the filler.
template <typename T, Filler kFiller>
__device__ __forceinline__ constexpr uint32_t filler_word(int i) {
  return kFiller == Filler::kZero           ? 0
         : std::is_same_v<T, double>        ? (i % 2 == 1 ? 0xfff00000u : 0)
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

// The elements of a row from column `first` on, of which some may lie outside of it: those are
// anything. Reads two granules, and past the row's end only if rows follow.
template <typename T, int N>
__device__ __noinline__ Words<sizeof(T) * N> load_unaligned(const T* row, int first, int cols,
                                                            bool rows_follow) {
  constexpr int kBytes = sizeof(T) * N;
  const int shift = turn_of<N, false>(row + first);
  Words<kBytes> granules[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int col = first - shift + i * N;
    if (col >= cols || col + N <= 0) continue;
    const char* const start = reinterpret_cast<const char*>(row + col);
    granules[i] = rows_follow || col + N <= cols ? detail::load_words<kBytes>(start)
                                                 : detail::load_elements<T, N>(start, cols - col);
  }
  return detail::shifted_bytes<kBytes>(granules[0], granules[1], shift * sizeof(T));
}

// Reads runs of one row; columns past its end become the filler. Loads are of aligned granules,
// which may reach into the memory before and after the row, but not past that of the last row.
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
        simple_(kRegular || (rows_follow && turn_of<N, false>(row) == place.turn)) {}

  const RunPlace<N, kRegular> place;

  // A run as it is loaded; `edge` is the pack after it.
  template <int kPacks>
  struct Fetched {
    Words<kBytes> packs[kPacks], edge;
  };

  template <int kPacks>
  __device__ __forceinline__ void fetch(Fetched<kPacks>& fetched, int col) const {
    const int first = col - place.turn, step = place.lanes * N;
    const bool has_edge = !kRegular && place.lane == 0 && place.turn != 0;
    if (simple_) {
      const char* const start = reinterpret_cast<const char*>(row_ + first);
      const int left = cols_ - first;
      auto load = [&](Words<kBytes>& words, int p) {
        if (p * step < left) words = detail::load_words<kBytes>(start + p * step * sizeof(T));
      };
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if constexpr (kRegular) fetched.packs[p] = filler();
        load(fetched.packs[p], p);
      }
      if (has_edge) load(fetched.edge, kPacks);
    } else {
      auto load = [&](int p) {
        return load_unaligned<T, N>(row_, first + p * step, cols_, rows_follow_);
      };
#pragma unroll
      for (int p = 0; p < kPacks; ++p) fetched.packs[p] = load(p);
      if (has_edge) fetched.edge = load(kPacks);
    }
  }

  template <int kPacks>
  __device__ __forceinline__ void extract(const Fetched<kPacks>& fetched,
                                          Pack<T, N> (&packs)[kPacks], int col) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) packs[p].words = fetched.packs[p];
    if constexpr (!kRegular) {
      Words<kBytes> edge = fetched.edge;
      const int left = cols_ - (col - place.turn), step = place.lanes * N;
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
  __device__ __forceinline__ static Words<kBytes> filler() {
    Words<kBytes> words;
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) words.at[i] = filler_word<T, kFiller>(i);
    return words;
  }
  __device__ __forceinline__ static void fill(Words<kBytes>& words, int left) {
    if (left < N) words = spliced<T>(words, filler(), left);
  }

  const T* row_;
  int cols_;
  bool rows_follow_, simple_;
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
      detail::store_words<sizeof(T) * N>(reinterpret_cast<char*>(at), pack.words);
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
