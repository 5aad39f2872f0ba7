// Backward kernels. With w = dy * (weight + offset), and xhat from the saved input or output,
//   dx = rstd * (w - mean(w) - xhat * mean(w * xhat))      (RMSNorm: without mean(w))
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
// in two stages without atomics: blocks that walk over rows write partial sums, then sum_partials()
// adds those in a fixed order.
#pragma once

#include "core/common/row_group.cuh"
#include "core/common/statistics.cuh"
#include "core/norm/columns.cuh"
#include "core/norm/policies.cuh"

namespace fused_norm {

// Programmatic dependent launch, where the chip has it: stage 2 is launched while stage 1 drains,
// and waits for its results on the GPU.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What the kernels read. The saved tensor has dtype S: the input's, or the output's when
// from_output.
template <typename Y, typename S, typename A>
struct BackwardInput {
  int64_t rows;
  int cols;
  bool from_output;
  const Y* dy;
  RowLayout dy_layout;
  const S* saved;
  RowLayout saved_layout;
  const A* mean;  // null: no mean to subtract
  const A* rstd;
  ParamVector weight, bias;
  A weight_offset;
  ListedColumns<A> list;

  // Rows past the end are empty.
  template <int N, bool kRegular, typename Group>
  __device__ RowReader<Y, N, kRegular> open_dy(int64_t row, const Group& group) const {
    return {row_start(dy, dy_layout, row), row < rows ? cols : 0,
            kRegular || rows_follow(dy_layout, row, rows, cols, N), group.lane(), group.lanes()};
  }
  template <int N, bool kRegular, typename Group>
  __device__ RowReader<S, N, kRegular> open_saved(int64_t row, const Group& group) const {
    return {row_start(saved, saved_layout, row), row < rows ? cols : 0,
            kRegular || rows_follow(saved_layout, row, rows, cols, N), group.lane(), group.lanes()};
  }
};

// Gradients; null where not asked for. Partials are [2][partial rows][cols]: dweight's, then
// dbias's.
template <typename X, typename A>
struct BackwardOutput {
  X* dx;
  A* dweight_partials;
  A* dbias_partials;

  template <int N, bool kRegular, typename Group>
  __device__ RowWriter<X, N, kRegular> open_dx(int64_t row, int64_t rows, int cols,
                                               const Group& group) const {
    return {dx + row * cols, row < rows ? cols : 0, group.lane(), group.lanes(), group.mask()};
  }
};

// xhat = (saved - shift) * scale. From the input both are the row's (mean, rstd); from the output
// they are the column's (bias, 1 / weight). A listed column has (its place in the list, 0), and
// its xhat is taken from there; one that is not recoverable and not listed has a scale of NaN.
template <typename A, int N>
struct ColumnParams {
  A weight[N], shift[N], scale[N];
  uint32_t listed;  // a bit for each column

  // Parameters of the columns from `col` on; zero past the end, so that such columns add nothing
  // anywhere. kListed: some columns may be listed.
  template <bool kListed, typename In>
  __device__ static ColumnParams load(const In& in, int col) {
    ColumnParams params;
    params.listed = 0;
    A weights[N], biases[N];
    if (in.weight.data && col < in.cols) load_params<false>(in.weight, col, in.cols, weights);
    if (in.from_output && in.bias.data && col < in.cols)
      load_params<false>(in.bias, col, in.cols, biases);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool inside = col + i < in.cols;
      const A g = in.weight.data ? weights[i] + in.weight_offset : A(1);
      params.weight[i] = inside ? g : A(0);
      params.shift[i] = inside && in.from_output && in.bias.data ? biases[i] : A(0);
      params.scale[i] = inside ? reciprocal(g) : A(0);
      const A bias = params.shift[i];
      if (!inside || !in.from_output) continue;
      if (!meets(in.list.recoverable, g, bias)) params.scale[i] = static_cast<A>(NAN);
      if (kListed && !meets(in.list.precise, g, bias)) {
        const int place = in.list.find(col + i);
        if (place >= 0) {
          params.shift[i] = static_cast<A>(place);
          params.scale[i] = A(0);
          params.listed |= 1u << i;
        }
      }
    }
    return params;
  }

  // Puts the listed columns' values in a row's `xhat`.
  __device__ __forceinline__ void take_listed(const ListedColumns<A>& list, int64_t row,
                                              A (&xhat)[N]) const {
    if (listed == 0) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (listed >> i & 1) xhat[i] = list.xhat(row, static_cast<int>(shift[i]));
    }
  }
};

// A row's sums: of w (LayerNorm) and of w * xhat.
template <typename A, bool kRms>
struct GradientSums {
  A w, wx;
  __device__ static GradientSums merge(const GradientSums& a, const GradientSums& b) {
    return {a.w + b.w, a.wx + b.wx};
  }
};
template <typename A>
struct GradientSums<A, true> {
  A wx;
  __device__ static GradientSums merge(const GradientSums& a, const GradientSums& b) {
    return {a.wx + b.wx};
  }
};

// dx of one element, given the row's means of w and w * xhat.
template <bool kRms, typename A>
__device__ __forceinline__ A gradient_of_x(A w, A xhat, A rstd,
                                           const GradientSums<A, kRms>& means) {
  if constexpr (kRms) {
    return rstd * (w - xhat * means.wx);
  } else {
    return rstd * (w - means.w - xhat * means.wx);
  }
}

// Adds the column sums of all groups of a block, in a fixed order, into `staged`: shared memory for
// blockDim.x * kPacks
// * N values, complete after the last barrier of the caller's.
template <int kPacks, int N, typename Group>
__device__ void stage_sums(const Group& group, float (&sums)[kPacks][N], int turn, float* staged) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    float* at = staged + (p * group.threads() + group.thread()) * N;
#pragma unroll
    for (int i = 0; i < N; ++i) at[i] = turn == 0 ? sums[p][i] : at[i] + sums[p][i];
  }
}

// Adds the sums of groups that share a warp: lanes that hold the same columns are `lanes` apart.
template <int kPacks, int N, typename Group>
__device__ void add_within_warp(const Group& group, float (&sums)[kPacks][N]) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    if (offset < group.lanes()) break;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < N; ++i) sums[p][i] += __shfl_xor_sync(kFullMask, sums[p][i], offset);
    }
  }
}

// Writes a block's partial rows. `staged` is shared memory for 2 * blockDim.x * kPacks * N values
// that may still be in use; null partials are left out.
template <bool kBias, int kPacks, int N, typename Group>
__device__ void write_partials(const Group& group, float (&dweight)[kPacks][N],
                               float (&dbias)[kPacks][N], float* staged, int cols,
                               float* dweight_partial, float* dbias_partial) {
  float* const staged_bias = staged + group.threads() * kPacks * N;
  add_within_warp(group, dweight);
  if (kBias) add_within_warp(group, dbias);
  // One warp, or group of warps, after the other.
  const int groups_a_turn = max(1, kWarpSize / group.threads());
  const int turns = (group.groups() + groups_a_turn - 1) / groups_a_turn;
  for (int turn = 0; turn < turns; ++turn) {
    __syncthreads();
    if (group.index() != turn * groups_a_turn) continue;
    stage_sums(group, dweight, turn, staged);
    if (kBias) stage_sums(group, dbias, turn, staged_bias);
  }
  __syncthreads();
  const int threads = group.threads() * group.groups();
  for (int col = group.index() * group.threads() + group.thread(); col < cols; col += threads) {
    if (dweight_partial) dweight_partial[col] = staged[col];
    if (kBias && dbias_partial) dbias_partial[col] = staged_bias[col];
  }
}

// The column parameters of a block's threads in shared memory, as fp32. Thread t finds 4 columns of
// pack p at float4 index [kind][p][quarter][t], so that a warp's accesses are consecutive and free
// of bank conflicts.
enum ParamKind { kWeight, kShift, kScale };

template <int kPacks, int N>
class StagedParams {
 public:
  __device__ StagedParams(float* staged, int threads)
      : staged_(reinterpret_cast<float4*>(staged)), threads_(threads) {}

  template <bool kListed, typename In>
  __device__ void stage(const In& in, int p, int thread, int col) const {
    const auto params = ColumnParams<float, N>::template load<kListed>(in, col);
    put(kWeight, p, thread, params.weight);
    if (!in.from_output) return;
    put(kShift, p, thread, params.shift);
    put(kScale, p, thread, params.scale);
  }

  // The listed columns of a thread, a bit for each; pack p from bit p * N on.
  __device__ uint32_t listed(int thread, int first_col, int step, int cols) const {
    uint32_t bits = 0;
    for (int p = 0; p < kPacks; ++p) {
      float scale[N];
      get(kScale, p, thread, scale);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const bool inside = first_col + p * step + i < cols;
        bits |= static_cast<uint32_t>(inside && scale[i] == 0.0f) << (p * N + i);
      }
    }
    return bits;
  }

  __device__ __forceinline__ void get(ParamKind kind, int p, int thread, float (&out)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) memcpy(out + 4 * q, &at(kind, p, q, thread), sizeof(float4));
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

// Persistent blocks walk over the rows; each row group holds its row's packs, the next row's,
// and its columns' sums in registers. Column parameters are staged once in shared memory, as fp32.
template <bool kRegular, bool kRms, bool kListed, int kPacks, typename X, typename Y, typename S>
__device__ __forceinline__ void norm_backward_once(const BackwardInput<Y, S, float>& in,
                                                   const BackwardOutput<X, float>& out) {
  constexpr int N = 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
  using Sums = GradientSums<float, kRms>;
  __shared__ Sums slots[2][kMaxWarps];
  __shared__ Sums cluster_slots[2][kMaxClusterBlocks];
  extern __shared__ __align__(16) float staged[];

  RowGroup<Barrier::kNamed> group;
  RowCluster cluster;
  // Whether the row lies in the blocks of a cluster, this one's from slice_col on. Short rows never
  // do.
  const bool spread = kPacks * N >= 16 && cluster.blocks() > 1;
  const int blocks_per_row = spread ? cluster.blocks() : 1;
  const int step = group.threads() * N;
  const int slice_col = spread ? cluster.rank() * kPacks * step : 0;
  const int first_col = slice_col + group.thread() * N;
  const StagedParams<kPacks, N> params(staged, group.threads());
  for (int p = group.index(); p < kPacks; p += group.groups())
    params.template stage<kListed>(in, p, group.thread(), first_col + p * step);
  __syncthreads();
  static_assert(kPacks * N <= 32);
  const uint32_t listed = kListed ? params.listed(group.thread(), first_col, step, in.cols) : 0;

  float dweight[kPacks][N] = {}, dbias[kPacks][N] = {};
  const float per_cols = 1.0f / in.cols;
  typename RowReader<S, N, kRegular>::template Fetched<kPacks> saved;
  typename RowReader<Y, N, kRegular>::template Fetched<kPacks> dy;
  float mean = 0, rstd = 0;
  auto fetch = [&](int64_t row) {
    in.template open_saved<N, kRegular>(row, group).fetch(saved, first_col, step);
    in.template open_dy<N, kRegular>(row, group).fetch(dy, first_col, step);
    const bool in_range = row < in.rows;
    if (in.mean) mean = in_range ? __ldg(in.mean + row) : 0.0f;
    rstd = in_range ? __ldg(in.rstd + row) : 0.0f;
  };

  if (spread) cluster.arrive();
  const int64_t stride = int64_t{gridDim.x / blocks_per_row} * group.groups();
  int64_t first = int64_t{blockIdx.x / blocks_per_row} * group.groups();
  fetch(first + group.index());
  if (spread) cluster.wait();
  for (; first < in.rows; first += stride) {
    const int64_t row = first + group.index();
    Pack<S, N> row_saved[kPacks];
    Pack<Y, N> row_dy[kPacks];
    in.template open_saved<N, kRegular>(row, group).extract(saved, row_saved, first_col, step);
    in.template open_dy<N, kRegular>(row, group).extract(dy, row_dy, first_col, step);
    const float row_mean = mean, row_rstd = rstd;
    if (first + stride < in.rows) fetch(row + stride);

    // xhat and w = dy * weight of pack p. Cheaper to make twice than to keep.
    auto open_pack = [&](int p, float(&xhat)[N], float(&d)[N], float(&w)[N]) {
      unpack(row_saved[p], xhat);
      unpack(row_dy[p], d);
      float param[N];
      if (in.from_output) {
        params.get(kShift, p, group.thread(), param);
#pragma unroll
        for (int i = 0; i < N; ++i) xhat[i] -= param[i];
        params.get(kScale, p, group.thread(), param);
#pragma unroll
        for (int i = 0; i < N; ++i) xhat[i] *= param[i];
        if (kListed && (listed >> p * N & ((1u << N) - 1)) != 0 && row < in.rows) {
          params.get(kShift, p, group.thread(), param);
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if (listed >> (p * N + i) & 1) {
              xhat[i] = in.list.xhat(row, static_cast<int>(param[i]));
            }
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
          xhat[i] = kRms ? xhat[i] * row_rstd : (xhat[i] - row_mean) * row_rstd;
      }
      params.get(kWeight, p, group.thread(), param);
#pragma unroll
      for (int i = 0; i < N; ++i) w[i] = d[i] * param[i];
    };
    Sums sums{};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      float xhat[N], d[N], w[N];
      open_pack(p, xhat, d, w);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if constexpr (!kRms) sums.w += w[i];
        sums.wx += w[i] * xhat[i];
        dweight[p][i] += d[i] * xhat[i];
        dbias[p][i] += d[i];
      }
    }
    sums = group.reduce_warps(group.reduce_lanes(sums, Sums::merge), Sums{}, slots, Sums::merge);
    if (spread) sums = cluster.reduce(sums, cluster_slots, Sums::merge);
    if (out.dx == nullptr) continue;
    if constexpr (!kRms) sums.w *= per_cols;
    sums.wx *= per_cols;
    const auto writer = out.template open_dx<N, kRegular>(row, in.rows, in.cols, group);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      float xhat[N], d[N], w[N];
      open_pack(p, xhat, d, w);
#pragma unroll
      for (int i = 0; i < N; ++i) d[i] = gradient_of_x<kRms>(w[i], xhat[i], row_rstd, sums);
      Pack<X, N> dx;
      round_to(dx, d);
      writer.store(first_col + p * step, dx);
    }
  }
  launch_dependents();
  const int slice_cols = min(kPacks * step, in.cols - slice_col);
  const int64_t partial = int64_t{blockIdx.x / blocks_per_row} * in.cols + slice_col;
  auto at_slice = [&](float* partials) { return partials ? partials + partial : nullptr; };
  write_partials<!kRms>(group, dweight, dbias, staged, slice_cols, at_slice(out.dweight_partials),
                        at_slice(out.dbias_partials));
}

template <typename X, typename Y, typename S, bool kRms, bool kListed, int kPacks>
__global__ void __launch_bounds__(512, kPacks == 1 ? 2 : 1)
    norm_backward_registers(const __grid_constant__ BackwardInput<Y, S, float> in,
                            const __grid_constant__ BackwardOutput<X, float> out, bool regular) {
  if (regular) {
    norm_backward_once<true, kRms, kListed, kPacks>(in, out);
  } else {
    norm_backward_once<false, kRms, kListed, kPacks>(in, out);
  }
}

// Any length, first kernel: the sums of w and w * xhat of each row, as means[row] = {mean(w),
// mean(w * xhat)}.
template <typename Y, typename S, typename A, bool kListed>
__global__ void __launch_bounds__(512)
    norm_backward_row_means(const __grid_constant__ BackwardInput<Y, S, A> in, A* means) {
  constexpr int N = 16 / (sizeof(S) > sizeof(Y) ? sizeof(S) : sizeof(Y));
  constexpr int kPacks = sizeof(A) == 8 ? 1 : 2;
  using Sums = GradientSums<A, false>;
  __shared__ Sums slots[2][kMaxWarps];

  RowGroup<Barrier::kNamed> group;
  const int step = group.threads() * N;
  for (int64_t first = int64_t{blockIdx.x} * group.groups(); first < in.rows;
       first += int64_t{gridDim.x} * group.groups()) {
    const int64_t row = first + group.index();
    const bool in_range = row < in.rows;
    const A mean = in.mean && in_range ? in.mean[row] : A(0);
    const A rstd = in_range ? in.rstd[row] : A(0);
    const auto saved_row = in.template open_saved<N, false>(row, group);
    const auto dy_row = in.template open_dy<N, false>(row, group);
    Sums sums{};
    for (int base = 0; base < in.cols; base += kPacks * step) {
      const int col = base + group.thread() * N;
      Pack<S, N> saved[kPacks];
      Pack<Y, N> dy[kPacks];
      saved_row.load(saved, col, step);
      dy_row.load(dy, col, step);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const auto params = ColumnParams<A, N>::template load<kListed>(in, col + p * step);
        A xhat[N], d[N];
        unpack(saved[p], xhat);
        unpack(dy[p], d);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          xhat[i] = in.from_output ? (xhat[i] - params.shift[i]) * params.scale[i]
                                   : (xhat[i] - mean) * rstd;
        }
        if (kListed && in_range) params.take_listed(in.list, row, xhat);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const A w = d[i] * params.weight[i];
          sums.w += w;
          sums.wx += w * xhat[i];
        }
      }
    }
    sums = group.reduce_warps(group.reduce_lanes(sums, Sums::merge), Sums{}, slots, Sums::merge);
    if (in_range && group.thread() == 0) {
      means[2 * row] = sums.w / in.cols;
      means[2 * row + 1] = sums.wx / in.cols;
    }
  }
}

// Any length, second kernel: a thread owns one pack of columns and walks over every gridDim.y-th
// row.
template <typename X, typename Y, typename S, typename A, bool kListed>
__global__ void __launch_bounds__(128)
    norm_backward_columns(const __grid_constant__ BackwardInput<Y, S, A> in,
                          const __grid_constant__ BackwardOutput<X, A> out, const A* means,
                          bool rms) {
  constexpr int N = 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
  const RowGroup<Barrier::kBlock> group;
  const int col = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  const auto params = ColumnParams<A, N>::template load<kListed>(in, col);
  A dweight[N] = {}, dbias[N] = {};
  Pack<S, N> saved[1];
  Pack<Y, N> dy[1];
  auto fetch = [&](int64_t row) {
    in.template open_saved<N, false>(row, group).load(saved, col, 0);
    in.template open_dy<N, false>(row, group).load(dy, col, 0);
  };
  fetch(blockIdx.y);
  for (int64_t row = blockIdx.y; row < in.rows; row += gridDim.y) {
    A xhat[N], d[N];
    unpack(saved[0], xhat);
    unpack(dy[0], d);
    if (row + gridDim.y < in.rows) fetch(row + gridDim.y);
    const A mean = in.mean ? in.mean[row] : A(0);
    const A rstd = in.rstd[row];
    const GradientSums<A, false> row_means = {rms ? A(0) : means[2 * row], means[2 * row + 1]};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      xhat[i] =
          in.from_output ? (xhat[i] - params.shift[i]) * params.scale[i] : (xhat[i] - mean) * rstd;
    }
    if (kListed) params.take_listed(in.list, row, xhat);
    A gradient[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dweight[i] += d[i] * xhat[i];
      dbias[i] += d[i];
      gradient[i] = gradient_of_x<false>(d[i] * params.weight[i], xhat[i], rstd, row_means);
    }
    if (out.dx != nullptr) {
      Pack<X, N> dx;
      round_to(dx, gradient);
      out.template open_dx<N, false>(row, in.rows, in.cols, group).store(col, dx);
    }
  }
  const int64_t partial = int64_t{blockIdx.y} * in.cols;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (col + i >= in.cols) break;
    if (out.dweight_partials) out.dweight_partials[partial + col + i] = dweight[i];
    if (out.dbias_partials) out.dbias_partials[partial + col + i] = dbias[i];
  }
}

// Stage 2: out[c] = sum over p of partials[p][c], rounded once. blockIdx.y chooses dweight or
// dbias; a block takes 32 columns, and each of its warps every kSumWarps-th partial row. One more
// block in x looks at the parameters meanwhile. A column that is not recoverable and not listed
// gets NaN, its dbias too.
constexpr int kSumWarps = 32;

template <typename A>
struct PartialSums {
  const A* partials[2];
  void* out[2];
  DType dtype[2];
};

template <typename A>
__global__ void __launch_bounds__(kWarpSize* kSumWarps)
    sum_partials(const __grid_constant__ PartialSums<A> sums,
                 const __grid_constant__ ColumnLook<A> look, int rows) {
  __shared__ A of_warp[kSumWarps][kWarpSize];
  const int cols = look.cols;
  if (blockIdx.x * kWarpSize >= cols) {
    if (blockIdx.y == 0) look_at_columns(look);
    wait_for_prerequisites();
    return;
  }
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int col = blockIdx.x * kWarpSize + lane;
  const A* partials = sums.partials[blockIdx.y];
  A sum = 0;
  const bool spoiled = warp == 0 && col < cols && look.spoils(col);
  wait_for_prerequisites();
  if (col < cols) {
#pragma unroll 8
    for (int row = warp; row < rows; row += kSumWarps) sum += partials[int64_t{row} * cols + col];
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || col >= cols) return;
#pragma unroll
  for (int w = 1; w < kSumWarps; ++w) sum += of_warp[w][lane];
  if (spoiled) sum = static_cast<A>(NAN);
  void* out = sums.out[blockIdx.y];
  switch (sums.dtype[blockIdx.y]) {
    case DType::kFloat16:
      static_cast<__half*>(out)[col] = __float2half_rn(static_cast<float>(sum));
      return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(out)[col] = __float2bfloat16_rn(static_cast<float>(sum));
      return;
    case DType::kFloat32:
      static_cast<float*>(out)[col] = static_cast<float>(sum);
      return;
    case DType::kFloat64:
      static_cast<double*>(out)[col] = static_cast<double>(sum);
      return;
  }
}

}  // namespace fused_norm
