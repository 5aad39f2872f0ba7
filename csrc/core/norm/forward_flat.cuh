// Forward for short rows that are not whole packs and follow each other without gaps.
#pragma once

#include "core/common/tile_ring.cuh"
#include "core/norm/forward.cuh"

namespace fused_norm {

// A thread's share of such a row, which lies in shared memory: its columns are those of
// row_columns.cuh. Bounds as SliceBounds are, but nothing is visited where no lane has anything.
template <RowsLie kLie, typename T, int N, typename Group>
class FlatSlice {
  static constexpr int kUnit = kLie == RowsLie::kShifted ? 1 : unit_of(kLie, N);

 public:
  // The slice starts at `at`; `left` columns remain of the row from there on, 0 for no row.
  __device__ __forceinline__ FlatSlice(const Group& group, T* at, int left)
      : group_(group), at_(at), left_(left) {}

  __device__ __forceinline__ bool reach(int p) const { return left(p) > 0; }
  template <typename Visit>
  __device__ __forceinline__ void visit(int p, Visit visit) const {
    visit_units(p, [&](int first, bool inside) {
#pragma unroll
      for (int i = first; i < first + kUnit; ++i) visit(i, inside);
    });
  }

  // Zero past the row's end.
  __device__ __forceinline__ void load(int p, float (&out)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = 0;
    visit_units(p, [&](int i, bool inside) {
      if (inside)
        unpack_unit<T, kUnit>(load_unit<kUnit, true, Memory::kShared>(unit(p, i)), out + i);
    });
  }
  __device__ __forceinline__ void store(int p, const Pack<T, N>& pack) const {
    visit_units(p, [&](int i, bool inside) {
      if (!inside) return;
      if constexpr (kUnit == 1) {
        *reinterpret_cast<Bits<T>*>(unit(p, i)) = bits_of(pack, i);
      } else {
        *reinterpret_cast<uint32_t*>(unit(p, i)) = pack.words.at[i / 2];
      }
    });
  }

 private:
  __device__ __forceinline__ int left(int p) const { return left_ - p * slice_step<N>(group_); }
  // Of pack p, the unit from its element i on.
  __device__ __forceinline__ T* unit(int p, int i) const {
    return at_ + p * slice_step<N>(group_) + (kLie == RowsLie::kShifted ? i : i * group_.lanes());
  }

  template <typename Visit>
  __device__ __forceinline__ void visit_units(int p, Visit visit) const {
    const int lanes = kLie == RowsLie::kShifted ? 1 : group_.lanes();
    const int of_own = left(p),
              of_all = kLie == RowsLie::kShifted ? of_own : of_own + group_.lane() * kUnit;
    if (of_all >= N * lanes) {
#pragma unroll
      for (int i = 0; i < N; i += kUnit) visit(i, true);
    } else {
#pragma unroll
      for (int i = 0; i < N; i += kUnit) {
        if (i * lanes >= of_all) break;
        visit(i, i * lanes < of_own);
      }
    }
  }

  const Group& group_;
  T* at_;
  int left_;
};

// Parameters of the threads' columns in shared memory, in fp32: all lanes' next to each other.
template <RowsLie kLie, bool kBias, int N, int kPacks>
class FlatParams {
 public:
  template <typename Group>
  __device__ FlatParams(char* memory, const Group& group)
      : own_(reinterpret_cast<float4*>(memory) + group.thread()), threads_(group.threads()) {}

  // By all groups of the block, each some; a barrier of the block's follows. Where rows are
  // shifted, there may be none, and of any type.
  template <typename X, typename Group>
  __device__ void stage(const AffineStore<X>& store, int col, const Group& group) const {
    const bool typed = store.template all_of<kBias>(kDTypeOf<X>);
    for (int p = group.index(); p < kPacks; p += group.groups()) {
      const int first = col + p * slice_step<N>(group);
      float g[N], b[N];
      if (dealt_out(kLie) || typed) {
        store.template load<RowForm<kLie, X, X>, kBias, false>(first, group, g, b);
      } else {
        store.template load<RowForm<RowsLie::kShifted, X, void>, kBias, false>(first, group, g, b);
      }
      put(0, p, g);
      if (kBias) put(1, p, b);
    }
  }
  __device__ __forceinline__ void get(int p, float (&g)[N], float (&b)[N]) const {
    get(0, p, g);
    if (kBias) get(1, p, b);
  }

 private:
  __device__ __forceinline__ float4* at(int vector, int p, int i) const {
    return own_ + ((vector * kPacks + p) * (N / 4) + i / 4) * threads_;
  }
  __device__ __forceinline__ void put(int vector, int p, const float (&values)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i += 4) memcpy(at(vector, p, i), values + i, sizeof(float4));
  }
  __device__ __forceinline__ void get(int vector, int p, float (&values)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i += 4) memcpy(values + i, at(vector, p, i), sizeof(float4));
  }

  float4* own_;
  int threads_;
};

// What passes through a ring of tiles: x, in whose place comes y.
template <typename X>
struct ForwardTiles {
  static constexpr int kWritten = 0;
  const InputLoad<X>& load;
  X* y;

  __device__ static constexpr int count() { return 1; }
  __device__ static constexpr bool flat() { return true; }
  __device__ __forceinline__ TileRows<X> rows_of(int) const { return {load.x, load.layout}; }
  __device__ __forceinline__ X* written() const { return y; }
};

// Persistent blocks walk over tiles of rows and normalize them in place: the threads touch but
// shared memory, where it matters little how a row lies. The reduction tree is that of
// norm_forward_once().
template <RowsLie kLie, bool kRms, int kPacks, typename X>
__device__ __forceinline__ void norm_forward_in_place(
    const InputLoad<X>& load, const AffineStore<X>& store,
    const StatisticsOf<InputLoad<X>, AffineStore<X>>& out, const FlatRows& flat,
    SumSlots<float> (&sums)[2], CopyBarrier (&filled)[kMaxFlatSlots]) {
  constexpr int N = 16 / sizeof(X);
  extern __shared__ __align__(128) char memory[];

  const RowGroup<Barrier::kBlock, whole_warps(kPacks)> group;
  const int cols = load.cols, col = slice_column<N, kPacks, kLie>(group);
  const FlatParams<kLie, !kRms, N, kPacks> params(memory, group);
  const ForwardTiles<X> tensors{load, store.y};
  TileRing<X, ForwardTiles<X>, FlatRows> tiles(tensors, load.rows, cols, flat, filled,
                                               memory + flat.params_bytes);
  const TileTurns turns = tile_turns(group, flat.rows, dealt_out(kLie));
  meet_previous_kernel();
  tiles.start();
  params.stage(store, col, group);
  __syncthreads();

  for (int set = 0; tiles.any(); tiles.next()) {
    tiles.template wait<false>();
    X* const tile = tiles.part(0);
    const int rows = tiles.rows();
    // Past the last row a group is at work on anything, for its warp's and its block's sake.
    int r = turns.first;
    for (int turn = 0; turn < turns.count; ++turn, r += turns.step, set ^= 1) {
      const FlatSlice<kLie, X, N, decltype(group)> slice(group, tile + r * cols + col, cols - col);
      SliceValues<X, N, kPacks, false> values;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) slice.load(p, values.at(p));
      const auto statistics =
          part_statistics<kRms>(group, values, slice, out.cols, out.per_cols, sums[set]);
      const float rstd = out.rstd_of(statistics.squares);
      if (group.thread() == 0 && r < rows)
        out.template write<kRms>(tiles.first_row() + r, statistics.mean, rstd);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (!slice.reach(p)) break;
        float x[N], g[N], b[N];
        params.get(p, g, b);
        values.get(p, slice, x);
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] *= rstd;
        slice.store(p, store.template apply<!kRms>(x, g, b));
      }
    }
  }
  tiles.finish();
}

// All forms in one kernel a type, which branches once.
template <typename X>
__global__ void __launch_bounds__(kFlatThreads, kFlatBlocks)
    norm_forward_flat(const __grid_constant__ InputLoad<X> load,
                      const __grid_constant__ AffineStore<X> store,
                      const StatisticsOf<InputLoad<X>, AffineStore<X>> out, RowsLie lie, bool rms,
                      int packs, const FlatRows flat) {
#if __CUDA_ARCH__ >= 900
  __shared__ SumSlots<float> sums[2];
  __shared__ CopyBarrier filled[kMaxFlatSlots];
  auto run = [&](auto of_lie, auto is_rms, auto of_packs) {
    norm_forward_in_place<decltype(of_lie)::value, decltype(is_rms)::value,
                          decltype(of_packs)::value>(load, store, out, flat, sums, filled);
  };
  auto run_packs = [&](auto of_lie, auto is_rms) {
    if constexpr (decltype(of_lie)::value != RowsLie::kShifted) {
      if (packs == 2) return run(of_lie, is_rms, std::integral_constant<int, 2>());
      if (packs == 4) return run(of_lie, is_rms, std::integral_constant<int, 4>());
    }
    run(of_lie, is_rms, std::integral_constant<int, 3>());
  };
  auto run_kind = [&](auto of_lie) {
    if (rms) {
      run_packs(of_lie, std::true_type());
    } else {
      run_packs(of_lie, std::false_type());
    }
  };
  if (lie == RowsLie::kPairs) {
    run_kind(std::integral_constant<RowsLie, RowsLie::kPairs>());
  } else if (lie == RowsLie::kElements) {
    run_kind(std::integral_constant<RowsLie, RowsLie::kElements>());
  } else {
    run_kind(std::integral_constant<RowsLie, RowsLie::kShifted>());
  }
#endif
}

}  // namespace fused_norm
