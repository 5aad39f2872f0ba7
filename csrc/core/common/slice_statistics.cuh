// Row statistics of rows that stay in registers: each thread holds a slice (row_slice.cuh).
#pragma once

#include "core/common/row_slice.cuh"
#include "core/common/statistics.cuh"

namespace fused_norm {

// Sums over N values as a tree, whose rounding errors are those of log2(N) additions.
template <int N, typename A>
__device__ __forceinline__ A tree_sum(const A* values) {
  if constexpr (N == 1) {
    return values[0];
  } else {
    return tree_sum<N / 2>(values) + tree_sum<N - N / 2>(values + N / 2);
  }
}

// What a group of threads knows of the row, or of its block's part of it: every thread the same.
// LayerNorm: mean, and squares = sum (x - mean)^2. RMSNorm: squares = sum x^2.
template <typename A>
struct PartStatistics {
  A mean, squares;
};

// Where a thread's packs are: `left` columns of the row remain from the first on.
template <int N, RowsLie kLie, typename Group>
class SliceBounds {
 public:
  __device__ SliceBounds(const Group& group, int left) : group_(group), left_(left) {}

  // Whether the row reaches pack p.
  __device__ __forceinline__ bool reach(int p) const { return left(p) > 0; }

  // Calls visit(i, inside) for the elements of pack p.
  template <typename Visit>
  __device__ __forceinline__ void visit(int p, Visit visit) const {
    if constexpr (kLie == RowsLie::kElements) {
      visit_elements<N>(group_, left(p), visit);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) visit(i, true);
    }
  }

 private:
  __device__ __forceinline__ int left(int p) const { return left_ - p * slice_step<N>(group_); }

  const Group& group_;
  int left_;
};

// Two sums at once.
template <typename A>
struct Sums {
  A a, b;
  __device__ static Sums merge(const Sums& x, const Sums& y) { return {x.a + y.a, x.b + y.b}; }
};

// Shared memory for two sums over a row, one after the other.
template <typename A>
struct SumSlots {
  A first[16], other[16];
  Sums<A> second[16];
};

// The sum over a group, of up to 16 warps: every thread gets the same bits. `slots` for this sum
// alone.
template <typename Group, typename V, typename Add>
__device__ __forceinline__ V group_sum(const Group& group, V value, V (&slots)[16], Add add) {
  value = group.reduce_lanes(value, add);
  if (group.threads() <= kWarpSize) return value;
  V* const own = slots + group.index() * group.warps();
  if (group.lane() == 0) own[group.thread() / kWarpSize] = value;
  __syncthreads();
  const int warp = group.lane() % 16;
  return group.template reduce_over<16>(warp < group.warps() ? own[warp] : V{}, add);
}

// A thread's values of a row, zero past its end: in registers as they are reckoned with, or, where
// these do not suffice, as packs (kPacked) that are taken apart each time.
template <typename T, int N, int kPacks, bool kPacked>
class SliceValues {
  using A = Accumulator<T>;

 public:
  __device__ __forceinline__ void put(int p, const Pack<T, N>& pack) {
    if constexpr (kPacked) {
      packs_[p] = pack;
    } else {
      unpack(pack, values_[p]);
    }
  }
  // As they were put, or after centre() and recentre().
  template <typename Bounds>
  __device__ __forceinline__ void get(int p, const Bounds& bounds, A (&x)[N]) const {
    if constexpr (kPacked) {
      unpack(packs_[p], x);
      if (centred_) subtract(x, mean_, p, bounds);
      if (recentred_) subtract(x, further_, p, bounds);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = values_[p][i];
    }
  }
  // Makes them differences from `mean`, and these from `further`. Packed or not, the same bits come
  // out.
  template <typename Bounds>
  __device__ __forceinline__ void centre(A mean, const Bounds& bounds) {
    if constexpr (kPacked) {
      mean_ = mean;
      centred_ = true;
    } else {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) subtract(values_[p], mean, p, bounds);
    }
  }
  template <typename Bounds>
  __device__ __forceinline__ void recentre(A further, const Bounds& bounds) {
    if constexpr (kPacked) {
      further_ = further;
      recentred_ = true;
    } else {
      centre(further, bounds);
    }
  }

  // Makes the compiler take packs apart once more, rather than keep what it had.
  __device__ __forceinline__ void forget() {
    if constexpr (kPacked) forget_elements(packs_);
  }

  // x - mean for the values of pack p that lie in the row.
  template <typename Bounds>
  __device__ __forceinline__ static void subtract(A (&x)[N], A mean, int p, const Bounds& bounds) {
    bounds.visit(p, [&](int i, bool inside) {
      if (inside) x[i] -= mean;
    });
  }

 private:
  A values_[kPacked ? 1 : kPacks][N];
  Pack<T, N> packs_[kPacked ? kPacks : 1];
  A mean_, further_;
  bool centred_ = false, recentred_ = false;
};

// Calls visit(p, x) with each pack's values.
template <typename T, int N, int kPacks, bool kPacked, typename Bounds, typename Visit>
__device__ __forceinline__ void visit_packs(const SliceValues<T, N, kPacks, kPacked>& values,
                                            const Bounds& bounds, Visit visit) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!bounds.reach(p)) break;
    Accumulator<T> x[N];
    values.get(p, bounds, x);
    visit(p, x);
  }
}

template <int N, typename A>
__device__ __forceinline__ A tree_of_squares(const A (&x)[N]) {
  A pairs[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) pairs[i] = fma(x[2 * i], x[2 * i], x[2 * i + 1] * x[2 * i + 1]);
  return tree_sum<N / 2>(pairs);
}

// The mean comes with the rounding errors of a sum. A second sum, of the differences from it, finds
// how far it is off, so that rows far from zero lose nothing and the mean of a constant row is
// exact (the corrected two-pass algorithm of Chan, Golub and LeVeque). bf16 can do without: fp32
// holds the sum of 2^16 equal ones.
template <typename T>
constexpr bool kCorrectsMean = !std::is_same_v<T, __nv_bfloat16>;

// The statistics of a row. LayerNorm centres the values about the mean, but where that is
// corrected: then the caller does, so that they are rounded once. `cols` are those of the whole
// group, `per_cols` their reciprocal.
template <bool kRms, typename Group, typename T, int N, int kPacks, bool kPacked, typename Bounds,
          typename A>
__device__ __forceinline__ PartStatistics<A> part_statistics(
    const Group& group, SliceValues<T, N, kPacks, kPacked>& values, const Bounds& bounds, A cols,
    A per_cols, SumSlots<A>& slots) {
  constexpr bool kCorrected = !kRms && kCorrectsMean<T>;
  auto add = [](A x, A y) { return x + y; };
  PartStatistics<A> out{};
  if constexpr (!kRms) {
    A of_pack[kPacks] = {};
    visit_packs(values, bounds, [&](int p, const A(&x)[N]) { of_pack[p] = tree_sum<N>(x); });
    const A sum = group_sum(group, tree_sum<kPacks>(of_pack), slots.first, add);
    // The quotient is rounded but once, so that the mean of equal values is that value.
    const A quotient = sum * per_cols;
    out.mean = fma(fma(-quotient, cols, sum), per_cols, quotient);
    if (!kCorrected) values.centre(out.mean, bounds);
  }
  A of_pack[kPacks] = {}, squares_of_pack[kPacks] = {};
  visit_packs(values, bounds, [&](int p, A(&x)[N]) {
    if (kCorrected) {
      values.subtract(x, out.mean, p, bounds);
      of_pack[p] = tree_sum<N>(x);
    }
    squares_of_pack[p] = tree_of_squares(x);
  });
  if constexpr (!kCorrected) {
    out.squares = group_sum(group, tree_sum<kPacks>(squares_of_pack), slots.other, add);
  } else {
    const Sums<A> sums =
        group_sum(group, Sums<A>{tree_sum<kPacks>(of_pack), tree_sum<kPacks>(squares_of_pack)},
                  slots.second, Sums<A>::merge);
    const A correction = sums.a * per_cols;
    const A about_mean = fma(-sums.a, correction, sums.b);
    out.squares = about_mean < A(0) ? A(0) : about_mean;
    out.mean += correction;
  }
  return out;
}

// The statistics of a row from those of its parts, part_cols columns each but for the last: Chan,
// Golub and LeVeque's parallel form of Welford's update, for several parts at once.
template <bool kRms, typename A>
__device__ __forceinline__ PartStatistics<A> merge_parts(const PartStatistics<A>* parts, int count,
                                                         int part_cols, int cols, A per_cols) {
  PartStatistics<A> row = parts[0];
  if constexpr (kRms) {
#pragma unroll 1
    for (int part = 1; part < count; ++part) row.squares += parts[part].squares;
    return row;
  }
  auto cols_of = [&](int part) { return static_cast<A>(min(part_cols, cols - part * part_cols)); };
  A offset = 0;
#pragma unroll 1
  for (int part = 1; part < count; ++part) {
    offset += cols_of(part) * (parts[part].mean - row.mean);
  }
  offset *= per_cols;
  row.squares += cols_of(0) * (offset * offset);
#pragma unroll 1
  for (int part = 1; part < count; ++part) {
    const A difference = (parts[part].mean - row.mean) - offset;
    row.squares += parts[part].squares + cols_of(part) * (difference * difference);
  }
  row.mean += offset;
  return row;
}

}  // namespace fused_norm
