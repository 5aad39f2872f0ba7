// Backward for rows that stay in registers: read once.
#pragma once

#include "core/common/overlap.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/norm/backward_input.cuh"
#include "core/norm/partial_sums.cuh"

namespace fused_norm {

// The column parameters of a block's threads in shared memory, as fp32. Thread t finds 4 columns of
// pack p at float4 index [kind][p][quarter][t], so that a warp's accesses are consecutive and free
// of bank conflicts.
enum ParamKind { kWeight, kShift, kScale };

template <int kPacks, int N>
class StagedParams {
 public:
  __device__ StagedParams(float* staged, int threads)
      : staged_(reinterpret_cast<float4*>(staged)), threads_(threads) {}

  template <bool kFromOutput, bool kListed, typename In>
  __device__ void stage(const In& in, int p, int thread, int col) const {
    const auto params = ColumnParams<float, N>::template load<kFromOutput, kListed>(in, col);
    put(kWeight, p, thread, params.weight);
    if (!in.from_output) return;
    put(kShift, p, thread, params.shift);
    put(kScale, p, thread, params.scale);
  }

  __device__ __forceinline__ void get(ParamKind kind, int p, int thread, float (&out)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) memcpy(out + 4 * q, &at(kind, p, q, thread), sizeof(float4));
  }

  // The listed columns of a thread, a bit for each; pack p from bit p * N on. `left`: columns of
  // the row from this thread's first on.
  __device__ uint32_t listed(int thread, int left) const {
    static_assert(kPacks * N <= 32);
    uint32_t bits = 0;
    for (int p = 0; p < kPacks; ++p) {
      float scale[N];
      get(kScale, p, thread, scale);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const bool inside = p * kSliceStep<N> + i < left;
        bits |= static_cast<uint32_t>(inside && scale[i] == 0.0f) << (p * N + i);
      }
    }
    return bits;
  }

  // Puts those of pack p, `bits`, in a row's xhat.
  __device__ __forceinline__ void take_listed(const ListedColumns<float>& list, uint32_t bits,
                                              int p, int thread, int64_t row,
                                              float (&xhat)[N]) const {
    if ((bits >> p * N & ((1u << N) - 1)) == 0) return;
    float place[N];
    get(kShift, p, thread, place);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (bits >> (p * N + i) & 1) xhat[i] = list.xhat(row, static_cast<int>(place[i]));
    }
  }

  // xhat of a pack of the output.
  template <int kCount>
  __device__ __forceinline__ void take_back(int p, int thread, float (&y)[kCount]) const {
    float param[kCount];
    get(kShift, p, thread, param);
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] -= param[i];
    get(kScale, p, thread, param);
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] *= param[i];
  }

 private:
  __device__ void put(ParamKind kind, int p, int thread, const float (&values)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) memcpy(&at(kind, p, q, thread), values + 4 * q, sizeof(float4));
  }
  __device__ __forceinline__ float4& at(ParamKind kind, int p, int q, int thread) const {
    return staged_[((kind * kPacks + p) * (N / 4) + q) * threads_ + thread];
  }

  float4* staged_;
  int threads_;
};

// A block of 512 threads has at most 8 groups of several warps.
constexpr int kMaxGroups = 8;

// What forward kept: the input, the output, or that and the list of columns that it does not hold.
enum class Saved { kInput, kOutput, kOutputAndList };

// A block's shared memory beside the staged parameters.
template <bool kRms>
struct BackwardShared {
  RowSums<float, Barrier::kNamed>::Slots slots[kMaxGroups];
  GradientSums<float, kRms> cluster_slots[2][kMaxClusterBlocks];
};

// Persistent blocks walk over the rows, kRows at a time a group, which keeps its columns' sums and
// the packs of its next rows in registers. Column parameters are staged once in shared memory, as
// fp32.
template <bool kRegular, bool kRms, Saved kSaved, int kPacks, int kRows, typename X, typename Y,
          typename S>
__device__ __forceinline__ void norm_backward_once(const BackwardInput<Y, S, float>& in,
                                                   const BackwardOutput<X, float>& out,
                                                   BackwardShared<kRms>& shared) {
  constexpr int N = 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
  constexpr bool kFromOutput = kSaved != Saved::kInput, kListed = kSaved == Saved::kOutputAndList;
  using SavedReader = SliceReader<S, N, kRegular, kPacks>;
  using GradientReader = SliceReader<Y, N, kRegular, kPacks>;
  extern __shared__ __align__(16) float staged[];

  const RowGroup<Barrier::kNamed, (kPacks > 1)> group;
  RowSums<float, Barrier::kNamed> sums(group, shared.slots[group.warps() > 1 ? group.index() : 0]);
  RowCluster cluster;
  // Whether the row lies in the blocks of a cluster, this one's from slice_first on. Short rows
  // never do.
  const bool spread = kPacks * N >= 16 && cluster.blocks() > 1;
  const int blocks_per_row = spread ? cluster.blocks() : 1;
  const int slice_cols = group.threads() * kPacks * N;
  const int slice_first = spread ? cluster.rank() * slice_cols : 0;
  const int col = slice_first + slice_column<N, kPacks>(group);
  const int left = in.cols - col;
  wait_for_prerequisites();
  const StagedParams<kPacks, N> params(staged, group.threads());
  for (int p = group.index(); p < kPacks; p += group.groups())
    params.template stage<kFromOutput, kListed>(in, p, group.thread(), col + p * kSliceStep<N>);
  __syncthreads();
  const uint32_t listed = kListed ? params.listed(group.thread(), left) : 0;

  const int64_t stride = int64_t{gridDim.x / blocks_per_row} * (group.groups() * kRows);
  int64_t first = int64_t{blockIdx.x / blocks_per_row} * (group.groups() * kRows);
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
  if (spread) cluster.arrive();
  fetch();
  if (spread) cluster.wait();
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
      params.get(kWeight, p, group.thread(), g);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r > 0 && row_left[r] <= 0) break;
        if constexpr (kFromOutput) {
          params.take_back(p, group.thread(), xhat[r][p]);
          if (kListed) {
            params.take_listed(in.list, listed, p, group.thread(),
                               row - stride + r * group.groups(), xhat[r][p]);
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
    if (spread) {
      GradientSums<float, kRms> of_row;
      if constexpr (!kRms) of_row.w = sum_w[0];
      of_row.wx = sum_wx[0];
      of_row = cluster.reduce(of_row, shared.cluster_slots, GradientSums<float, kRms>::merge);
      if constexpr (!kRms) sum_w[0] = of_row.w;
      sum_wx[0] = of_row.wx;
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
  const int own_cols = min(slice_cols, in.cols - slice_first);
  const int64_t partial = int64_t{blockIdx.x / blocks_per_row} * in.cols + slice_first;
  auto at_slice = [&](float* partials) { return partials ? partials + partial : nullptr; };
  write_partials<!kRms>(group, dweight, dbias, staged, own_cols, at_slice(out.dweight_partials),
                        at_slice(out.dbias_partials));
}

template <typename X, typename Y, typename S, bool kRms, Saved kSaved, int kPacks>
__global__ void __launch_bounds__(512)
    norm_backward_registers(const __grid_constant__ BackwardInput<Y, S, float> in,
                            const __grid_constant__ BackwardOutput<X, float> out, bool regular) {
  __shared__ BackwardShared<kRms> shared;
  if (regular) {
    norm_backward_once<true, kRms, kSaved, kPacks, kPacks == 1 ? 2 : 1>(in, out, shared);
  } else {
    norm_backward_once<false, kRms, kSaved, kPacks, 1>(in, out, shared);
  }
}

}  // namespace fused_norm
