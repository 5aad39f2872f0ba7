// Backward for few rows in one kernel: some blocks make dx, a row each, as backward.cuh does, and
// others the sums over rows, a tile of columns each. Rows are so read twice, once from the L2
// cache, but no partial sums are written, and no second kernel waits for them.
#pragma once

#include "core/common/branch.cuh"
#include "core/common/overlap.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/norm/backward_rows.cuh"
#include "core/norm/listed_values.cuh"
#include "core/norm/partial_sums.cuh"
#include "core/norm/staged_params.cuh"

namespace fused_norm {

using FewRowSums = RowSums</*kNamedBarrier=*/false>;

// Where dweight and dbias go; null where not asked for.
struct ColumnGradients {
  void* out[2];
  DType dtype[2];
};

// A block's shared memory: `slots` are for the dx of a row, the others for sums of columns.
struct FewShared {
  FewRowSums::Slots slots;
  float of_warp[backward_threads(2) / kWarpSize][2][kFewColumns];
  float of_block[kMaxFewSplits][2][kFewColumns];
  alignas(16) float shift[kFewColumns], scale[kFewColumns];  // of the columns, from the output
  int place[kFewColumns];                                    // in the list, or -1
};

// The dx of a row.
template <bool kRms, bool kFromOutput, bool kLists, typename X>
__device__ __forceinline__ void few_rows(const BackwardInput<X, X, float>& in,
                                         const BackwardOutput<X, float>& out, int64_t row,
                                         FewRowSums::Slots& slots) {
  constexpr int N = kPackElements<X>, kPacks = 2;
  extern __shared__ __align__(16) float few_staged[];

  const RowGroup<true> group;
  const int col = slice_column<N, kPacks>(group), left = in.cols - col;
  const int step = slice_step<N>(group);
  PackReader<X, N, kPacks> saved, dy;
  typename PackReader<X, N, kPacks>::Loaded saved_loaded, dy_loaded;
  // Each thread stages its own parameters, which it need not hold in registers while the row is
  // under way; three of each column before that, as they would take too many.
  using Params = StagedParams<kPacks, N, kFromOutput, !kRms, 1>;
  const Params params(few_staged, group.thread());
  const X* const saved_at = row_start(in.saved, in.saved_layout, row) + col;
  const X* const dy_at = row_start(in.dy, in.dy_layout, row) + col;
#pragma unroll
  for (int p = 0; kFromOutput && p < kPacks; ++p) {
    prefetch_to_l2(saved_at + p * step, p * step < left);
    prefetch_to_l2(dy_at + p * step, p * step < left);
  }
  auto stage_pack = [&](int p) {
    params.template stage<RowsLie::kRegular>(in, {in, col + p * step}, p, col + p * step);
  };
  auto stage = [&] {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) stage_pack(p);
  };
#pragma unroll 1  // which is less code to fetch
  for (int p = 0; kLists && p < kPacks; ++p) stage_pack(p);
  if (kFromOutput && !kLists) stage();
  saved.fetch(saved_at, left, group, saved_loaded);
  dy.fetch(dy_at, left, group, dy_loaded);
  if (out.dresidual != nullptr)
    out.template prefetch_residual<RowsLie::kRegular, N, kPacks>(row * in.cols + col, left, step);
  const float mean = !kRms && !kFromOutput ? __ldg(in.mean + row) : 0.0f;
  const float rstd = __ldg(in.rstd + row);
  if (!kFromOutput) stage();
  ListedValues<RowsLie::kRegular, Params> listed(in.list, {0, kLists ? in.list.count() : 0});
  if (listed.any()) __syncthreads();
  listed.begin(params, row, in.rows, in.rows);
  FewRowSums sums(group, slots);

  float xhat[kPacks][N], w[kPacks][N];
  saved.extract(saved_loaded, group, [&](int p, const Pack<X, N>& pack) { unpack(pack, xhat[p]); });
  dy.extract(dy_loaded, group, [&](int p, const Pack<X, N>& pack) { unpack(pack, w[p]); });
  float sum_w = 0, sum_wx = 0;
  add_up_row<kRms, kFromOutput>(
      params, listed, left, step, mean, rstd, xhat, w, [](int, int, float) {}, sum_w, sum_wx);
  sum_up_group<kRms>(group, sums, sum_w, sum_wx);
  const RowGradient<kRms> gradient(rstd, in.per_cols, sum_w, sum_wx);
  write_row<RowsLie::kRegular>(in, out, group, nullptr, params, left, out.dx + row * in.cols + col,
                               gradient, xhat, w);
}

// Adds up what the threads of a tile's blocks have of its columns, and writes it.
template <bool kRms, bool kFromOutput, typename In, int N>
__device__ __forceinline__ void write_columns(const In& in, const ColumnGradients& gradients,
                                              const RowCluster& cluster, int split, int splits,
                                              int first_col, float (&sums)[2][N],
                                              FewShared& shared) {
  constexpr int kLanes = kFewColumns / N;
  const int thread = threadIdx.x, lane = thread % kLanes;
  const int warp = thread / kWarpSize, warps = blockDim.x / kWarpSize;
#pragma unroll
  for (int k = 0; k < (kRms ? 1 : 2); ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int offset = kLanes; offset < kWarpSize; offset *= 2)
        sums[k][i] += __shfl_xor_sync(kFullMask, sums[k][i], offset);
      if (thread % kWarpSize < kLanes) shared.of_warp[warp][k][lane * N + i] = sums[k][i];
    }
  }
  __syncthreads();
  const int kind = thread / kFewColumns, of_col = thread % kFewColumns;
  const bool sums_up = kind < (kRms ? 1 : 2);
  float sum = 0;
  if (sums_up) {
    for (int w = 0; w < warps; ++w) sum += shared.of_warp[w][kind][of_col];
  }
#if __CUDA_ARCH__ >= 900
  if (splits > 1) {
    cluster.wait();
    const auto blocks = cooperative_groups::this_cluster();
    if (sums_up) *blocks.map_shared_rank(&shared.of_block[split][kind][of_col], 0) = sum;
    blocks.sync();
    if (split != 0 || !sums_up) return;
    sum = 0;
    for (int s = 0; s < splits; ++s) sum += shared.of_block[s][kind][of_col];
  }
#endif
  const int at = first_col + of_col;
  if (!sums_up || at >= in.cols || gradients.out[kind] == nullptr) return;
  if (kFromOutput && isnan(shared.scale[of_col])) sum = NAN;  // dbias too
  store_as(gradients.dtype[kind], gradients.out[kind], at, sum);
}

// The sums over the rows split, split + splits, ... of a tile of columns, and over its blocks,
// which are a cluster. A thread takes one pack of some rows.
template <bool kRms, bool kFromOutput, bool kLists, typename X>
__device__ __forceinline__ void few_columns(const BackwardInput<X, X, float>& in,
                                            const ColumnGradients& gradients, int tile, int split,
                                            int splits, FewShared& shared) {
  constexpr int N = kPackElements<X>, kLanes = kFewColumns / N, kRows = 3;
  const int thread = threadIdx.x, lane = thread % kLanes;
  const int first_col = tile * kFewColumns, col = first_col + lane * N;
  const int64_t step = int64_t{blockDim.x} / kLanes * splits;
  const RowCluster cluster;
  if (splits > 1) cluster.arrive();  // nobody writes to a block that has not begun

  const int64_t first_row = int64_t{thread / kLanes} * splits + split;

  if constexpr (kFromOutput) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first_row + r * step;
      const bool wanted = row < in.rows && col < in.cols;
      prefetch_to_l2(row_start(in.saved, in.saved_layout, row) + col, wanted);
      prefetch_to_l2(row_start(in.dy, in.dy_layout, row) + col, wanted);
    }
    if (thread < kFewColumns) {
      const auto params =
          ColumnParams<float, 1>::template load<kLists, RowsLie::kElements>(in, first_col + thread);
      shared.shift[thread] = params.listed ? 0.0f : params.shift[0];
      shared.scale[thread] = params.scale[0];
      if (kLists) shared.place[thread] = params.listed ? static_cast<int>(params.shift[0]) : -1;
    }
    __syncthreads();
  }
  float sums[2][N] = {};
  if (col < in.cols) {
    auto load = [&](const X* base, const RowLayout& layout, int64_t row) {
      return Pack<X, N>{load_words<16>(row_start(base, layout, row) + col)};
    };
    for (int64_t row = first_row; row < in.rows; row += kRows * step) {
      Pack<X, N> saved[kRows], dy[kRows];
      float mean[kRows], rstd[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = min(row + r * step, in.rows - 1);
        saved[r] = load(in.saved, in.saved_layout, at);
        dy[r] = load(in.dy, in.dy_layout, at);
        if (kFromOutput) continue;
        mean[r] = !kRms ? __ldg(in.mean + at) : 0.0f;
        rstd[r] = __ldg(in.rstd + at);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row + r * step >= in.rows) break;
        float xhat[N], d[N];
        unpack(saved[r], xhat);
        unpack(dy[r], d);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          xhat[i] = kFromOutput
                        ? (xhat[i] - shared.shift[lane * N + i]) * shared.scale[lane * N + i]
                    : kRms ? xhat[i] * rstd[r]
                           : (xhat[i] - mean[r]) * rstd[r];
          sums[0][i] = fmaf(d[i], xhat[i], sums[0][i]);
          if (!kRms) sums[1][i] += d[i];
        }
      }
    }
    // Listed columns are read again: on the way they would take registers of all others.
#pragma unroll
    for (int i = 0; kLists && i < N; ++i) {
      const int place = shared.place[lane * N + i];
      if (place < 0) continue;
      sums[0][i] = 0;
      for (int64_t row = first_row; row < in.rows; row += step) {
        const X d = row_start(in.dy, in.dy_layout, row)[col + i];
        sums[0][i] = fmaf(static_cast<float>(d), in.list.xhat(row, place), sums[0][i]);
      }
    }
  }
  write_columns<kRms, kFromOutput>(in, gradients, cluster, split, splits, first_col, sums, shared);
}

// Blocks, in clusters of `splits`: `look_blocks`, if that is asked for, that look at the
// parameters; one cluster for each tile of columns; and one block for each row. kLists: from the
// output, where there may be a list.
template <typename X, bool kLists>
__global__ void __launch_bounds__(backward_threads(2), 2)
    norm_backward_few(const __grid_constant__ BackwardInput<X, X, float> in,
                      const __grid_constant__ BackwardOutput<X, float> out,
                      const __grid_constant__ ColumnGradients gradients,
                      const __grid_constant__ ColumnLook<float> look, int look_blocks, int tiles,
                      int splits) {
  __shared__ FewShared shared;
  int block = blockIdx.x;
  meet_previous_kernel();
  if (block < look_blocks) {
    look_at_columns(look, block, look_blocks);
    return;
  }
  block -= look_blocks;
  const int64_t row = block - tiles * splits;
  if (row >= in.rows) return;
  with_flag(in.rms, [&](auto is_rms) {
    with_flag(kLists || in.from_output, [&](auto is_output) {
      constexpr bool kRms = decltype(is_rms)::value;
      constexpr bool kFromOutput = decltype(is_output)::value;
      if constexpr (kLists && !kFromOutput) return;
      if (row < 0) {
        few_columns<kRms, kFromOutput, kLists>(in, gradients, block / splits, block % splits,
                                               splits, shared);
      } else {
        few_rows<kRms, kFromOutput, kLists>(in, out, row, shared.slots);
      }
    });
  });
}

}  // namespace fused_norm
