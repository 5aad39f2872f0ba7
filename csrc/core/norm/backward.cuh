// Backward for rows that stay in registers: read once.
#pragma once

#include "core/common/branch.cuh"
#include "core/common/overlap.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/norm/gated.cuh"
#include "core/norm/listed_values.cuh"
#include "core/norm/partial_sums.cuh"
#include "core/norm/staged_params.cuh"

namespace fused_norm {

// A block of 512 threads has at most 8 groups of several warps.
constexpr int kMaxGroups = 8;

using GroupSums = RowSums</*kNamedBarrier=*/true>;

using BackwardShared = GroupSums::Slots[kMaxGroups];

// Which rows a group works on: `row`, and every stride-th after it. `first` is the row of its
// block's first group.
struct GroupRows {
  int64_t stride, first, row;

  template <typename In, typename Group>
  __device__ __forceinline__ GroupRows(const In& in, const Group& group)
      : stride(int64_t{gridDim.x} * group.groups()),
        first(int64_t{blockIdx.x} * group.groups()),
        row(first + group.index()) {
    if constexpr (In::kGates) {
      // A block's rows are all of one group of the gate, and so have one weight.
      const int groups = in.form.groups, group_of_block = blockIdx.x % groups;
      first = (first - int64_t{group_of_block} * group.groups()) + group_of_block;
      row = first + group.index() * groups;
    }
  }
};

// How a group's rows come to its threads: where they are on their way in shared memory, behind the
// parameters.
template <RowsLie kLie, int kPacks, int N, typename In, typename Group>
__device__ __forceinline__ auto open_rows(const In& in, const Group& group, int col, int64_t row,
                                          int64_t stride, float* behind_params) {
  char* const memory = reinterpret_cast<char*>(behind_params);
  using Y = typename In::Gradient;
  using S = typename In::Kept;
  if constexpr (In::kGates) {
    return GatedRows<Y, N, kPacks, Group>(in, group, col, row, stride, memory);
  } else if constexpr (kLie == RowsLie::kRegular) {
    return RowsInQueue<Y, S, N, kPacks, Group>(in, group, col, row, stride, memory);
  } else {
    return RowsInRegisters<Y, S, N, kLie, kPacks, Group>(in, group, col, row, stride);
  }
}

// Persistent blocks walk over the rows. A group of threads keeps its columns' sums in registers;
// its next rows are on their way (backward_rows.cuh). Column parameters are staged once in shared
// memory, as fp32, while the first rows are under way.
template <RowsLie kLie, bool kWholeWarps, bool kRms, bool kFromOutput, int kPacks, typename X,
          typename In>
__device__ __forceinline__ void norm_backward_once(const In& in,
                                                   const BackwardOutput<X, float>& out,
                                                   BackwardShared& shared) {
  using Y = typename In::Gradient;
  constexpr int N = kPackElements<X, Y>;
  constexpr bool kRegular = kLie == RowsLie::kRegular;
  extern __shared__ __align__(128) float staged[];

  const RowGroup<kWholeWarps> group;
  GroupSums sums(group, shared[group.warps() > 1 ? group.index() : 0]);
  const int col = slice_column<N, kPacks, kLie>(group), left = in.cols - col;
  const int step = slice_step<N>(group);
  GroupRows at(in, group);

  wait_for_prerequisites();
  using Params = StagedParams<kPacks, N, kFromOutput, !kRms, 2>;
  const int own_params = kFromOutput && in.list.room > 0 ? group.groups() : 1;
  float* const behind_params = staged + Params::floats(group.threads() * own_params);
  auto rows = open_rows<kLie, kPacks, N>(in, group, col, at.row, at.stride, behind_params);
  // Packs that wait in registers would leave none to the parameters.
  if (kRegular) rows.ask_for_first(at.row);
  ListedValues<kLie, Params> listed(in.list, {0, kFromOutput ? in.list.count() : 0});
  const int first_thread = listed.any() ? group.index() * group.threads() : 0;
  const Params params(staged, first_thread + group.thread());
  params.template stage_all<kLie>(in, group, col, !listed.any());
  if (!kRegular) rows.ask_for_first(at.row);
  const bool has_mean = !kRms && !(kForBothNorms<X, Y> && in.rms);
  float next_mean = 0, next_rstd = 0;
  auto look_ahead = [&] {
    if (out.dresidual != nullptr)
      out.template prefetch_residual<kLie, N, kPacks>(at.row * in.cols + col, left, step);
    if (!kFromOutput && has_mean) next_mean = __ldg(in.mean + at.row);
    next_rstd = __ldg(in.rstd + at.row);
  };

  float dweight[kPacks][N] = {}, dbias[kPacks][N] = {};
  X* dx = out.dx + at.row * in.cols + col;
  if (at.row < in.rows) look_ahead();
  listed.begin(params, at.row, at.stride, in.rows);
  // A block's groups stay together to the last of its rows, as warps may hold several.
  for (; at.first < in.rows; at.first += at.stride) {
    float xhat[kPacks][N], w[kPacks][N];
    rows.take(at.row, xhat, w);
    const float mean = next_mean, rstd = next_rstd;
    // What is left of the row, nothing of one past the end: what its registers hold is stale.
    const int row_left = at.row < in.rows ? left : 0;
    float sum_w = 0, sum_wx = 0;
    at.row += at.stride;
    if (at.row < in.rows) {
      if constexpr (!kRegular) rows.ask_for(at.row);
      look_ahead();
      if (listed.any()) listed.bring(params, at.row, at.stride, at.row + at.stride < in.rows);
    }

    auto add = [&](int p, int i, float d) {
      dweight[p][i] += d * xhat[p][i];
      if (!kRms) dbias[p][i] += d;
    };
    add_up_row<kRms, kFromOutput>(params, listed, row_left, step, mean, rstd, xhat, w, add, sum_w,
                                  sum_wx);
    if (listed.any()) listed.next_turn(/*meet_anyway=*/group.warps() > 1);
    sum_up_group<kRms>(group, sums, sum_w, sum_wx);
    if (out.dx == nullptr) continue;
    const RowGradient<kRms> gradient(rstd, in.per_cols, has_mean ? sum_w : 0.0f, sum_wx);
    write_row<kLie>(in, out, group, rows, params, row_left, dx, gradient, xhat, w);
    dx += at.stride * in.cols;
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

template <RowsLie kLie>
using ConstantLie = std::integral_constant<RowsLie, kLie>;

template <typename X, typename Y, typename S, bool kFromOutput, int kPacks>
__global__ void __launch_bounds__(backward_threads(kPacks), backward_blocks(kPacks))
    norm_backward_registers(const __grid_constant__ BackwardInput<Y, S, float> in,
                            const __grid_constant__ BackwardOutput<X, float> out, RowsLie lie) {
  __shared__ BackwardShared shared;
  auto run = [&](auto as, auto whole_warps) {
    constexpr RowsLie kLie = decltype(as)::value;
    constexpr bool kWhole = decltype(whole_warps)::value;
    if constexpr (!kForBothNorms<X, Y>) {
      if (in.rms)
        return norm_backward_once<kLie, kWhole, true, kFromOutput, kPacks>(in, out, shared);
    }
    norm_backward_once<kLie, kWhole, false, kFromOutput, kPacks>(in, out, shared);
  };
  if (lie == RowsLie::kRegular) {
    // One pack: of any number of lanes. Two: of whole warps, which are then known to be whole, or
    // of a part of a warp. Three: of a part of a warp.
    with_flag(kPacks == 2 && blockDim.x >= kWarpSize,
              [&](auto whole_warps) { run(ConstantLie<RowsLie::kRegular>(), whole_warps); });
  } else if constexpr (kPacks == 1) {
    // These rows lose most where the number of lanes is not known, so whole warps have their own
    // code.
    with_flag(blockDim.x >= kWarpSize, [&](auto whole_warps) {
      if constexpr (kBackwardInPairs<X, Y>) {
        if (lie == RowsLie::kPairs) return run(ConstantLie<RowsLie::kPairs>(), whole_warps);
      }
      run(ConstantLie<RowsLie::kElements>(), whole_warps);
    });
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
  with_flag(kPacks == 2 && blockDim.x >= kWarpSize, [&](auto whole_warps) {
    norm_backward_once<RowsLie::kRegular, decltype(whole_warps)::value, true, false, kPacks>(
        of_group, out, shared);
  });
}

}  // namespace fused_norm
