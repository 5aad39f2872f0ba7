// Backward for rows that stay in registers: read once.
#pragma once

#include "core/common/overlap.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/norm/backward_input.cuh"
#include "core/norm/partial_sums.cuh"
#include "core/norm/staged_params.cuh"

namespace fused_norm {

// A block of 512 threads has at most 8 groups of several warps.
constexpr int kMaxGroups = 8;
using GroupSums = RowSums<float, Barrier::kNamed>;

// Persistent blocks walk over the rows, kRows at a time a group, which keeps its columns' sums and
// the packs of its next rows in registers. Column parameters are staged once in shared memory, as
// fp32.
template <bool kRegular, bool kRms, Saved kSaved, int kPacks, int kRows, typename X, typename Y,
          typename S>
__device__ __forceinline__ void norm_backward_once(const BackwardInput<Y, S, float>& in,
                                                   const BackwardOutput<X, float>& out,
                                                   GroupSums::Slots (&slots)[kMaxGroups]) {
  constexpr int N = 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
  constexpr bool kFromOutput = kSaved != Saved::kInput, kListed = kSaved == Saved::kOutputAndList;
  using SavedReader = SliceReader<S, N, kRegular, kPacks>;
  using GradientReader = SliceReader<Y, N, kRegular, kPacks>;
  extern __shared__ __align__(16) float staged[];

  const RowGroup<Barrier::kNamed, (kPacks > 1)> group;
  GroupSums sums(group, slots[group.warps() > 1 ? group.index() : 0]);
  const int col = slice_column<N, kPacks>(group);
  const int left = in.cols - col;
  wait_for_prerequisites();
  const StagedParams<kPacks, N, kSaved> params(staged, group.thread());
  for (int p = group.index(); p < kPacks; p += group.groups())
    params.stage(in, p, col + p * kSliceStep<N>);
  __syncthreads();
  const uint32_t listed = kListed ? params.listed(left) : 0;

  const int64_t stride = int64_t{gridDim.x} * (group.groups() * kRows);
  int64_t first = int64_t{blockIdx.x} * (group.groups() * kRows);
  int64_t row = first + group.index();
  RowCursor<const S> saved_at(in.saved, in.saved_layout, min(row, in.rows - 1), stride, col);
  RowCursor<const Y> dy_at(in.dy, in.dy_layout, min(row, in.rows - 1), stride, col);
  SavedReader saved[kRows];
  GradientReader dy[kRows];
  typename SavedReader::Loaded saved_loaded[kRows];
  typename GradientReader::Loaded dy_loaded[kRows];
  float mean[kRows] = {}, rstd[kRows] = {};
  auto fetch = [&] {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int ahead = r * group.groups();
      const int64_t at = row + ahead;
      if (at >= in.rows) continue;
      saved[r].fetch(saved_at.at(row, ahead), left,
                     kRegular || rows_follow(in.saved_layout, at, in.rows, in.cols, N), group,
                     saved_loaded[r]);
      dy[r].fetch(dy_at.at(row, ahead), left,
                  kRegular || rows_follow(in.dy_layout, at, in.rows, in.cols, N), group,
                  dy_loaded[r]);
      if (out.dresidual != nullptr)
        out.template prefetch_residual<N, kPacks>(at * in.cols + col, left);
      if (!kRms && !kFromOutput) mean[r] = __ldg(in.mean + at);
      rstd[r] = __ldg(in.rstd + at);
    }
  };

  float dweight[kPacks][N] = {}, dbias[kPacks][N] = {};
  const float per_cols = 1.0f / in.cols;
  X* dx = out.dx + row * in.cols + col;
  fetch();
  for (; first < in.rows; first += stride) {
    float xhat[kRows][kPacks][N], w[kRows][kPacks][N], row_mean[kRows], row_rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      saved[r].extract(saved_loaded[r], left, group,
                       [&](int p, const Pack<S, N>& pack) { unpack(pack, xhat[r][p]); });
      dy[r].extract(dy_loaded[r], left, group,
                    [&](int p, const Pack<Y, N>& pack) { unpack(pack, w[r][p]); });
      row_mean[r] = mean[r];
      row_rstd[r] = rstd[r];
    }
    // What is left of the rows, nothing of those past the end: what their registers hold is stale.
    int row_left[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_left[r] = row + r * group.groups() < in.rows ? left : 0;
    row += stride;
    if (row < in.rows) {
      saved_at.step(row);
      dy_at.step(row);
      fetch();
    }

    float sum_w[kRows] = {}, sum_wx[kRows] = {};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * kSliceStep<N> >= row_left[0]) break;
      float g[N];
      params.get(kWeight, p, g);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r > 0 && row_left[r] <= 0) break;
        if constexpr (kFromOutput) {
          params.take_back(p, xhat[r][p]);
          if (kListed) {
            params.take_listed(in.list, listed, p, row - stride + r * group.groups(), xhat[r][p]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < N; ++i)
            xhat[r][p][i] =
                kRms ? xhat[r][p][i] * row_rstd[r] : (xhat[r][p][i] - row_mean[r]) * row_rstd[r];
        }
        float of_w[N], of_wx[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float d = w[r][p][i];
          dweight[p][i] += d * xhat[r][p][i];
          if (!kRms) dbias[p][i] += d;
          of_w[i] = w[r][p][i] = d * g[i];
          of_wx[i] = of_w[i] * xhat[r][p][i];
        }
        if (!kRms) sum_w[r] += tree_sum<N>(of_w);
        sum_wx[r] += tree_sum<N>(of_wx);
      }
    }
    if constexpr (kRms) {
      sums.add_up(group, sum_wx);
    } else {
      sums.add_up(group, sum_w, sum_wx);
    }
    if (out.dx != nullptr) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        // dx = rstd * (w - mean(w) - xhat * mean(w * xhat))
        const float of_xhat = -row_rstd[r] * (sum_wx[r] * per_cols);
        const float constant = kRms ? 0.0f : -row_rstd[r] * (sum_w[r] * per_cols);
        const int ahead = r * group.groups();
        SliceWriter<X, N, kRegular, kPacks> writer;
        writer.open(dx + int64_t{ahead} * in.cols, row_left[r]);
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (kRegular && p * kSliceStep<N> >= row_left[r]) break;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            w[r][p][i] =
                kRms ? fmaf(xhat[r][p][i], of_xhat, w[r][p][i] * row_rstd[r])
                     : fmaf(xhat[r][p][i], of_xhat, fmaf(w[r][p][i], row_rstd[r], constant));
          }
          if (out.dresidual != nullptr) {
            const int64_t at = dx - out.dx + int64_t{ahead} * in.cols + p * kSliceStep<N>;
            out.template add_residual<kRegular>(at, row_left[r] - p * kSliceStep<N>,
                                                in.rows * in.cols, w[r][p]);
          }
          Pack<X, N> pack;
          round_to(pack, w[r][p]);
          writer.store(p, pack, group);
        }
      }
      dx += stride * in.cols;
    }
  }
  launch_dependents();
  const int64_t partial = int64_t{blockIdx.x} * in.cols;
  auto of_block = [&](float* partials) { return partials ? partials + partial : nullptr; };
  write_partials<!kRms>(group, dweight, dbias, staged, in.cols, of_block(out.dweight_partials),
                        of_block(out.dbias_partials));
}

template <typename X, typename Y, typename S, bool kRms, Saved kSaved, int kPacks>
__global__ void __launch_bounds__(512)
    norm_backward_registers(const __grid_constant__ BackwardInput<Y, S, float> in,
                            const __grid_constant__ BackwardOutput<X, float> out, bool regular) {
  __shared__ GroupSums::Slots slots[kMaxGroups];
  if (regular) {
    norm_backward_once<true, kRms, kSaved, kPacks, kPacks == 1 ? 2 : 1>(in, out, slots);
  } else {
    norm_backward_once<false, kRms, kSaved, kPacks, 1>(in, out, slots);
  }
}

}  // namespace fused_norm
