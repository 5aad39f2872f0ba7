// A thread's share of a row: kPacks packs, those of a warp next to each other in memory. Pack p of
// lane l of warp w starts at column ((w * kPacks + p) * 32 + l) * N.
// Rows that are not whole packs are dealt out within those 32 * N columns in units of U elements,
// pairs if the row's length is even and else one by one: pack p then holds the U columns from
// (w * kPacks + p) * 32 * N + l * U on and those 32 * U, 64 * U, ... further on. (For 32 read the
// group's lanes, where it is less than a warp.)
#pragma once

#include "core/common/row_group.cuh"

namespace fused_norm {

// How the rows of a launch lie. Kernels hold all forms and branch once.
enum class RowsLie {
  kRegular,   // each starts on a pack boundary and is a whole number of packs
  kPairs,     // not whole packs, but an even number of elements; anywhere
  kElements,  // not whole packs; anywhere
};
constexpr bool dealt_out(RowsLie lie) { return lie != RowsLie::kRegular; }

// Whether rows of T are dealt out in pairs where they can be: fp32, whose elements are as wide,
// gains little.
template <typename T>
constexpr bool kInPairs = sizeof(T) == 2;

// How rows of T lie, of which those that are whole packs start on pack boundaries.
template <typename T>
constexpr RowsLie rows_lie(int cols, int pack, bool in_pairs = true) {
  if (cols % pack == 0) return RowsLie::kRegular;
  return in_pairs && kInPairs<T> && cols % 2 == 0 ? RowsLie::kPairs : RowsLie::kElements;
}

// How many columns of a thread's pack, of `pack`, follow each other.
constexpr int unit_of(RowsLie lie, int pack) {
  return lie == RowsLie::kElements ? 1 : lie == RowsLie::kPairs ? 2 : pack;
}
// Element i of a pack is so many columns from its first, in a group of so many lanes a warp.
constexpr int column_in_pack(RowsLie lie, int pack, int i, int lanes = kWarpSize) {
  const int unit = unit_of(lie, pack);
  return i / unit * unit * lanes + i % unit;
}

// First column of a thread's packs, and the distance from one to the next.
template <int N, int kPacks, RowsLie kLie = RowsLie::kRegular, typename Group>
__device__ __forceinline__ int slice_column(const Group& group) {
  const int of_warp = group.thread() / kWarpSize * kPacks * kWarpSize * N;
  return of_warp + group.lane() * unit_of(kLie, N);
}
template <int N, typename Group>
__device__ __forceinline__ int slice_step(const Group& group) {
  return group.lanes() * N;
}

}  // namespace fused_norm
