// Forward for long rows, which the blocks of a cluster share: persistent clusters walk over them.
#pragma once

#include "core/common/branch.cuh"
#include "core/common/cluster_parts.cuh"
#include "core/norm/forward.cuh"

namespace fused_norm {

using ForwardParts = ClusterParts<PartStatistics<float>, kPortableClusterBlocks>;
template <typename X>
struct ForwardRingShared {
  SumSlots<X> sums[2];  // used in turn
  ForwardParts::Slots parts;
  CopyBarrier filled[kMaxForwardSlots];
};

// A block has the same columns of every row. It keeps their parameters in shared memory, where rows
// on their way wait too: bulk copies bring them, one slot each. A row leaves its slot for registers
// as soon as it is there, and the slot is filled anew. For regular rows whose parameters are all
// there, of the input's type, and taken as they are. The reduction tree is norm_forward_once()'s.
template <bool kRms, typename X>
__device__ __forceinline__ void norm_forward_walk(
    const InputLoad<X>& load, const AffineStore<X>& store,
    const StatisticsOf<InputLoad<X>, AffineStore<X>>& out, int slots,
    ForwardRingShared<X>& shared) {
  constexpr RowsLie kLie = RowsLie::kRegular;
  constexpr int N = kPackElements<X>, kPacks = kMostPacks;
  constexpr bool kPacked = kPacks * N > held_values(kLie);
  extern __shared__ __align__(128) char memory[];

  const RowGroup<true> group;
  const RowCluster cluster;
  const int blocks = cluster.blocks(), slot_cols = group.threads() * kPacks * N;
  const int first_col = cluster.rank() * slot_cols, cols = min(slot_cols, load.cols - first_col);
  const int own = slice_column<N, kPacks, kLie>(group), col = first_col + own;
  const int left = load.cols - col;
  const SliceBounds<N, kLie, decltype(group)> bounds(group, left);
  const int64_t stride = gridDim.x / blocks;
  int64_t row = blockIdx.x / blocks;

  // After the parameters. One thread fills them.
  X* const ring = reinterpret_cast<X*>(memory + group.threads() * params_bytes(kPacks, !kRms));
  const bool fills = group.thread() == 0;
  CopyBarrier* const filled = shared.filled;
  auto fill = [&](int slot, int64_t row) {
    if (row >= load.rows) return;
    const int bytes = cols * static_cast<int>(sizeof(X));
    const X* const from = row_start(load.x, load.layout, row) + first_col;
    filled[slot].expect(bytes);
    filled[slot].copy(reinterpret_cast<char*>(ring + slot * slot_cols),
                      reinterpret_cast<const char*>(from), bytes);
  };

  ForwardParts parts(shared.parts, cluster);
  for (int slot = 0; fills && slot < slots; ++slot) filled[slot].init();
  if (fills) CopyBarrier::order_inits();
  cluster.arrive();
  out.listed.meet_previous_kernel();
  for (int slot = 0; fills && slot < slots; ++slot) fill(slot, row + slot * stride);
  ParamsAhead<RowForm<kLie, X, X>, !kRms, N, kPacks, InputLoad<X>, AffineStore<X>, true> params(
      store, col, group);
  params.fetch(group, bounds);
  // A thread's first place with a column of the block's. The first row does not wait for the list.
  int places = 0, place = group.thread(), listed = out.listed.kNone;
  cluster.wait();

  const float part_cols = cols, per_part = reciprocal(part_cols);
  RingSlot slot;
  for (int turn = 0; row < load.rows; ++turn, row += stride) {
    SliceValues<X, N, kPacks, kPacked> values;
    const auto* const packs =
        reinterpret_cast<const AlignedPack<X, N>*>(ring + slot.number * slot_cols);
    filled[slot.number].wait(slot.parity);
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
      values.put(p, bounds.reach(p) ? packs[own / N + p * kWarpSize].pack : Pack<X, N>{});
    const X listed_x = listed < 0 ? X() : ring[slot.number * slot_cols + listed - first_col];
    auto statistics =
        part_statistics<kRms>(group, values, bounds, part_cols, per_part, shared.sums[turn & 1]);
    // All threads have met since they read the slot.
    if (fills) fill(slot.number, row + slots * stride);
    parts.send(turn, statistics);
    statistics = merge_parts<kRms>(parts.wait(turn), blocks, slot_cols, load.cols, out.per_cols);
    if (!kRms) values.centre(statistics.mean, bounds);
    const auto rstd = out.rstd_of(statistics.squares);
    if (group.thread() == 0 && first_col == 0)
      out.write(row, statistics.mean, rstd.nearest(), kRms);
    if (turn == 0) {
      places = out.listed.places();
      listed = out.listed.first_column(place, places, first_col, cols);
    } else if (listed >= 0) {
      out.listed.keep(row, place, static_cast<float>(listed_x), statistics.mean, rstd.nearest());
    }
    if (listed >= 0)  // read again
      out.listed.keep_all(load, row, turn == 0 ? place : place + group.threads(), places, first_col,
                          cols, statistics.mean, rstd.nearest());
    write_normalized<!kRms, kLie>(values, group, bounds, rstd, params, store, row, col, left,
                                  [](int, auto&) {});
    slot.next(slots);
  }
}

template <typename X>
__global__ void __launch_bounds__(kForwardRingThreads, 1)
    norm_forward_ring(const __grid_constant__ InputLoad<X> load,
                      const __grid_constant__ AffineStore<X> store,
                      const __grid_constant__ StatisticsOf<InputLoad<X>, AffineStore<X>> out,
                      int slots) {
#if __CUDA_ARCH__ >= 900
  __shared__ ForwardRingShared<X> shared;
  with_flag(out.mean == nullptr, [&](auto rms) {
    norm_forward_walk<decltype(rms)::value>(load, store, out, slots, shared);
  });
#else
  __trap();  // no plan asks for it
#endif
}

}  // namespace fused_norm
