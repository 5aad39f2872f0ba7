// Backward for long rows: they pass through a ring in shared memory, where they are read twice, and
// nobody waits for a row's sums, which are used one row late.
#pragma once

#include "core/common/cluster_parts.cuh"
#include "core/common/overlap.cuh"
#include "core/norm/ring_slice.cuh"
#include "core/norm/row_ring.cuh"

namespace fused_norm {

// A row's sums over a block, or over the blocks of a cluster, in steps between which other work
// fits. Two sets of slots are used in turn. The tree depends on the number of threads and blocks
// alone.
template <bool kRms>
class LateSums {
 public:
  using Sums = GradientSums<float, kRms>;
  using Parts = ClusterParts<Sums, kMaxClusterBlocks>;
  struct Slots {  // in shared memory
    alignas(16) float of_warp[2][kRms ? 1 : 2][kWarpSize];
    typename Parts::Slots of_blocks;
  };
  // All threads of the block; a barrier of the cluster's follows.
  __device__ LateSums(Slots& slots, const RowCluster& cluster)
      : slots_(slots), parts_(slots.of_blocks, cluster) {
    float* const all = &slots.of_warp[0][0][0];
    constexpr int kAll = sizeof(slots.of_warp) / sizeof(float);
    for (int i = threadIdx.x; i < kAll; i += blockDim.x) all[i] = 0;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const bool upper = !kRms && lane >= kHalf;
    put_ = lane % (kRms ? kWarpSize : kHalf) == 0 ? upper * kWarpSize + warp : -1;
    get_ = upper * kWarpSize + lane % (kWarpSize / 4) * 4;
    keep(get_);
  }

  // What the threads hold of row `turn`. In LayerNorm one half of a warp's lanes adds up w, the
  // other w * xhat. A barrier of the block's follows.
  __device__ __forceinline__ void put(int turn, const Sums& sums) {
    float sum;
    if constexpr (kRms) {
      sum = lane_sum<kWarpSize>(sums.wx);
    } else {
      const float other = __shfl_xor_sync(kFullMask, upper() ? sums.w : sums.wx, kHalf);
      sum = lane_sum<kHalf>((upper() ? sums.wx : sums.w) + other);
    }
    if (put_ >= 0) of_warp(turn)[put_] = sum;
  }

  // Sends the block's sums to all blocks of the cluster, if there are several.
  __device__ __forceinline__ void share(int turn) {
    if (parts_.blocks() > 1 && threadIdx.x < kWarpSize) parts_.send(turn, of_block(turn));
  }

  // The row's sums, in all threads the same.
  __device__ __forceinline__ Sums total(int turn) const {
    if (parts_.blocks() == 1) return of_block(turn);
    const Sums* const parts = parts_.wait(turn);
    Sums sum = parts[0];
#pragma unroll 1
    for (int b = 1; b < parts_.blocks(); ++b) sum = Sums::merge(sum, parts[b]);
    return sum;
  }

 private:
  static constexpr int kHalf = kWarpSize / 2;
  __device__ __forceinline__ bool upper() const { return !kRms && (get_ & kWarpSize); }
  __device__ __forceinline__ float* of_warp(int turn) const {
    return &slots_.of_warp[turn & 1][0][0];
  }

  __device__ __forceinline__ Sums of_block(int turn) const {
    const float4 four = *reinterpret_cast<const float4*>(of_warp(turn) + get_);
    const float sum = lane_sum<kWarpSize / 4>((four.x + four.y) + (four.z + four.w));
    if constexpr (kRms) {
      return {sum};
    } else {
      const float other = __shfl_xor_sync(kFullMask, sum, kHalf);
      return {upper() ? other : sum, upper() ? sum : other};
    }
  }

  Slots& slots_;
  Parts parts_;
  int put_, get_;  // where this thread puts its warp's sum, if it does, and what it reads first
};

// A block's shared memory beside the staged parameters and the ring.
template <bool kRms>
struct RingShared {
  RingStages stages;
  typename LateSums<kRms>::Slots slots;
  float2 statistics[4];  // mean and rstd of the row before, the one at hand, and the next
};

// The rows of a block: turn t's is first + t * stride. Partial row s has the sums of so many in
// sequence, as far as there are any.
struct RingRows {
  int64_t first, stride;
  int rounds, partial_sets, in_sequence;

  __device__ __forceinline__ int64_t at(int turn) const { return first + turn * stride; }
  __device__ __forceinline__ int end_of_set(int end) const {
    return static_cast<int>(min(int64_t{rounds}, int64_t{end} + in_sequence));
  }
};

// The rows' statistics, which one thread reads two rows ahead.
struct StatisticsAhead {
  const float* mean;  // null: 0
  const float* rstd;
  float2 (&shared)[4];
  float2 next = {};

  __device__ __forceinline__ void read(const RingRows& rows, int turn) {
    if (turn >= rows.rounds) return;
    const int64_t row = rows.at(turn);
    next = {mean != nullptr ? __ldg(mean + row) : 0.0f, __ldg(rstd + row)};
  }
  __device__ __forceinline__ void put(int turn) { shared[turn & 3] = next; }
};

// The turns of the threads that have columns. In each they add up a row, write the dx of the row
// before, and meet at one barrier; then one thread fills the stage of the row before with one yet
// to come.
template <typename Slice, bool kRms, typename Ring>
__device__ __forceinline__ void norm_backward_turns(Slice& slice, const RingRows& rows, Ring& ring,
                                                    int stages, bool fills, LateSums<kRms>& sums,
                                                    StatisticsAhead& statistics) {
  int turn = 0;
  RingStage stage, stage_before;
  auto row_at = [&](int turn, const RingStage& stage) {
    const auto [mean, rstd] = statistics.shared[turn & 3];
    return typename Slice::Row{turn, ring.first(stage), ring.second(stage), mean, rstd};
  };
  auto write_row_before = [&] {
    const auto of_row = sums.total(turn - 1);
    slice.write_dx(row_at(turn - 1, stage_before), of_row);
  };
  int end = 0;
  for (int set = 0; set < rows.partial_sets; ++set) {
    end = rows.end_of_set(end);
    for (; turn < end; ++turn) {
      slice.prefetch_residual(rows.at(turn));
      if (threadIdx.x == 0) {
        statistics.put(turn + 1);
        statistics.read(rows, turn + 2);
      }
      ring.wait(stage);
      sums.put(turn, slice.add_up(row_at(turn, stage)));
      if (turn > 0) write_row_before();
      slice.next_row(rows.stride, rows.rounds - turn - 1);
      __syncthreads();
      sums.share(turn);
      if (fills && turn > 0 && turn + stages - 1 < rows.rounds)
        ring.fill(stage_before, rows.at(turn + stages - 1));
      stage_before = stage;
      stage = ring.after(stage);
    }
    if (turn == rows.rounds) launch_dependents();
    slice.write_partials(rows.at(set));
  }
  write_row_before();
}

// Persistent blocks walk over the rows, or over their part of the rows as blocks of a cluster.
template <RowsLie kLie, bool kRms, bool kFromOutput, typename X, typename Y, typename S>
__device__ __forceinline__ void norm_backward_late(const BackwardInput<Y, S, float>& in,
                                                   const BackwardOutput<X, float>& out, int stages,
                                                   int partial_sets, int rows_in_sequence,
                                                   RingShared<kRms>& shared) {
  using Slice = RingSlice<kLie, kRms, kFromOutput, X, Y, S>;
  constexpr int N = Slice::N, kCols = Slice::kPacks * N;
  constexpr int kKinds = Slice::Params::kKinds;
  static_assert(kKinds == ring_params(kFromOutput));
  extern __shared__ __align__(128) float staged[];

  const int threads = blockDim.x, thread = threadIdx.x;
  const RowCluster cluster;
  const int blocks = cluster.blocks();
  const int block_first = cluster.rank() * threads * kCols;
  const int block_cols = max(0, min(threads * kCols, in.cols - block_first));
  const int lane = thread % kWarpSize;
  const int own = (thread - lane) * kCols + lane * unit_of(kLie, N);
  const int64_t stride = gridDim.x / blocks, first = blockIdx.x / blocks;
  const RingRows rows{first, stride, static_cast<int>((in.rows - first + stride - 1) / stride),
                      partial_sets, rows_in_sequence};

  wait_for_prerequisites();
  // All that is read but once is asked for before the rows, or it would queue up behind them.
  const typename Slice::Asked asked(in, block_first + own);
  if constexpr (kFromOutput) in.list.prefetch(first);
  auto tensor = [&](auto* base, const RowLayout& layout) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(base)>>;
    const T* const end = row_start(base, layout, in.rows - 1) + in.cols;
    return RingTensor<T>{base + block_first, layout, block_cols,
                         reinterpret_cast<const char*>(end)};
  };
  RowRing<S, Y, Slice::kRegular && N * sizeof(S) == 16, Slice::kRegular && N * sizeof(Y) == 16>
      ring(reinterpret_cast<char*>(staged + kKinds * threads * kCols), shared.stages,
           tensor(in.saved, in.saved_layout), tensor(in.dy, in.dy_layout), stages);
  const bool fills = thread == threads - kWarpSize;  // in the warp with the fewest columns
  if (fills) {
    ring.init();
    RingStage stage;
    for (int s = 0; s < stages && s < rows.rounds; ++s, stage = ring.after(stage))
      ring.fill(stage, rows.at(s));
  }
  LateSums<kRms> sums(shared.slots, cluster);
  Slice slice(in, out, typename Slice::Params(staged, thread), asked, own, block_cols, block_first,
              first, stride);
  const bool reads_mean = !kFromOutput && !kRms && !(kForBothNorms<X, Y> && in.rms);
  StatisticsAhead statistics{reads_mean ? in.mean : nullptr, in.rstd, shared.statistics};
  if (thread == 0) {
    statistics.read(rows, 0);
    statistics.put(0);
    statistics.read(rows, 1);
  }
  cluster.arrive();  // nobody sends to a block that has not begun
  __syncthreads();
  cluster.wait();
  norm_backward_turns<Slice, kRms>(slice, rows, ring, stages, fills, sums, statistics);
}

template <typename X, typename Y, typename S, bool kRms, bool kFromOutput>
__global__ void __launch_bounds__(ring_threads(kFromOutput), 1)
    norm_backward_ring(const __grid_constant__ BackwardInput<Y, S, float> in,
                       const __grid_constant__ BackwardOutput<X, float> out, int stages,
                       int partial_sets, int rows_in_sequence) {
#if __CUDA_ARCH__ >= 900
  __shared__ RingShared<kRms> shared;
  constexpr int N = kPackElements<X, Y>;
  auto run = [&](auto lie) {
    norm_backward_late<decltype(lie)::value, kRms, kFromOutput>(in, out, stages, partial_sets,
                                                                rows_in_sequence, shared);
  };
  if (in.cols % N == 0) {
    run(std::integral_constant<RowsLie, RowsLie::kRegular>());
  } else {
    run(std::integral_constant<RowsLie, RowsLie::kElements>());
  }
#else
  __trap();  // no plan asks for it
#endif
}

}  // namespace fused_norm
