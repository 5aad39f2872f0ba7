// A thread's share of the rows that pass through a ring in shared memory: what backward makes of
// it.
#pragma once

#include "core/common/slice_statistics.cuh"
#include "core/norm/staged_params.cuh"

namespace fused_norm {

// A row in the ring: where this thread's columns start in its stage, and the row's statistics.
template <typename Y, typename S>
struct RingRow {
  int64_t index;
  const S* saved;
  const Y* dy;
  float mean, rstd;
};

// A thread's columns, the same in every row: kPacks packs, the columns of pack p being
// first + p * kSliceStep<N> + i * kApart, as in row_slice.cuh. Rows that are not regular are read
// from shared memory element by element.
template <RowsLie kLie, bool kRms, Saved kSaved, typename X, typename Y, typename S>
class RingSlice {
 public:
  static constexpr int N = 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
  static constexpr int kPacks = 16 / N;
  static constexpr bool kFromOutput = kSaved != Saved::kInput;
  static constexpr bool kListed = kSaved == Saved::kOutputAndList;
  static constexpr bool kRegular = kLie == RowsLie::kRegular;
  static constexpr int kApart = columns_apart(kLie);
  using Params = StagedParams<kPacks, N, kSaved>;
  using Sums = GradientSums<float, kRms>;
  using Row = RingRow<Y, S>;

  __device__ RingSlice(const BackwardInput<Y, S, float>& in, const BackwardOutput<X, float>& out,
                       const Params& params, int first)
      : in_(in), out_(out), params_(params), first_(first), left_(in.cols - first) {
    for (int p = 0; p < kPacks; ++p) params.stage(in, p, first + p * kStep, kApart);
    // A thread reads but its own parameters.
    if (kListed) listed_ = params.listed(left_, kApart);
  }

  // Adds a row to the columns' sums; returns what the thread has of the row's.
  __device__ __forceinline__ Sums add_up(const Row& row) {
    Sums sums{};
    int left = left_;
    forget(left);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * kStep >= left) break;
      float xhat[N], w[N], g[N], wx[N];
      load(row, left, p, xhat, w);
      params_.get(kWeight, p, g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        dweight_[p][i] += w[i] * xhat[i];
        if (!kRms) dbias_[p][i] += w[i];
        w[i] *= g[i];
        wx[i] = w[i] * xhat[i];
      }
      if constexpr (!kRms) sums.w += tree_sum<N>(w);
      sums.wx += tree_sum<N>(wx);
    }
    return sums;
  }

  // Brings near what write_dx() will add to a row of dx.
  __device__ __forceinline__ void prefetch_residual(int64_t row) const {
    if (out_.dresidual != nullptr)
      out_.template prefetch_residual<N, kPacks, kApart>(row * in_.cols + first_, left_);
  }

  // dx = rstd * (w - mean(w) - xhat * mean(w * xhat)) of a row, given its sums.
  __device__ __forceinline__ void write_dx(const Row& row, const Sums& sums) const {
    const float per_cols = 1.0f / in_.cols;
    const float of_xhat = -row.rstd * (sums.wx * per_cols);
    float constant = 0;
    if constexpr (!kRms) constant = -row.rstd * (sums.w * per_cols);
    int64_t at = row.index * in_.cols + first_;
    int left = left_;
    forget(at);
    forget(left);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * kStep >= left) break;
      float xhat[N], w[N], g[N];
      load(row, left, p, xhat, w);
      params_.get(kWeight, p, g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        w[i] *= g[i];
        w[i] = fmaf(xhat[i], of_xhat, kRms ? w[i] * row.rstd : fmaf(w[i], row.rstd, constant));
      }
      if (out_.dresidual != nullptr) add_residual(at, left, p, w);
      store(at, left, p, w);
    }
  }

  // Writes the columns' sums to a partial row and begins anew; null partials are left out.
  __device__ __forceinline__ void write_partials(int64_t row) {
    const int64_t at = row * in_.cols + first_;
    if (out_.dweight_partials) write_sums(out_.dweight_partials + at, dweight_);
    if (!kRms && out_.dbias_partials) write_sums(out_.dbias_partials + at, dbias_);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < N; ++i) dweight_[p][i] = dbias_[p][i] = 0;
    }
  }

 private:
  static constexpr int kStep = kSliceStep<N>;

  // Whether column i of pack p is one of the `left` that remain from this thread's first on.
  __device__ __forceinline__ static bool inside(int left, int p, int i) {
    return kApart == 1 || p * kStep + i * kApart < left;
  }
  // The compiler no longer knows what such a row's value is made of: from what is the same in
  // every row it would make something for each column, keep all that in registers, and spill.
  __device__ __forceinline__ static void forget(int& value) {
    if (kApart > 1) asm volatile("" : "+r"(value));
  }
  __device__ __forceinline__ static void forget(int64_t& value) {
    if (kApart > 1) asm volatile("" : "+l"(value));
  }

  template <typename T>
  __device__ __forceinline__ void read(const T* slice, int left, int p, float (&out)[N]) const {
    if constexpr (kRegular) {
      unpack(reinterpret_cast<const AlignedPack<T, N>*>(slice)[p * kWarpSize].pack, out);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i)
        out[i] = inside(left, p, i) ? static_cast<float>(slice[p * kStep + i * kApart]) : 0.0f;
    }
  }

  // xhat and dy of a pack.
  __device__ __forceinline__ void load(const Row& row, int left, int p, float (&xhat)[N],
                                       float (&dy)[N]) const {
    read(row.saved, left, p, xhat);
    read(row.dy, left, p, dy);
    if constexpr (kFromOutput) {
      params_.take_back(p, xhat);
      if (kListed) params_.take_listed(in_.list, listed_, p, row.index, xhat);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i)
        xhat[i] = kRms ? xhat[i] * row.rstd : (xhat[i] - row.mean) * row.rstd;
    }
  }

  __device__ __forceinline__ void add_residual(int64_t at, int left, int p,
                                               float (&gradient)[N]) const {
    if constexpr (kRegular) {
      out_.template add_residual<true>(at + p * kStep, N, 0, gradient);
    } else {
      out_.template add_residual_apart<kApart>(at + p * kStep, left - p * kStep, gradient);
    }
  }

  __device__ __forceinline__ void store(int64_t at, int left, int p,
                                        const float (&gradient)[N]) const {
    X* const to = out_.dx + at + p * kStep;
    if (kRegular ||
        (kApart == 1 && reinterpret_cast<uintptr_t>(out_.dx) % sizeof(Pack<X, N>) == 0)) {
      Pack<X, N> pack;
      round_to(pack, gradient);
      detail::store_streamed<sizeof(pack)>(reinterpret_cast<char*>(to), pack.words);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (!inside(left, p, i)) continue;
        Pack<X, 1> element;
        const float value[1] = {gradient[i]};
        round_to(element, value);
        detail::store_words<sizeof(X)>(reinterpret_cast<char*>(to + i * kApart), element.words);
      }
    }
  }

  // Regular rows of partials start on 16 bytes, as a pack has four columns or eight.
  __device__ __forceinline__ void write_sums(float* to, const float (&sums)[kPacks][N]) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * kStep >= left_) break;
      if constexpr (kRegular) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
          *reinterpret_cast<float4*>(to + p * kStep + i) = {sums[p][i], sums[p][i + 1],
                                                            sums[p][i + 2], sums[p][i + 3]};
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (inside(left_, p, i)) to[p * kStep + i * kApart] = sums[p][i];
        }
      }
    }
  }

  const BackwardInput<Y, S, float>& in_;
  const BackwardOutput<X, float>& out_;
  const Params params_;
  int first_, left_;
  uint32_t listed_ = 0;
  float dweight_[kPacks][N] = {}, dbias_[kPacks][N] = {};
};

}  // namespace fused_norm
