// Backward for rows that stay in registers: read once.
#pragma once

#include "core/common/overlap.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/norm/backward_rows.cuh"
#include "core/norm/partial_sums.cuh"
#include "core/norm/staged_params.cuh"

namespace fused_norm {

// A block of 512 threads has at most 8 groups of several warps.
constexpr int kMaxGroups = 8;
using GroupSums = RowSums<float>;

struct BackwardShared {
  GroupSums::Slots slots[kMaxGroups];
  RingStages<kRowStages> stages[kMaxGroups];
};

// Persistent blocks walk over the rows. A group of threads keeps its columns' sums in registers;
// its next rows are on their way (backward_rows.cuh). Column parameters are staged once in shared
// memory, as fp32, while the first rows are under way.
template <RowsLie kLie, bool kRms, Saved kSaved, int kPacks, typename X, typename Y, typename S>
__device__ __forceinline__ void norm_backward_once(const BackwardInput<Y, S, float>& in,
                                                   const BackwardOutput<X, float>& out,
                                                   BackwardShared& shared) {
  constexpr int N = kPackElements<X, Y>;
  constexpr bool kFromOutput = kSaved != Saved::kInput, kListed = kSaved == Saved::kOutputAndList;
  constexpr bool kRegular = kLie == RowsLie::kRegular, kShifted = kLie == RowsLie::kShifted;
  constexpr bool kInRing = dealt_out(kLie) && kPacks > 1;
  // Rows that are dealt out may end in the first half of every lane's pack.
  constexpr bool kMayBeHalf = dealt_out(kLie) && kPacks == 1;
  extern __shared__ __align__(128) float staged[];

  const RowGroup<Barrier::kNamed, (kPacks > 1 || dealt_out(kLie))> group;
  GroupSums sums(group, shared.slots[group.warps() > 1 ? group.index() : 0]);
  const int col = slice_column<N, kPacks, kLie>(group);
  const int left = in.cols - col;
  auto past_half = [half = in.cols <= N / 2 * kWarpSize](int i) {
    return kMayBeHalf && i == N / 2 && half;
  };
  const int64_t stride = int64_t{gridDim.x} * group.groups();
  int64_t first = int64_t{blockIdx.x} * group.groups();
  int64_t row = first + group.index();

  wait_for_prerequisites();
  out.clear_totals();
  const StagedParams<kPacks, N, kSaved> params(staged, group.thread());
  auto open_rows = [&] {
    using Group = std::remove_const_t<decltype(group)>;
    const int row_threads = max(group.threads(), kWarpSize);
    char* const behind =
        reinterpret_cast<char*>(staged + param_kinds(kSaved) * row_threads * kPacks * N);
    if constexpr (kInRing) {
      return RowsInRing<Y, S, N, kLie, kPacks, Group>(in, group, col, row, stride, behind,
                                                      shared.stages[group.index()]);
    } else if constexpr (kRegular) {
      return RowsInQueue<Y, S, N, kPacks, Group>(in, group, col, row, stride, behind);
    } else {
      return RowsInRegisters<Y, S, N, kLie, kPacks, Group>(in, group, col, row, stride);
    }
  };
  auto rows = open_rows();
  const bool has_mean = !kRms && !(kForBothNorms<X, Y> && in.rms);
  float next_mean = 0, next_rstd = 0;
  uint32_t listed = 0;
  auto look_ahead = [&] {
    if (out.dresidual != nullptr)
      out.template prefetch_residual<kLie, N, kPacks>(row * in.cols + col, left);
    if (kListed && listed != 0) params.prefetch_listed(in.list, listed, row);
    if (!kFromOutput && has_mean) next_mean = __ldg(in.mean + row);
    next_rstd = __ldg(in.rstd + row);
  };

  float dweight[kPacks][N] = {}, dbias[kPacks][N] = {};
  X* dx = out.dx + row * in.cols + col;
  // Packs that wait in registers would leave none to the parameters.
  auto stage_params = [&] {
    for (int p = group.index(); p < kPacks; p += group.groups())
      params.template stage<kLie>(in, p, col + p * kSliceStep<N>);
    __syncthreads();
  };
  if (!kRegular) stage_params();
  rows.ask_for_first(row);
  if (row < in.rows) look_ahead();
  if (kRegular) stage_params();
  if (kListed) listed = params.template listed<kLie>(left);
  // A block's groups stay together to the last of its rows, as warps may hold several.
  for (; first < in.rows; first += stride) {
    float xhat[kPacks][N], w[kPacks][N];
    rows.take(row, xhat, w);
    const float mean = next_mean, rstd = next_rstd;
    // What is left of the row, nothing of one past the end: what its registers hold is stale.
    const int row_left = row < in.rows ? left : 0;
    row += stride;
    if (row < in.rows) {
      rows.ask_for(row);
      look_ahead();
    }

    float sum_w = 0, sum_wx = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * kSliceStep<N> >= row_left) break;
      if constexpr (kFromOutput) {
        params.take_back(p, xhat[p]);
        if (kListed) params.take_listed(in.list, listed, p, row - stride, xhat[p]);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (past_half(i)) break;
          xhat[p][i] = kRms ? xhat[p][i] * rstd : (xhat[p][i] - mean) * rstd;
        }
      }
      float g[N], of_w[N] = {}, of_wx[N] = {};
      params.get(kWeight, p, g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (past_half(i)) break;
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
    rows.drop(row);
    if (out.dx != nullptr) {
      const RowGradient<kRms> gradient(rstd, in.per_cols, has_mean ? sum_w : 0.0f, sum_wx);
      WriterOf<X, N, kLie, kPacks, kInRing> writer;
      writer.open(dx, row_left);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        // The lanes of shifted rows exchange what they write.
        if (!kShifted && p * kSliceStep<N> >= row_left) break;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (past_half(i)) break;
          w[p][i] = gradient.at(w[p][i], xhat[p][i]);
        }
        if (out.dresidual != nullptr) {
          const int64_t at = dx - out.dx + p * kSliceStep<N>;
          const int left_of_pack = row_left - p * kSliceStep<N>;
          if constexpr (dealt_out(kLie)) {
            out.template add_residual_apart<kLie>(at, left_of_pack, w[p]);
          } else {
            out.template add_residual<kRegular>(at, left_of_pack, in.rows * in.cols, w[p]);
          }
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
  write_partials<kLie, !kRms>(group, dweight, dbias, staged, in.cols,
                              of_block(out.dweight_partials), of_block(out.dbias_partials));
}

// Rows that are not whole packs go in pairs where that is often asked for.
template <typename X, typename Y>
constexpr bool kBackwardInPairs = kInPairs<X>&& std::is_same_v<X, Y>;
template <typename X, typename Y>
constexpr RowsLie backward_deals_out(int cols) {
  return kBackwardInPairs<X, Y> ? dealt_out_as<X>(cols) : RowsLie::kElements;
}

template <RowsLie kLie>
using ConstantLie = std::integral_constant<RowsLie, kLie>;
template <Saved kSaved>
using ConstantSaved = std::integral_constant<Saved, kSaved>;

template <typename X, typename Y, typename S, bool kRms, Saved kSaved, int kPacks>
__global__ void __launch_bounds__(backward_threads(kPacks), backward_blocks(kPacks))
    norm_backward_registers(const __grid_constant__ BackwardInput<Y, S, float> in,
                            const __grid_constant__ BackwardOutput<X, float> out, RowsLie lie) {
  __shared__ BackwardShared shared;
  auto run = [&](auto as, auto saved) {
    norm_backward_once<decltype(as)::value, kRms, decltype(saved)::value, kPacks>(in, out, shared);
  };
  if (lie == RowsLie::kRegular) {
    with_saved<kSaved>(in, [&](auto saved) { run(ConstantLie<RowsLie::kRegular>(), saved); });
  } else if (lie == RowsLie::kShifted) {
    run(ConstantLie<RowsLie::kShifted>(), ConstantSaved<kSaved>());
  } else if constexpr (kPacks == 1 || kBulkCopies) {
    if constexpr (kBackwardInPairs<X, Y>) {
      if (lie == RowsLie::kPairs)
        return run(ConstantLie<RowsLie::kPairs>(), ConstantSaved<kSaved>());
    }
    run(ConstantLie<RowsLie::kElements>(), ConstantSaved<kSaved>());
  }
}

}  // namespace fused_norm
