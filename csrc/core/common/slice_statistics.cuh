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
  __device__ __forceinline__ void get(int p, int left, A (&x)[N]) const {
    if constexpr (kPacked) {
      unpack(packs_[p], x);
      const int count = left - p * kSliceStep<N>;
      if (centred_) subtract(x, mean_, count);
      if (recentred_) subtract(x, further_, count);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = values_[p][i];
    }
  }
  // Makes them differences from `mean`, and these from `further`; `left` columns of the row remain
  // from the first on. Packed or not, the same bits come out.
  __device__ __forceinline__ void centre(A mean, int left) {
    if constexpr (kPacked) {
      mean_ = mean;
      centred_ = true;
    } else {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) subtract(values_[p], mean, left - p * kSliceStep<N>);
    }
  }

  __device__ __forceinline__ void recentre(A further, int left) {
    if constexpr (kPacked) {
      further_ = further;
      recentred_ = true;
    } else {
      centre(further, left);
    }
  }

  // x - mean for the first `count` values.
  __device__ __forceinline__ static void subtract(A (&x)[N], A mean, int count) {
    if (count >= N) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] -= mean;
    } else if (count > 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (i < count) x[i] -= mean;
      }
    }
  }

 private:
  A values_[kPacked ? 1 : kPacks][N];
  Pack<T, N> packs_[kPacked ? kPacks : 1];
  A mean_, further_;
  bool centred_ = false, recentred_ = false;
};

// Calls visit(p, x) with each pack's values.
template <typename T, int N, int kPacks, bool kPacked, typename Visit>
__device__ __forceinline__ void visit_packs(const SliceValues<T, N, kPacks, kPacked>& values,
                                            int left, Visit visit) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (p * kSliceStep<N> >= left) break;
    Accumulator<T> x[N];
    values.get(p, left, x);
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

// Statistics of kRows rows at once. LayerNorm centres the values about the mean, but where that is
// corrected: then the caller does, so that they are rounded once. `cols` are those of the whole
// group, `per_cols` their reciprocal; `left` remain from this thread's first on.
template <bool kRms, typename Group, typename T, int N, int kPacks, bool kPacked, int kRows,
          typename A>
__device__ __forceinline__ void part_statistics(const Group& group,
                                                SliceValues<T, N, kPacks, kPacked> (&values)[kRows],
                                                int left, A cols, A per_cols,
                                                RowSums<A, Barrier::kBlock>& sums,
                                                PartStatistics<A> (&out)[kRows]) {
  constexpr bool kCorrected = !kRms && kCorrectsMean<T>;
  A sum[kRows], squares[kRows];
  if constexpr (!kRms) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      A of_pack[kPacks] = {};
      visit_packs(values[r], left, [&](int p, const A(&x)[N]) { of_pack[p] = tree_sum<N>(x); });
      sum[r] = tree_sum<kPacks>(of_pack);
    }
    sums.add_up(group, sum);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // The quotient is rounded but once, so that the mean of equal values is that value.
      const A quotient = sum[r] * per_cols;
      out[r].mean = fma(fma(-quotient, cols, sum[r]), per_cols, quotient);
      if (!kCorrected) values[r].centre(out[r].mean, left);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    A of_pack[kPacks] = {}, squares_of_pack[kPacks] = {};
    visit_packs(values[r], left, [&](int p, A(&x)[N]) {
      if (kCorrected) {
        values[r].subtract(x, out[r].mean, left - p * kSliceStep<N>);
        of_pack[p] = tree_sum<N>(x);
      }
      squares_of_pack[p] = tree_of_squares(x);
    });
    sum[r] = tree_sum<kPacks>(of_pack);
    squares[r] = tree_sum<kPacks>(squares_of_pack);
  }
  if constexpr (kCorrected) {
    sums.add_up(group, sum, squares);
  } else {
    sums.add_up(group, squares);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    out[r].squares = squares[r];
    if constexpr (kCorrected) {
      const A correction = sum[r] * per_cols;
      const A about_mean = fma(-sum[r], correction, squares[r]);
      out[r].squares = about_mean < A(0) ? A(0) : about_mean;
      out[r].mean += correction;
    }
  }
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
