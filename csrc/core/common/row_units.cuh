// Slices of rows that are dealt out in units, elements or pairs (row_columns.cuh): reading and
// writing them, and their columns' parameters. Each access of a warp is of neighbours.
#pragma once

#include "core/common/pack.cuh"
#include "core/common/row_columns.cuh"

namespace fused_norm {

// Calls visit(i, inside) for the first elements of a pack's units, where `left` columns of the row
// remain from the thread's first element on; `inside`: whether the unit lies in the row. No branch
// but one for the pack: what is not inside is left out by predicates.
template <RowsLie kLie, int N, typename Group, typename Visit>
__device__ __forceinline__ void visit_units(const Group& group, int left, Visit visit) {
  constexpr int kUnit = unit_of(kLie, N);
  const int lanes = group.lanes(), left_of_all = left + group.lane() * kUnit;
  if (left_of_all >= N * lanes) {
#pragma unroll
    for (int i = 0; i < N; i += kUnit) visit(i, true);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += kUnit) visit(i, i * lanes < left);
  }
}

// Calls run(whole) with whether a row's units can be accessed as such, known at compile time: the
// pairs of a row that starts in the middle of one are two elements each. Once for all of a thread's
// units, so that none of their accesses waits for a branch.
template <int kUnit, typename T, typename Run>
__device__ __forceinline__ void with_units(const T* row, Run run) {
  if (kUnit == 1 || reinterpret_cast<uintptr_t>(row) % (kUnit * sizeof(T)) == 0) {
    run(std::true_type());
  } else {
    run(std::false_type());
  }
}

// A unit as registers hold it.
template <typename T, int kUnit>
using Unit = Words<(sizeof(T) * kUnit < 4 ? 4 : sizeof(T) * kUnit)>;

// Loads one, through the read-only path and past the first-level cache.
template <int kUnit, bool kWhole, typename T>
__device__ __forceinline__ Unit<T, kUnit> load_unit(const T* from) {
  auto bits = [&](int i) { return uint32_t{load_streamed<sizeof(T)>(from + i).at[0]}; };
  if constexpr (kUnit == 1) {
    return {bits(0)};
  } else if constexpr (kWhole) {
    return load_streamed<kUnit * sizeof(T)>(from);
  } else {
    static_assert(sizeof(T) == 2);
    return {bits(0) | bits(1) << 16};
  }
}

// Reads slices. Units stay apart until all are asked for: to put them together waits for them. Of
// so many units that they would fill the registers the rest is asked for when the first are packs.
template <typename T, int N, RowsLie kLie, int kPacks>
class UnitReader {
  static constexpr int kUnit = unit_of(kLie, N), kMostUnits = 32;
  static constexpr bool kLate = kPacks * N / kUnit > kMostUnits;
  static constexpr int kAtOnce = kLate ? 2 : kPacks;  // packs

 public:
  struct Loaded {
    Unit<T, kUnit> units[kAtOnce][N / kUnit] = {};
  };

  template <typename Group>
  __device__ __forceinline__ void fetch(const T* at, int left, const Group& group, Loaded& loaded) {
    at_ = at;
    left_ = left;
    if (!kLate) load(0, group, loaded);
  }

  template <typename Group, typename Put>
  __device__ __forceinline__ void extract(const Loaded& fetched, const Group& group,
                                          Put put) const {
    if constexpr (!kLate) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) put(p, pack_of(fetched.units[p]));
    } else {
#pragma unroll
      for (int first = 0; first < kPacks; first += kAtOnce) {
        Loaded loaded;
        load(first, group, loaded);
#pragma unroll
        for (int p = 0; p < kAtOnce; ++p) put(first + p, pack_of(loaded.units[p]));
      }
    }
  }

 private:
  template <typename Group>
  __device__ __forceinline__ void load(int first, const Group& group, Loaded& loaded) const {
    const int step = slice_step<N>(group);
    with_units<kUnit>(at_, [&](auto whole) {
#pragma unroll  // the other way round the compiler has one load wait for another
      for (int p = kAtOnce - 1; p >= 0; --p) {
        const int from = (first + p) * step;
        visit_units<kLie, N>(group, left_ - from, [&](int i, bool inside) {
          if (inside) {
            loaded.units[p][i / kUnit] =
                load_unit<kUnit, decltype(whole)::value>(at_ + from + i * group.lanes());
          }
        });
      }
    });
  }
  __device__ __forceinline__ static Pack<T, N> pack_of(const Unit<T, kUnit> (&units)[N / kUnit]) {
    Pack<T, N> pack;
    if constexpr (sizeof(T) * kUnit < 4) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i)
        pack.words.at[i] = units[2 * i].at[0] | units[2 * i + 1].at[0] << 16;
    } else {
      memcpy(&pack, units, sizeof(pack));
    }
    return pack;
  }

  const T* at_;
  int left_;
};

// Writes them, likewise from `at` on.
template <typename T, int N, RowsLie kLie>
struct UnitWriter {
  static constexpr int kUnit = unit_of(kLie, N);
  T* at;
  int left;

  template <typename Group>
  __device__ __forceinline__ void store(int p, const Pack<T, N>& pack, const Group& group) const {
    const int step = slice_step<N>(group);
    with_units<kUnit>(at, [&](auto whole) {
      visit_units<kLie, N>(group, left - p * step, [&](int i, bool inside) {
        if (!inside) return;
        T* const to = at + p * step + i * group.lanes();
        if constexpr (kUnit > 1 && decltype(whole)::value) {
          Unit<T, kUnit> unit;
#pragma unroll
          for (int word = 0; word < static_cast<int>(sizeof(unit)) / 4; ++word)
            unit.at[word] = pack.words.at[i * static_cast<int>(sizeof(T)) / 4 + word];
          store_streamed<sizeof(unit)>(to, unit);
        } else {
#pragma unroll
          for (int e = 0; e < kUnit; ++e)
            __stcs(reinterpret_cast<Bits<T>*>(to + e), bits_of(pack, i + e));
        }
      });
    });
  }
};

// Parameters of a pack's columns, from `col` on, in the accumulator's precision.
// `data` is 16-byte aligned.
template <typename T, RowsLie kLie, int N, typename Group, typename A>
__device__ __forceinline__ void load_params_apart(const void* data, int col, int cols,
                                                  const Group& group, A (&out)[N]) {
  constexpr int kUnit = unit_of(kLie, N);
  const T* const from = static_cast<const T*>(data) + col;
  Pack<T, kUnit> units[N / kUnit] = {};
  visit_units<kLie, N>(group, cols - col, [&](int i, bool inside) {
    if (inside) {
      units[i / kUnit].words = load_words<kUnit * sizeof(T)>(from + i * group.lanes());
    }
  });
#pragma unroll
  for (int i = 0; i < N; i += kUnit) {
    Accumulator<T> values[kUnit];
    unpack(units[i / kUnit], values);
#pragma unroll
    for (int e = 0; e < kUnit; ++e) out[i + e] = static_cast<A>(values[e]);
  }
}
}  // namespace fused_norm
