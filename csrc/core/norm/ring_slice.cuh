// A thread's share of the rows that pass through a ring in shared memory: what backward makes of
// it.
#pragma once

#include "core/common/slice_statistics.cuh"
#include "core/norm/listed_values.cuh"

namespace fused_norm {

// A row in the ring: its turn, where the block's columns start in its stage, and its statistics.
template <typename Y, typename S>
struct RingRow {
  int turn;
  const S* saved;
  const Y* dy;
  float mean, rstd;
};

// A thread's columns, the same in every row: kPacks packs, the columns of pack p being
// first + p * kStep + column(i), as in row_columns.cuh. Rows that are dealt out are read
// from shared memory element by element.
template <RowsLie kLie, bool kRms, bool kFromOutput, typename X, typename Y, typename S>
class RingSlice {
 public:
  static constexpr int N = kPackElements<X, Y>;
  static constexpr int kPacks = kRingCols / N;
  static constexpr bool kRegular = kLie == RowsLie::kRegular;
  // From the output a column has more parameters. A thread keeps weights and scales, so that shared
  // memory is read no more often.
  using Params = StagedParams<kPacks, N, kFromOutput, true, 2, kFromOutput ? kShift : kWeight>;
  using Sums = GradientSums<float, kRms>;
  using Row = RingRow<Y, S>;
  // The parameters of the thread's columns, from `col` on.
  struct Asked {
    typename Params::template Asked<kLie> packs[kPacks];
    __device__ __forceinline__ Asked(const BackwardInput<Y, S, float>& in, int col) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) packs[p] = {in, col + p * kStep};
    }
  };

  // `own`: this thread's first of the block's columns, which start at column `first`. The first of
  // the block's rows is `row`, and they are `stride` apart.
  __device__ RingSlice(const BackwardInput<Y, S, float>& in, const BackwardOutput<X, float>& out,
                       const Params& params, const Asked& asked, int own, int block_cols, int first,
                       int64_t row, int64_t stride)
      : in_(in),
        out_(out),
        params_(params),
        own_(own),
        last_(max(block_cols - N, 0)),
        first_(own + first),
        left_(in.cols - first_),
        dx_(out.dx + row * in.cols + first_),
        dx_step_(static_cast<int>(stride) * in.cols),
        writes_(out.dx == nullptr ? 0 : left_),
        listed_(in.list, own_places(in.list, first), first) {
    if constexpr (kFromOutput) {
      take_params(asked);
      listed_.begin(params_, row, stride, in.rows);
    } else {
#pragma unroll
      for (int p = 0; p < kPacks; ++p)
        params.template stage<kLie>(in, asked.packs[p], p, first_ + p * kStep);
    }
  }

  // By all threads, when a row has been added up, and dx of the one before it written: brings the
  // listed columns' values of the next, if so many come after it. A barrier of the block's follows.
  __device__ __forceinline__ void next_row(int64_t stride, int more) {
    if (!kFromOutput || !listed_.any() || more == 0) return;
    __syncwarp();
    listed_.bring(params_, /*row=*/0, stride, more - 1);
    listed_.next_turn(/*meet_anyway=*/true);
  }

  // Adds a row to the columns' sums; returns what the thread has of the row's.
  __device__ __forceinline__ Sums add_up(const Row& row) {
    Sums sums{};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      one_by_one();
      float xhat[N], w[N], g[N], wx[N];
      load(row, p, xhat, w);
      get_weights(p, g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        dweight_[p][i] += w[i] * xhat[i];
        if (!kRms) dbias_[p][i] += w[i];
        w[i] *= g[i];
        wx[i] = w[i] * xhat[i];
      }
      if constexpr (!kRms) sums.w += in_row(p, tree_sum<N>(w));
      sums.wx += in_row(p, tree_sum<N>(wx));
    }
    return sums;
  }

  // Brings near what write_dx() will add to a row of dx.
  __device__ __forceinline__ void prefetch_residual(int64_t row) const {
    if (out_.dresidual != nullptr)
      out_.template prefetch_residual<kLie, N, kPacks>(row * in_.cols + first_, left_, kStep);
  }

  // dx = rstd * (w - mean(w) - xhat * mean(w * xhat)) of a row, given its sums; of one after the
  // other.
  __device__ __forceinline__ void write_dx(const Row& row, const Sums& sums) {
    float sum_w = 0;
    if constexpr (!kRms) sum_w = kForBothNorms<X, Y> && in_.rms ? 0.0f : sums.w;
    const RowGradient<kRms> of_row(row.rstd, in_.per_cols, sum_w, sums.wx);
    auto gradient = [&](int p, float(&w)[N]) {
      float xhat[N], g[N];
      load(row, p, xhat, w);
      get_weights(p, g);
#pragma unroll
      for (int i = 0; i < N; ++i) w[i] = of_row.at(w[i] * g[i], xhat[i]);
    };
    if (kRms && kRegular && out_.dresidual == nullptr) {
      // No branch between the packs, so that the reads of all overlap; LayerNorm lacks registers.
      Pack<X, N> packs[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        float w[N];
        gradient(p, w);
        round_to(packs[p], w);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (p * kStep < writes_) store_pack(p, packs[p]);
      }
    } else {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        one_by_one();
        float w[N];
        gradient(p, w);
        if (p * kStep >= writes_) continue;
        if (out_.dresidual != nullptr)
          out_.template add_residual<kLie>(dx_ - out_.dx + p * kStep, left_ - p * kStep, w);
        store(p, w);
      }
    }
    dx_ += dx_step_;
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
  // The places of the warp's own columns. The block's start at column `first`.
  __device__ static int2 own_places(const ListedColumns<float>& list, int first) {
    if constexpr (!kFromOutput) return {};
    const int from = first + static_cast<int>(threadIdx.x) / kWarpSize * kWarpSize * kRingCols;
    return list.places(from, from + kWarpSize * kRingCols);
  }

  // From the output. The scales lie where shifts will be, until those of listed columns are zero.
  __device__ void take_params(const Asked& asked) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      float bias[N];
      asked.packs[p].take(in_, first_ + p * kStep, kWarpSize, weight_[p], bias);
      params_.put(kShift, p, weight_[p]);
      params_.put(Params::kBias, p, bias);
    }
    params_.template make_scales<kLie>(in_, 0, kPacks, first_, kStep);
    if (listed_.any()) {
      __syncwarp();
      listed_.clear_scales(params_, kShift);
      __syncwarp();
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      float shift[N];
      params_.get(kShift, p, scale_[p]);
      params_.get(ParamKind(Params::kBias), p, shift);
      params_.put(kShift, p, shift);
    }
    __syncwarp();
  }

  static constexpr int kStep = kWarpSize * N;
  static constexpr int column(int i) { return column_in_pack(kLie, N, i); }

  // Whether pack p, and its column i, is in the row. What pads a row is read as its last pack, or
  // as zeros, and left out of the sums.
  __device__ __forceinline__ bool inside(int p, int i = 0) const {
    return p * kStep + column(i) < left_;
  }

  __device__ __forceinline__ void get_weights(int p, float (&g)[N]) const {
    if constexpr (kFromOutput) {
      memcpy(g, weight_[p], sizeof(g));
    } else {
      params_.get(kWeight, p, g);
    }
  }

  __device__ __forceinline__ float in_row(int p, float sum) const {
    return !kRegular || inside(p) ? sum : 0.0f;
  }

  // Keeps the compiler from reading the next pack early, where registers are few.
  __device__ __forceinline__ static void one_by_one() {
    if (!kRegular) asm volatile("" ::: "memory");
  }

  template <typename T>
  __device__ __forceinline__ void read(const T* row, int p, float (&out)[N]) const {
    const int at = own_ + p * kStep;
    if constexpr (kRegular) {
      const T* const from = row + min(at, last_);
      const auto aligned = *reinterpret_cast<const AlignedPack<T, N>*>(from);
      unpack(aligned.pack, out);
    } else {
      int left = left_ - p * kStep;
      keep(left);  // or the compiler would keep a predicate for each column
#pragma unroll
      for (int i = 0; i < N; ++i)
        out[i] = column(i) < left ? static_cast<float>(row[at + column(i)]) : 0.0f;
    }
  }

  // xhat and dy of a pack.
  __device__ __forceinline__ void load(const Row& row, int p, float (&xhat)[N],
                                       float (&dy)[N]) const {
    read(row.saved, p, xhat);
    read(row.dy, p, dy);
    if constexpr (kFromOutput) {
      params_.take_back(p, xhat, scale_[p], row.turn % Params::kRows);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i)
        xhat[i] = kRms ? xhat[i] * row.rstd : (xhat[i] - row.mean) * row.rstd;
    }
  }

  __device__ __forceinline__ void store_pack(int p, const Pack<X, N>& pack) const {
    store_streamed<sizeof(pack)>(dx_ + p * kStep, pack.words);
  }
  __device__ __forceinline__ void store(int p, const float (&gradient)[N]) const {
    if constexpr (kRegular) {
      Pack<X, N> pack;
      round_to(pack, gradient);
      store_pack(p, pack);
    } else {
      X* const to = dx_ + p * kStep;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (inside(p, i)) to[column(i)] = static_cast<X>(gradient[i]);
      }
    }
  }

  // Regular rows of partials start on 16 bytes, as a pack has four columns or eight.
  __device__ __forceinline__ void write_sums(float* to, const float (&sums)[kPacks][N]) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!inside(p)) break;
      if constexpr (kRegular) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
          *reinterpret_cast<float4*>(to + p * kStep + i) = {sums[p][i], sums[p][i + 1],
                                                            sums[p][i + 2], sums[p][i + 3]};
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (inside(p, i)) to[p * kStep + column(i)] = sums[p][i];
        }
      }
    }
  }

  const BackwardInput<Y, S, float>& in_;
  const BackwardOutput<X, float>& out_;
  const Params params_;
  int own_, last_;  // this thread's first of the block's columns, and the last pack's
  int first_, left_;
  X* dx_;
  int dx_step_;                                 // elements
  int writes_;                                  // as left_, or 0 where there is no dx
  float weight_[kPacks][N], scale_[kPacks][N];  // kFromOutput
  float dweight_[kPacks][N] = {}, dbias_[kPacks][N] = {};
  ListedValues<kLie, Params, true> listed_;  // kFromOutput
};

}  // namespace fused_norm
