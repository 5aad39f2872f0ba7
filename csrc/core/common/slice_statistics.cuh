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
    if constexpr (dealt_out(kLie)) {
      visit_units<kLie, N>(group_, left(p), [&](int first, bool inside) {
#pragma unroll
        for (int i = first; i < first + unit_of(kLie, N); ++i) visit(i, inside);
      });
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

// The sum over a group is that of its runs' sums, at most kMaxRuns. A warp's packs are one run, or
// two where it has four packs a lane: these give the same bits as twice as many warps with two. (Of
// two sums at once more than one run each costs too much: 8192 x 4096 in fp32 72 in place of 66
// microseconds, H200.) What less than a warp has is one run.
constexpr int kMaxRuns = 32;
template <typename Group>
constexpr int runs_of(int packs, bool two_sums) {
  return Group::kWholeWarps && packs == 4 && !two_sums ? 2 : 1;
}

// A thread's sums of its runs, from those of its packs: by halved strides, so that half of the
// packs in twice as many lanes give the same bits.
template <int kPacks, int kRuns, typename A>
__device__ __forceinline__ void add_up_runs(const A (&of_pack)[kPacks], A (&runs)[kRuns]) {
  constexpr int kOfRun = kPacks / kRuns;
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    A sums[kOfRun];
#pragma unroll
    for (int p = 0; p < kOfRun; ++p) sums[p] = of_pack[run * kOfRun + p];
#pragma unroll
    for (int count = kOfRun; count > 1; count = (count + 1) / 2) {
#pragma unroll
      for (int p = 0; p < count / 2; ++p) sums[p] += sums[p + (count + 1) / 2];
    }
    runs[run] = sums[0];
  }
}

// The sum over a group's runs, of what its threads hold of each: every thread gets the same bits.
// map(first, sum, run) makes of the sums of the first run and of run `run` what is added. `slots`
// for this sum alone.
template <int kRuns, typename Group, typename V, typename Add, typename Map>
__device__ __forceinline__ V sum_of_runs(const Group& group, const V (&runs)[kRuns],
                                         V (&slots)[kMaxRuns], Add add, Map map) {
  constexpr int kLanes = kWarpSize / kRuns;  // those that get a run's sum
  const bool one_warp = group.threads() <= kWarpSize;
  V sum;
  if constexpr (kRuns == 1) {
    sum = group.reduce_lanes(runs[0], add);
    if (one_warp) return map(sum, sum, 0);
  } else {
    sum = group.reduce_halves(runs[0], runs[1], add);
    if (one_warp) {
      const V first = group.from_lane(sum, 0);
      // Zeros turn -0 to 0 where there are more slots than runs: here too.
      return add(group.combine_halves(map(first, sum, group.lane() / kLanes), add), V{});
    }
  }
  V* const own = slots + group.index() * group.warps() * kRuns;
  if (group.lane() % kLanes == 0) own[group.thread() / kLanes] = sum;
  __syncthreads();
  const int run = group.lane();
  sum = run < group.warps() * kRuns ? own[run] : V{};
  return group.reduce_over(map(own[0], sum, run), kMaxRuns, add);
}
template <int kRuns, typename Group, typename V, typename Add>
__device__ __forceinline__ V sum_of_runs(const Group& group, const V (&runs)[kRuns],
                                         V (&slots)[kMaxRuns], Add add) {
  return sum_of_runs(group, runs, slots, add, [](const V&, const V& sum, int) { return sum; });
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
  // As they were put, or after centre().
  template <typename Bounds>
  __device__ __forceinline__ void get(int p, const Bounds& bounds, A (&x)[N]) const {
    if constexpr (kPacked) {
      unpack(packs_[p], x);
      if (centred_) subtract(x, mean_, p, bounds);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = values_[p][i];
    }
  }
  // Makes them differences from `mean`. Packed or not, the same bits come out; packed, another mean
  // may follow.
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
  A mean_;
  bool centred_ = false;
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
// exact (the corrected two-pass algorithm of Chan, Golub and LeVeque). 16-bit types can do without:
// fp32 holds the sum of 2^13 equal ones, and a run has no more than 2^11 (mean_of_runs).
template <typename T>
constexpr bool kCorrectsMean = sizeof(T) > 2;

// Shared memory for LayerNorm's two sums over a row of type T; RMSNorm's one takes `first`.
template <typename T>
struct SumSlots {
  using A = Accumulator<T>;
  A first[kMaxRuns];
  std::conditional_t<kCorrectsMean<T>, SumAndSquares<A>, A> second[kMaxRuns];
};

// A quotient that is rounded but once, so that the mean of equal values is that value.
template <typename A>
__device__ __forceinline__ A quotient(A sum, A count, A per_count) {
  const A rough = sum * per_count;
  return fma(fma(-rough, count, sum), per_count, rough);
}

// The mean of a group's columns, from what its threads hold of each run, of `run_cols` columns or
// the row's last. It is the first run's mean plus the mean of what is left when that is subtracted
// from every column: next to nothing where all values are equal, however many. A quarter of each
// sum is used, as the difference of two finite sums may overflow. Each product is rounded by
// itself: a lane that fused it into a sum would get other bits than the rest.
template <int kRuns, typename Group, typename A>
__device__ __forceinline__ A mean_of_runs(const Group& group, const A (&runs)[kRuns], int run_cols,
                                          A cols, A per_cols, A (&slots)[kMaxRuns]) {
  const A most = static_cast<A>(run_cols), per_first = cols < most ? per_cols : A(1) / most;
  A mean_quarter;  // of the first run
  const A rest = sum_of_runs(group, runs, slots, SumOf(), [&](A first, A sum, int run) {
    mean_quarter = __fmul_rn(first, A(0.25) * per_first);
    const A count = min(max(cols - static_cast<A>(run * run_cols), A(0)), most);
    return __fmul_rn(fma(-count, mean_quarter, A(0.25) * sum), A(4) * per_cols);
  });
  return A(4) * mean_quarter + rest;
}

// The statistics of a row. LayerNorm centres the values about the mean, but where that is
// corrected: then the caller does, so that they are rounded once. `cols` are those of the whole
// group, `per_cols` their reciprocal.
template <bool kRms, typename Group, typename T, int N, int kPacks, bool kPacked, typename Bounds,
          typename A>
__device__ __forceinline__ PartStatistics<A> part_statistics(
    const Group& group, SliceValues<T, N, kPacks, kPacked>& values, const Bounds& bounds, A cols,
    A per_cols, SumSlots<T>& slots) {
  constexpr bool kCorrected = !kRms && kCorrectsMean<T>;
  constexpr int kRuns = runs_of<Group>(kPacks, kCorrected);
  PartStatistics<A> out{};
  A runs[kRuns];
  if constexpr (!kRms) {
    A of_pack[kPacks] = {};
    visit_packs(values, bounds, [&](int p, const A(&x)[N]) { of_pack[p] = tree_sum<N>(x); });
    add_up_runs(of_pack, runs);
    if constexpr (kCorrected) {
      out.mean = quotient(sum_of_runs(group, runs, slots.first, SumOf()), cols, per_cols);
    } else {
      constexpr int kRunCols = kPacks / kRuns * N * kWarpSize;
      out.mean = mean_of_runs(group, runs, kRunCols, cols, per_cols, slots.first);
      values.centre(out.mean, bounds);
    }
  }
  A of_pack[kPacks] = {}, squares_of_pack[kPacks] = {};
  visit_packs(values, bounds, [&](int p, A(&x)[N]) {
    if (kCorrected) {
      values.subtract(x, out.mean, p, bounds);
      of_pack[p] = tree_sum<N>(x);
    }
    squares_of_pack[p] = tree_of_squares(x);
  });
  A squares[kRuns];
  add_up_runs(squares_of_pack, squares);
  if constexpr (kRms) {
    out.squares = sum_of_runs(group, squares, slots.first, SumOf());
  } else if constexpr (!kCorrected) {
    out.squares = sum_of_runs(group, squares, slots.second, SumOf());
  } else {
    add_up_runs(of_pack, runs);
    const SumAndSquares<A> both[1] = {{runs[0], squares[0]}};
    const SumAndSquares<A> total = sum_of_runs(group, both, slots.second, SumAndSquares<A>::merge);
    const A correction = total.sum * per_cols;
    const A about_mean = fma(-total.sum, correction, total.squares);
    out.squares = about_mean < A(0) ? A(0) : about_mean;
    out.mean = fma(total.sum, per_cols, out.mean);
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
