// Forward kernels: statistics of a row, then the normalized row.
#pragma once

#include "core/common/branch.cuh"
#include "core/common/overlap.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/norm/columns.cuh"
#include "core/norm/policies.cuh"

namespace fused_norm {

// Where the statistics go; mean is null for RMSNorm. kExact: for an fp32 output.
template <typename A, bool kExact>
struct StatisticsOut {
  A* mean;
  A* rstd;
  A eps, cols, per_cols;
  SideOut<A> listed;

  __device__ __forceinline__ auto rstd_of(A squares) const {
    return reciprocal_root_mean<kExact>(squares, cols, per_cols, eps);
  }
  __device__ __forceinline__ void write(int64_t row, A row_mean, A row_rstd, bool rms) const {
    if (!rms) mean[row] = row_mean;
    rstd[row] = row_rstd;
  }
};

template <typename Load, typename Store>
using StatisticsOf =
    StatisticsOut<Accumulator<typename Load::Input>, std::is_same_v<typename Store::Output, float>>;

// How many values of a row a thread holds as fp32. Rows that are not regular need registers to be
// put together.
constexpr int held_values(RowsLie lie) {
  return lie == RowsLie::kRegular ? 32 : lie == RowsLie::kPairs ? 24 : 16;
}

template <typename A>
struct ClusterSlots {
  PartStatistics<A> cluster_slots[2][kPortableClusterBlocks];
};
struct NoClusterSlots {};
template <typename X, int kPacks>
struct ForwardShared
    : std::conditional_t<kPacks == kMostPacks, ClusterSlots<Accumulator<X>>, NoClusterSlots> {
  SumSlots<X> slots;
};

// Weight and (kBias) bias of a thread's columns. Where rows are regular and all parameters of the
// input's type, they come to shared memory along with the row (dynamic: params_bytes() for
// each thread): asked for only when the statistics are known, each row would wait for them. Else,
// or where a thread has so many that few blocks would be resident, they are read then. (Blocks that
// walk over rows have them anyway.)
constexpr bool params_ahead(int packs) { return packs != kMostPacks; }

template <typename Form, bool kBias, int N, int kPacks, typename Load, typename Store,
          bool kWalks = false>
class ParamsAhead {
  using X = typename Load::Input;
  static constexpr bool kTyped =
      Form::kLie == RowsLie::kRegular && std::is_same_v<typename Form::Param, X>;
  static constexpr bool kAhead = kTyped && (kWalks || params_ahead(kPacks));

 public:
  // Whether the value of a listed column comes likewise, kListedBytes each.
  static constexpr bool kListed = kTyped && !kWalks && std::is_same_v<Load, InputLoad<X>>;

  template <typename Group>
  __device__ ParamsAhead(const Store& store, int col, const Group& group)
      : store_(store), col_(col), threads_(group.threads() * group.groups()) {
    extern __shared__ __align__(128) char ahead[];
    own_ = reinterpret_cast<AlignedPack<X, N>*>(ahead) + group.index() * group.threads() +
           group.thread();
  }

  template <typename Group, typename Bounds>
  __device__ __forceinline__ void fetch(const Group& group, const Bounds& bounds) {
    if constexpr (kAhead) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (!bounds.reach(p)) break;
        const int col = col_ + p * slice_step<N>(group);
        constexpr int kBytes = sizeof(X) * N;
        copy_async<kBytes>(at(0, p), static_cast<const X*>(store_.weight.data) + col);
        if (kBias) copy_async<kBytes>(at(1, p), static_cast<const X*>(store_.bias.data) + col);
      }
      commit_copies();
    }
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (kAhead || kListed) wait_for_copies<0>();
  }
  // Whether the list is there when the block begins. The blocks resident first would wait for it:
  // they read it last, and their values once more.
  __device__ __forceinline__ static bool list_is_ready() {
    constexpr int kResident = forward_threads(Load::kAdds, kPacks) * forward_blocks(Load::kAdds);
    uint32_t multiprocessors;
    asm("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
    return blockIdx.x >= kResident * multiprocessors / (blockDim.x * blockDim.y);
  }
  __device__ __forceinline__ static bool has_listed_word() {
    return static_cast<int>(threadIdx.x) < listed_ahead(kPacks, blockDim.x);
  }
  // Asks for the value of a row's column, which lies at `at`; and gives it, when it is there.
  __device__ __forceinline__ static void fetch_listed(const X* at) {
    const uintptr_t word = reinterpret_cast<uintptr_t>(at) / kListedBytes * kListedBytes;
    copy_async<kListedBytes>(listed(), reinterpret_cast<const void*>(word));
    commit_copies();
  }
  __device__ __forceinline__ static Accumulator<X> take_listed(int col) {
    return static_cast<Accumulator<X>>(listed()[col % (kListedBytes / sizeof(X))]);
  }
  template <typename Group, typename A>
  __device__ __forceinline__ void get(int p, const Group& group, A (&g)[N], A (&b)[N]) const {
    if constexpr (kAhead) {
      unpack(at(0, p)->pack, g);
      if (kBias) unpack(at(1, p)->pack, b);
    } else {
      store_.template load<Form, kBias>(col_ + p * slice_step<N>(group), group, g, b);
    }
  }

 private:
  __device__ __forceinline__ AlignedPack<X, N>* at(int vector, int p) const {
    return own_ + (vector * kPacks + p) * threads_;
  }
  // The word that holds the thread's listed value.
  __device__ __forceinline__ static X* listed() {
    extern __shared__ __align__(128) char ahead[];
    const int before = kAhead ? blockDim.x * blockDim.y * params_bytes(kPacks, kBias) : 0;
    const int word = threadIdx.y * listed_ahead(kPacks, blockDim.x) + threadIdx.x;
    return reinterpret_cast<X*>(ahead + before + word * kListedBytes);
  }

  const Store& store_;
  int col_, threads_;
  AlignedPack<X, N>* own_;
};

// Writes a thread's columns of y, of centred values. finish(p, xhat) has a pack before the weight.
template <bool kBias, RowsLie kLie, typename T, int N, int kPacks, bool kPacked, typename Group,
          typename Bounds, typename Rstd, typename Params, typename Store, typename Finish>
__device__ __forceinline__ void write_normalized(const SliceValues<T, N, kPacks, kPacked>& values,
                                                 const Group& group, const Bounds& bounds,
                                                 const Rstd& rstd, const Params& params,
                                                 const Store& store, int64_t row, int col, int left,
                                                 Finish finish) {
  const WriterOf<typename Store::Output, N, kLie> writer{store.y + row * store.cols + col, left};
  params.wait();
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!bounds.reach(p)) break;
    Accumulator<T> x[N], g[N], b[N];
    params.get(p, group, g, b);
    values.get(p, bounds, x);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = rstd.times(x[i]);
    finish(p, x);
    writer.store(p, store.template apply<kBias>(x, g, b), group);
  }
}

// The end of norm_forward_once() where a thread may have listed columns, of kCols columns a thread:
// `listed`, whose value came ahead, or else it looks at its places. A function that finds out anew
// where it is, so that it takes no registers before. Where no value comes ahead (Params is void),
// each group has written its row's statistics.
template <int kCols, bool kMaySpread, typename Params, typename Load, typename Statistics,
          typename A>
__device__ __noinline__ void keep_listed(const Load& load, const Statistics& out, int listed,
                                         A mean, A rstd) {
  const RowCluster cluster;
  const int blocks = kMaySpread ? cluster.blocks() : 1, rank = kMaySpread ? cluster.rank() : 0;
  const int part_cols = static_cast<int>(blockDim.x) * kCols, first = rank * part_cols;
  const int64_t row = int64_t{blockIdx.x / blocks} * blockDim.y + threadIdx.y;
  if constexpr (!std::is_void_v<Params>) {
    if (listed >= 0)
      return out.listed.keep(row, threadIdx.x, Params::take_listed(listed), mean, rstd);
  }
  const int places = out.listed.places();
  if (places == 0) return;
  if (std::is_void_v<Params>) __syncthreads();
  if (row >= load.rows) return;
  if (std::is_void_v<Params>) {
    mean = out.mean == nullptr ? A(0) : out.mean[row];
    rstd = out.rstd[row];
  }
  out.listed.keep_all(load, row, threadIdx.x, places, first, part_cols, mean, rstd);
}

// Rows of up to kPacks packs a thread, or such parts of rows in the blocks of a cluster: read once.
// A group of threads takes one row and is done; that the others of its multiprocessor are at other
// rows, and other blocks follow, keeps the memory busy.
//
// rms: whether this is RMSNorm, as a constant for all rows but those whose code is long and seldom
// runs.
template <typename Form, int kPacks, bool kWholeWarps, typename Rms, typename Load, typename Store>
__device__ __forceinline__ void norm_forward_once(
    Rms rms, const Load& load, const Store& store, const StatisticsOf<Load, Store>& out,
    ForwardShared<typename Load::Input, kPacks>& shared) {
  constexpr RowsLie kLie = Form::kLie;
  using X = typename Load::Input;
  using A = Accumulator<X>;
  constexpr int N = kPackElements<X, typename Store::Output>;
  constexpr bool kBias = !std::is_same_v<Rms, std::true_type>;
  // Values that may be centred about the mean of a block's part of the row first, and then about
  // the row's, must not be rounded twice.
  constexpr bool kTwice = kBias && !kCorrectsMean<X> && kPacks == kMostPacks;
  constexpr bool kPacked = kTwice || kPacks * N > held_values(kLie);

  const RowGroup<kWholeWarps> group;
  RowCluster cluster;
  const bool spread = kPacks == kMostPacks && cluster.blocks() > 1;
  const int blocks_per_row = spread ? cluster.blocks() : 1;
  const int part_cols = group.threads() * kPacks * N;
  const int part_first = spread ? cluster.rank() * part_cols : 0;
  const int col = part_first + slice_column<N, kPacks, kLie>(group);
  const int64_t row = int64_t{blockIdx.x / blocks_per_row} * group.groups() + group.index();
  const int left = row < load.rows ? load.cols - col : 0;
  const SliceBounds<N, kLie, decltype(group)> bounds(group, left);
  if (spread) cluster.arrive();
  out.listed.meet_previous_kernel();

  typename Load::template Slice<N, kLie, kPacks> from(load, row, col);
  SliceValues<X, N, kPacks, kPacked> values;
  int first_param = 0;
  if constexpr (Load::kGates) first_param = load.first_param(row);
  ParamsAhead<Form, kBias, N, kPacks, Load, Store> params(store, first_param + col, group);
  from.fetch(group);
  params.fetch(group, bounds);
  constexpr bool kListed = decltype(params)::kListed;
  int listed = out.listed.kLater;  // the thread's listed column, whose value comes ahead
  if constexpr (kListed) {
    if (out.listed.room > 0 && row < load.rows && params.list_is_ready()) {
      const int cols = min(part_cols, load.cols - part_first);
      listed = out.listed.only_column(part_first, cols);
      if (listed >= 0 && !params.has_listed_word()) listed = out.listed.kLater;
      if (listed >= 0) params.fetch_listed(from.at(listed - col));
    }
  }
  from.extract(group, [&](int p, const Pack<X, N>& pack) { values.put(p, pack); });

  const A own_cols = static_cast<A>(spread ? min(part_cols, load.cols - part_first) : load.cols);
  const A per_own = spread ? reciprocal(own_cols) : out.per_cols;
  const auto statistics = with_flag(rms, [&](auto is_rms) {
    constexpr bool kRms = decltype(is_rms)::value;
    auto part = part_statistics<kRms>(group, values, bounds, own_cols, per_own, shared.slots);
    if constexpr (kPacks == kMostPacks) {
      if (!spread) return part;
      cluster.wait();
      part = merge_parts<kRms>(cluster.gather(part, shared.cluster_slots), blocks_per_row,
                               part_cols, load.cols, out.per_cols);
    }
    return part;
  });
  if (!rms && (kCorrectsMean<X> || spread)) values.centre(statistics.mean, bounds);
  if (kLie != RowsLie::kRegular) values.forget();
  const auto rstd = out.rstd_of(statistics.squares);
  if (group.thread() == 0 && (part_first == 0 || out.listed.room > 0) && row < load.rows)
    out.write(row, statistics.mean, rstd.nearest(), rms);

  write_normalized<kBias, kLie>(values, group, bounds, rstd, params, store, row, col, left,
                                [&](int p, auto& xhat) {
                                  if constexpr (Load::kGates) from.finish(p, xhat);
                                });
  if constexpr (!Load::kGates) {
    if (out.listed.room > 0 && listed != out.listed.kNone)
      keep_listed<kPacks * N, kPacks == kMostPacks,
                  std::conditional_t<kListed, decltype(params), void>>(
          load, out, listed, kListed ? statistics.mean : A(0), kListed ? rstd.nearest() : A(0));
  }
}

// kWholeWarps: else rows have less than a warp's lanes. `typed`: of rows that are dealt out,
// whether all parameters are of their type and the kernel has code for that.
template <typename Load, typename Store, int kPacks, bool kWholeWarps>
__global__ void __launch_bounds__(forward_threads(Load::kAdds, kPacks), forward_blocks(Load::kAdds))
    norm_forward_registers(const __grid_constant__ Load load, const __grid_constant__ Store store,
                           const __grid_constant__ StatisticsOf<Load, Store> out, RowsLie lie,
                           bool typed) {
  using X = typename Load::Input;
  __shared__ ForwardShared<X, kPacks> shared;
  constexpr bool kTypes = deals_out_typed(Load::kAdds, std::is_same_v<X, typename Store::Output>,
                                          kPacks, kWholeWarps, sizeof(X));
  auto run = [&](auto form, auto rms) {
    norm_forward_once<decltype(form), kPacks, kWholeWarps>(rms, load, store, out, shared);
  };
  std::conditional_t<Load::kGates, std::true_type, bool> rms{};  // a gate is RMSNorm's
  if constexpr (!Load::kGates) rms = out.mean == nullptr;
  if (dealt_out(lie) && !typed) return run(RowForm<RowsLie::kElements, X, void>(), rms);
  with_flag(rms, [&](auto is_rms) {
    store.template with_form<X, !decltype(is_rms)::value, kTypes>(
        lie, [&](auto form) { run(form, is_rms); });
  });
}

}  // namespace fused_norm
