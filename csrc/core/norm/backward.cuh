// Backward for rows that stay in registers: read once.
#pragma once

#include "core/common/overlap.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/norm/gated.cuh"
#include "core/norm/listed_share.cuh"
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
template <RowsLie kLie, bool kRms, Saved kSaved, int kPacks, typename X, typename In>
__device__ __forceinline__ void norm_backward_once(const In& in,
                                                   const BackwardOutput<X, float>& out,
                                                   BackwardShared& shared) {
  using Y = typename In::Gradient;
  using S = typename In::Kept;
  constexpr int N = kPackElements<X, Y>;
  constexpr bool kFromOutput = kSaved != Saved::kInput;
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
  if constexpr (In::kGates) {
    // A block's rows are all of one group, and so have one weight.
    const int groups = in.form.groups, group_of_block = blockIdx.x % groups;
    first = (first - int64_t{group_of_block} * group.groups()) + group_of_block;
    row = first + group.index() * groups;
  }

  wait_for_prerequisites();
  out.clear_totals();
  using Params = StagedParams<kPacks, N, kSaved, !kRms>;
  const Params params(staged, group.thread());
  auto open_rows = [&] {
    using Group = std::remove_const_t<decltype(group)>;
    const int row_threads = max(group.threads(), kWarpSize);
    char* const behind =
        reinterpret_cast<char*>(staged + param_kinds(kSaved, !kRms) * row_threads * kPacks * N);
    if constexpr (In::kGates) {
      return GatedRows<X, N, kPacks, Group>(in, group, col, row, stride, behind);
    } else if constexpr (kInRing) {
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
  auto look_ahead = [&] {
    if (out.dresidual != nullptr)
      out.template prefetch_residual<kLie, N, kPacks>(row * in.cols + col, left);
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
  // Made anew at each use, as it would take registers between.
  using Listed = ListedShare<kLie, Params, 1, false, X, Y, S>;
  const int listed_columns = kFromOutput ? in.list.count() : 0;
  auto listed = [&] {
    int thread, index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    asm volatile("mov.u32 %0, %%tid.y;" : "=r"(index));
    return Listed(in, out, staged, 0, thread, group.threads(), 0, listed_columns,
                  int64_t{blockIdx.x} * group.groups() + index);
  };
  typename Listed::Held next_listed{};
  if (listed_columns > 0) {
    listed().begin();
    if (group.index() == 0) listed().clear();
    __syncthreads();
    if (row < in.rows) next_listed = listed().load(row);
  }
  // A block's groups stay together to the last of its rows, as warps may hold several.
  for (; first < in.rows; first += stride) {
    float xhat[kPacks][N], w[kPacks][N];
    rows.take(row, xhat, w);
    const float mean = next_mean, rstd = next_rstd;
    // What is left of the row, nothing of one past the end: what its registers hold is stale.
    const int row_left = row < in.rows ? left : 0;
    float sum_w = 0, sum_wx = 0;
    const typename Listed::Held own_listed = next_listed;
    if (listed_columns > 0 && row < in.rows) sum_wx = listed().add_up(row, own_listed);
    row += stride;
    if (row < in.rows) {
      rows.ask_for(row);
      look_ahead();
      if (listed_columns > 0) next_listed = listed().load(row);
    }

#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * kSliceStep<N> >= row_left) break;
      if constexpr (kFromOutput) {
        params.take_back(p, xhat[p]);
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
        if constexpr (In::kGates) {
          float g[N];
          params.get(kWeight, p, g);
          rows.finish(p, dx - out.dx + p * kSliceStep<N>, g, xhat[p], w[p]);
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
      if (listed_columns > 0) {
        if (group.warps() > 1) {
          meet_at(group.index() + 1, group.threads());
        } else {
          __syncwarp();
        }
        if (row - stride < in.rows) listed().write_dx(row - stride, own_listed, gradient);
      }
    }
  }
  launch_dependents();
  const int64_t partial = int64_t{blockIdx.x} * in.cols;
  auto of_block = [&](float* partials) { return partials ? partials + partial : nullptr; };
  if (listed_columns > 0) __threadfence_block();
  write_partials<kLie, !kRms>(group, dweight, dbias, staged, in.cols,
                              of_block(out.dweight_partials), of_block(out.dbias_partials));
  if (listed_columns > 0 && out.dweight_partials) {
    __syncthreads();
    listed().write_partials(of_block(out.dweight_partials), group.index(), group.groups());
  }
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

template <typename X, typename Y, typename S, bool kRms, Saved kSaved, int kPacks>
__global__ void __launch_bounds__(backward_threads(kPacks), backward_blocks(kPacks))
    norm_backward_registers(const __grid_constant__ BackwardInput<Y, S, float> in,
                            const __grid_constant__ BackwardOutput<X, float> out, RowsLie lie) {
  __shared__ BackwardShared shared;
  auto run = [&](auto as) {
    norm_backward_once<decltype(as)::value, kRms, kSaved, kPacks>(in, out, shared);
  };
  if (lie == RowsLie::kRegular) {
    run(ConstantLie<RowsLie::kRegular>());
  } else if (lie == RowsLie::kShifted) {
    run(ConstantLie<RowsLie::kShifted>());
  } else if constexpr (kPacks == 1 || kBulkCopies) {
    if constexpr (kBackwardInPairs<X, Y>) {
      if (lie == RowsLie::kPairs) return run(ConstantLie<RowsLie::kPairs>());
    }
    run(ConstantLie<RowsLie::kElements>());
  }
}

template <typename X, int kPacks>
__global__ void __launch_bounds__(backward_threads(kPacks), backward_blocks(kPacks))
    norm_backward_gated(const __grid_constant__ GatedInput<X> in,
                        const __grid_constant__ BackwardOutput<X, float> out) {
  __shared__ BackwardShared shared;
  GatedInput<X> of_group = in;
  if (in.weight.data)
    of_group.weight.data =
        static_cast<const char*>(in.weight.data) +
        int64_t{in.form.group_of(blockIdx.x)} * in.cols * size_of(in.weight.dtype);
  norm_backward_once<RowsLie::kRegular, true, Saved::kInput, kPacks>(of_group, out, shared);
}

}  // namespace fused_norm
