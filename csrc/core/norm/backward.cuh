// Backward for rows that stay in registers: read once.
#pragma once

#include "core/common/overlap.cuh"
#include "core/common/slice_queue.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/norm/backward_input.cuh"
#include "core/norm/partial_sums.cuh"
#include "core/norm/staged_params.cuh"

namespace fused_norm {

// A block of kBackwardThreads has at most 8 groups of several warps.
constexpr int kMaxGroups = 8;
using GroupSums = RowSums<float>;

// Persistent blocks walk over the rows. A group of threads keeps its columns' sums in registers;
// its next row is on its way to shared memory, or to registers where rows are not regular. Column
// parameters are staged once in shared memory, as fp32, while the first rows are under way.
template <bool kRegular, bool kRms, Saved kSaved, int kPacks, typename X, typename Y, typename S>
__device__ __forceinline__ void norm_backward_once(const BackwardInput<Y, S, float>& in,
                                                   const BackwardOutput<X, float>& out, int blocks,
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

  const int64_t stride = int64_t{blocks} * group.groups();
  int64_t first = int64_t{blockIdx.x} * group.groups();
  int64_t row = first + group.index();
  RowCursor<const S> saved_at(in.saved, in.saved_layout, min(row, in.rows - 1), stride, col);
  RowCursor<const Y> dy_at(in.dy, in.dy_layout, min(row, in.rows - 1), stride, col);
  const int row_threads = max(group.threads(), kWarpSize);
  SliceQueue<S, Y, N, kPacks> queue(
      reinterpret_cast<char*>(staged + param_kinds(kSaved) * row_threads * kPacks * N),
      group.index() * group.threads() + group.thread(), group.groups() * group.threads());
  SavedReader saved;
  GradientReader dy;
  typename SavedReader::Loaded saved_loaded;
  typename GradientReader::Loaded dy_loaded;
  // Row `next`, at which the cursors are.
  auto fetch = [&](int64_t next) {
    const bool inside = next < in.rows;
    if constexpr (kRegular) {
      queue.put(saved_at.at(), dy_at.at(), inside ? left : 0, group);
    } else if (inside) {
      saved.fetch(saved_at.at(), left, rows_follow(in.saved_layout, next, in.rows, in.cols, N),
                  group, saved_loaded);
      dy.fetch(dy_at.at(), left, rows_follow(in.dy_layout, next, in.rows, in.cols, N), group,
               dy_loaded);
    }
    if (inside && out.dresidual != nullptr)
      out.template prefetch_residual<N, kPacks>(next * in.cols + col, left);
  };
  auto fetch_next = [&](int64_t next) {
    if (next < in.rows) {
      saved_at.step(next);
      dy_at.step(next);
    }
    fetch(next);
  };
  float next_mean = 0, next_rstd = 0;
  auto fetch_statistics = [&] {
    if (row >= in.rows) return;
    if (!kRms && !kFromOutput) next_mean = __ldg(in.mean + row);
    next_rstd = __ldg(in.rstd + row);
  };

  float dweight[kPacks][N] = {}, dbias[kPacks][N] = {};
  const float per_cols = 1.0f / in.cols;
  X* dx = out.dx + row * in.cols + col;
  fetch(row);
  fetch_statistics();
  const StagedParams<kPacks, N, kSaved> params(staged, group.thread());
  for (int p = group.index(); p < kPacks; p += group.groups())
    params.stage(in, p, col + p * kSliceStep<N>);
  __syncthreads();
  const uint32_t listed = kListed ? params.listed(left) : 0;
  // A block's groups stay together to the last of its rows, as warps may hold several.
  for (; first < in.rows; first += stride) {
    float xhat[kPacks][N], w[kPacks][N];
    if constexpr (kRegular) {
      fetch_next(row + stride);
      queue.wait();
      queue.take([&](int p, const Pack<S, N>& of_saved, const Pack<Y, N>& of_dy) {
        unpack(of_saved, xhat[p]);
        unpack(of_dy, w[p]);
      });
    } else {
      saved.extract(saved_loaded, left, group,
                    [&](int p, const Pack<S, N>& pack) { unpack(pack, xhat[p]); });
      dy.extract(dy_loaded, left, group,
                 [&](int p, const Pack<Y, N>& pack) { unpack(pack, w[p]); });
      fetch_next(row + stride);
    }
    const float mean = next_mean, rstd = next_rstd;
    // What is left of the row, nothing of one past the end: what its registers hold is stale.
    const int row_left = row < in.rows ? left : 0;
    row += stride;
    fetch_statistics();

    float sum_w = 0, sum_wx = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * kSliceStep<N> >= row_left) break;
      if constexpr (kFromOutput) {
        params.take_back(p, xhat[p]);
        if (kListed) params.take_listed(in.list, listed, p, row - stride, xhat[p]);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
          xhat[p][i] = kRms ? xhat[p][i] * rstd : (xhat[p][i] - mean) * rstd;
      }
      float g[N], of_w[N], of_wx[N];
      params.get(kWeight, p, g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float d = w[p][i];
        dweight[p][i] += d * xhat[p][i];
        if (!kRms) dbias[p][i] += d;
        of_w[i] = w[p][i] = d * g[i];
        of_wx[i] = of_w[i] * xhat[p][i];
      }
      if (!kRms) sum_w += tree_sum<N>(of_w);
      sum_wx += tree_sum<N>(of_wx);
    }
    if constexpr (kRms) {
      sums.add_up(group, sum_wx);
    } else {
      sums.add_up(group, sum_w, sum_wx);
    }
    if (out.dx != nullptr) {
      // dx = rstd * (w - mean(w) - xhat * mean(w * xhat))
      const float of_xhat = -rstd * (sum_wx * per_cols);
      const float constant = kRms ? 0.0f : -rstd * (sum_w * per_cols);
      SliceWriter<X, N, kRegular, kPacks> writer;
      writer.open(dx, row_left);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (kRegular && p * kSliceStep<N> >= row_left) break;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          w[p][i] = kRms ? fmaf(xhat[p][i], of_xhat, w[p][i] * rstd)
                         : fmaf(xhat[p][i], of_xhat, fmaf(w[p][i], rstd, constant));
        }
        if (out.dresidual != nullptr) {
          out.template add_residual<kRegular>(dx - out.dx + p * kSliceStep<N>,
                                              row_left - p * kSliceStep<N>, in.rows * in.cols,
                                              w[p]);
        }
        Pack<X, N> pack;
        round_to(pack, w[p]);
        writer.store(p, pack, group);
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

// From the output one more block than the `blocks` that take rows may look at the parameters.
template <typename X, typename Y, typename S, bool kRms, Saved kSaved, int kPacks>
__global__ void __launch_bounds__(kBackwardThreads, backward_blocks(kPacks))
    norm_backward_registers(const __grid_constant__ BackwardInput<Y, S, float> in,
                            const __grid_constant__ BackwardOutput<X, float> out, bool regular,
                            const __grid_constant__ ColumnLook<float> look, int blocks) {
  __shared__ GroupSums::Slots slots[kMaxGroups];
  if (kSaved != Saved::kInput && static_cast<int>(blockIdx.x) == blocks) {
    wait_for_prerequisites();
    look_at_columns(look);
  } else if (regular) {
    norm_backward_once<true, kRms, kSaved, kPacks>(in, out, blocks, slots);
  } else {
    norm_backward_once<false, kRms, kSaved, kPacks>(in, out, blocks, slots);
  }
}

}  // namespace fused_norm
