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

using GroupSums = RowSums</*kNamedBarrier=*/true>;

struct BackwardShared {
  GroupSums::Slots slots[kMaxGroups];
};

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

// Pass 1 of a row, of which `left` columns remain from the thread's first on: makes xhat of what
// was saved and w of dy, and adds them to the columns' sums and to what the thread has of the
// row's. past_half(i): the row ends before element i. (The arrays of a pack are the caller's: for
// those of an inlined function the compiler takes other registers.)
template <bool kRms, bool kFromOutput, typename Params, typename PastHalf, int kPacks, int N>
__device__ __forceinline__ void add_up_row(const Params& params, PastHalf past_half, int left,
                                           float mean, float rstd, float (&xhat)[kPacks][N],
                                           float (&w)[kPacks][N], float (&dweight)[kPacks][N],
                                           float (&dbias)[kPacks][N], float (&g)[N],
                                           float (&of_w)[N], float (&of_wx)[N], float& sum_w,
                                           float& sum_wx) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (p * kSliceStep<N> >= left) break;
    if constexpr (kFromOutput) {
      params.take_back(p, xhat[p]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (past_half(i)) break;
        xhat[p][i] = kRms ? xhat[p][i] * rstd : (xhat[p][i] - mean) * rstd;
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) of_w[i] = of_wx[i] = 0;
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
}

// Pass 2: makes dx of xhat and w, and writes it to `dx`, where the thread's columns start.
template <RowsLie kLie, typename In, typename X, typename Group, typename Rows, typename Params,
          typename PastHalf, typename Gradient, typename Writer, int kPacks, int N>
__device__ __forceinline__ void write_row(const In& in, const BackwardOutput<X, float>& out,
                                          const Group& group, const Rows& rows,
                                          const Params& params, PastHalf past_half, int left, X* dx,
                                          const Gradient& gradient, Writer& writer,
                                          Pack<X, N>& pack, float (&xhat)[kPacks][N],
                                          float (&w)[kPacks][N]) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (p * kSliceStep<N> >= left) break;
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
    if (out.dresidual != nullptr)
      out.template add_residual<kLie>(dx - out.dx + p * kSliceStep<N>, left - p * kSliceStep<N>,
                                      w[p]);
    round_to(pack, w[p]);
    writer.store(p, pack, group);
  }
}

// The listed columns, `columns` in all, shared by the threads of a group. Made anew at each use, as
// it would take registers between.
template <typename Share, typename In, typename Out, typename Group>
__device__ __forceinline__ Share listed_share(const In& in, const Out& out, const Group& group,
                                              float* staged, int columns) {
  int thread, index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  asm volatile("mov.u32 %0, %%tid.y;" : "=r"(index));
  return Share(in, out, staged, 0, thread, group.threads(), 0, columns,
               int64_t{blockIdx.x} * group.groups() + index);
}

// Before the first row: the listed columns' owners take their xhat for zero from here on. Gives the
// row's values.
template <typename Share, typename Listed, typename Group>
__device__ __forceinline__ typename Share::Held begin_listed(const Listed& listed, bool any,
                                                             const Group& group, bool has_row,
                                                             int64_t row) {
  if (!any) return {};
  listed().begin();
  if (group.index() == 0) listed().clear();
  __syncthreads();
  return has_row ? listed().load(row) : typename Share::Held{};
}

// Writes dx of a row's listed columns, when their owners have.
template <typename Listed, typename Group, typename Held, typename Gradient>
__device__ __forceinline__ void write_listed(const Listed& listed, const Group& group, int64_t row,
                                             int64_t rows, const Held& held,
                                             const Gradient& gradient) {
  group.warps() > 1 ? meet_at(group.index() + 1, group.threads()) : __syncwarp();
  if (row < rows) listed().write_dx(row, held, gradient);
}

// Writes the block's partial rows.
template <RowsLie kLie, bool kRms, typename In, typename Out, typename Group, typename Listed,
          int kPacks, int N>
__device__ __forceinline__ void write_block(const In& in, const Out& out, const Group& group,
                                            int listed_columns, const Listed& listed, float* staged,
                                            float (&dweight)[kPacks][N],
                                            float (&dbias)[kPacks][N]) {
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

// Persistent blocks walk over the rows. A group of threads keeps its columns' sums in registers;
// its next rows are on their way (backward_rows.cuh). Column parameters are staged once in shared
// memory, as fp32, while the first rows are under way.
template <RowsLie kLie, bool kRms, Saved kSaved, int kPacks, typename X, typename In>
__device__ __forceinline__ void norm_backward_once(const In& in,
                                                   const BackwardOutput<X, float>& out,
                                                   BackwardShared& shared) {
  using Y = typename In::Gradient;
  constexpr int N = kPackElements<X, Y>;
  constexpr bool kFromOutput = kSaved != Saved::kInput, kRegular = kLie == RowsLie::kRegular;
  extern __shared__ __align__(128) float staged[];

  const RowGroup<(kPacks > 1 || dealt_out(kLie))> group;
  GroupSums sums(group, shared.slots[group.warps() > 1 ? group.index() : 0]);
  const int col = slice_column<N, kPacks, kLie>(group), left = in.cols - col;
  // Rows that are dealt out may end in the first half of every lane's pack.
  auto past_half = [half = in.cols <= N / 2 * kWarpSize](int i) {
    return dealt_out(kLie) && i == N / 2 && half;
  };
  GroupRows at(in, group);

  wait_for_prerequisites();
  out.clear_totals();
  const int listed_columns = kFromOutput ? in.list.count() : 0;
  using Params = StagedParams<kPacks, N, kSaved, !kRms>;
  const Params params(staged, group.thread());
  float* const behind_params = staged + Params::floats(max(group.threads(), kWarpSize));
  auto rows = open_rows<kLie, kPacks, N>(in, group, col, at.row, at.stride, behind_params);
  const bool has_mean = !kRms && !(kForBothNorms<X, Y> && in.rms);
  float next_mean = 0, next_rstd = 0;
  auto look_ahead = [&] {
    if (out.dresidual != nullptr)
      out.template prefetch_residual<kLie, N, kPacks>(at.row * in.cols + col, left);
    if (!kFromOutput && has_mean) next_mean = __ldg(in.mean + at.row);
    next_rstd = __ldg(in.rstd + at.row);
  };

  float dweight[kPacks][N] = {}, dbias[kPacks][N] = {};
  X* dx = out.dx + at.row * in.cols + col;
  // Packs that wait in registers would leave none to the parameters.
  if (!kRegular) params.template stage_all<kLie>(in, group, col);
  rows.ask_for_first(at.row);
  if (at.row < in.rows) look_ahead();
  if (kRegular) params.template stage_all<kLie>(in, group, col);
  using Share = ListedShare<kLie, Params, 1, false, X, Y, typename In::Kept>;
  auto listed = [&] { return listed_share<Share>(in, out, group, staged, listed_columns); };
  auto next_listed =
      begin_listed<Share>(listed, listed_columns > 0, group, at.row < in.rows, at.row);
  // A block's groups stay together to the last of its rows, as warps may hold several.
  for (; at.first < in.rows; at.first += at.stride) {
    float xhat[kPacks][N], w[kPacks][N];
    rows.take(at.row, xhat, w);
    const float mean = next_mean, rstd = next_rstd;
    // What is left of the row, nothing of one past the end: what its registers hold is stale.
    const int row_left = at.row < in.rows ? left : 0;
    float sum_w = 0, sum_wx = 0;
    const auto own_listed = next_listed;
    if (listed_columns > 0 && at.row < in.rows) sum_wx = listed().add_up(at.row, own_listed);
    at.row += at.stride;
    if (at.row < in.rows) {
      rows.ask_for(at.row);
      look_ahead();
      if (listed_columns > 0) next_listed = listed().load(at.row);
    }

    float g[N], of_w[N], of_wx[N];
    add_up_row<kRms, kFromOutput>(params, past_half, row_left, mean, rstd, xhat, w, dweight, dbias,
                                  g, of_w, of_wx, sum_w, sum_wx);
    sum_up_group<kRms>(group, sums, sum_w, sum_wx);
    if (out.dx == nullptr) continue;
    const RowGradient<kRms> gradient(rstd, in.per_cols, has_mean ? sum_w : 0.0f, sum_wx);
    WriterOf<X, N, kLie> writer;
    writer.open(dx, row_left);
    Pack<X, N> pack;
    write_row<kLie>(in, out, group, rows, params, past_half, row_left, dx, gradient, writer, pack,
                    xhat, w);
    dx += at.stride * in.cols;
    if (listed_columns > 0)
      write_listed(listed, group, at.row - at.stride, in.rows, own_listed, gradient);
  }
  launch_dependents();
  write_block<kLie, kRms>(in, out, group, listed_columns, listed, staged, dweight, dbias);
}

// Rows that are not whole packs go in pairs where that is often asked for.
template <typename X, typename Y>
constexpr bool kBackwardInPairs = kInPairs<X>&& std::is_same_v<X, Y>;

template <RowsLie kLie>
using ConstantLie = std::integral_constant<RowsLie, kLie>;

template <typename X, typename Y, typename S, Saved kSaved, int kPacks>
__global__ void __launch_bounds__(backward_threads(kPacks), backward_blocks(kPacks))
    norm_backward_registers(const __grid_constant__ BackwardInput<Y, S, float> in,
                            const __grid_constant__ BackwardOutput<X, float> out, RowsLie lie) {
  __shared__ BackwardShared shared;
  auto run = [&](auto as) {
    constexpr RowsLie kLie = decltype(as)::value;
    if constexpr (!kForBothNorms<X, Y>) {
      if (in.rms) return norm_backward_once<kLie, true, kSaved, kPacks>(in, out, shared);
    }
    norm_backward_once<kLie, false, kSaved, kPacks>(in, out, shared);
  };
  if (lie == RowsLie::kRegular) {
    run(ConstantLie<RowsLie::kRegular>());
  } else if constexpr (kPacks == 1) {
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
