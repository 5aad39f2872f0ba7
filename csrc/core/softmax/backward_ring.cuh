// Backward for rows that a block's registers do not hold: they pass through shared memory, where
// they are read twice, once they are there for the sum, and for the gradient when that is known.
#pragma once

#include "core/common/cluster_parts.cuh"
#include "core/softmax/backward.cuh"
#include "core/softmax/span_ring.cuh"

namespace fused_norm {

// The sum over the warps that share a row, in the blocks of a cluster: of blocks and warps powers
// of two, by halved strides over warps and then over blocks. Warp w of block b being number
// w * blocks + b, the tree is that of their total number alone.
class SpanSums {
  using Parts = ClusterParts<float, kPortableClusterBlocks>;

 public:
  // In shared memory. Two sets are used in turn: nobody writes a row's sum before the block has
  // read those of the row before.
  struct Slots {
    float warps[2][kMaxWarps];
    Parts::Slots blocks;
  };
  // All threads of the block; a barrier of the cluster's follows.
  __device__ SpanSums(Slots& slots, const RowCluster& cluster)
      : slots_(slots), parts_(slots.blocks, cluster) {}

  // Of what the warps hold, each the same in all lanes; every thread gets the same.
  template <typename Group>
  __device__ __forceinline__ float total(Group& group, int turn, float of_warp) {
    float sum = group.reduce_warps(of_warp, 0.0f, slots_.warps, SumOf());
    const int blocks = parts_.blocks();
    if (blocks == 1) return sum;
    parts_.send(turn, sum);
    sum = parts_.wait(turn)[threadIdx.x & (blocks - 1)];
    for (int offset = blocks / 2; offset > 0; offset /= 2)
      sum += __shfl_xor_sync(kFullMask, sum, offset);
    return sum;
  }

 private:
  Slots& slots_;
  Parts parts_;
};

// Makes the elements of a lane's packs zero from `left` columns after its first one on.
template <typename T, int N>
__device__ __forceinline__ void clear_from(Pack<T, N> (&packs)[kPiecePacks], int left) {
#pragma unroll
  for (int p = 0; p < kPiecePacks; ++p) {
    const int kept = left - p * kWarpSize * N;
    if (kept < N) packs[p].words = spliced<T>(packs[p].words, Words<kGranule>{}, kept);
  }
}

// Persistent clusters walk over the rows. Each warp adds up its span of a row as the pieces come,
// and writes its gradient when the row's sum is known, which makes room for the next row's pieces.
template <bool kRegular, bool kLog, typename Y>
__device__ __forceinline__ void softmax_backward_spans(const GradientLoad<Y>& load,
                                                       const BoundaryStore<Y>& store, int pieces,
                                                       int slots, SpanSums::Slots& sum_slots) {
  constexpr int N = kGranule / sizeof(Y);
  constexpr int kPieceCols = kPieceGranules * N;
  using Ring = SpanRing<Y, kRegular>;
  extern __shared__ __align__(128) char ring_bytes[];

  RowGroup<Barrier::kBlock, true> group;
  RowCluster cluster;
  const int blocks = cluster.blocks(), warp = threadIdx.x / kWarpSize;
  const int span = warp * blocks + cluster.rank(), first_col = span * pieces * kPieceCols;
  const int cols = load.dy.cols, stride = gridDim.x / blocks;
  int64_t row = blockIdx.x / blocks;
  Ring ring(ring_bytes + warp * span_ring_bytes(pieces, slots), load.dy, load.y, first_col, row,
            stride, pieces, slots);
  SpanSums sums(sum_slots, cluster);
  cluster.arrive();  // nobody sends to a block that has not begun
  __syncthreads();
  cluster.wait();
  ring.start();

  typename Ring::Cursor oldest;
  for (int turn = 0; row < load.dy.rows; ++turn, row += stride) {
    const int shifts[2] = {ring.shift(0, row), ring.shift(1, row)};
    typename Ring::Cursor cursor = oldest;
    Accumulator<Y> of_lane[N] = {};
    for (int k = 0; k < pieces; ++k) {
      const auto piece = ring.wait(k, turn, cursor);
      const int first = first_col + k * kPieceCols;
      if (first >= cols) continue;
      Pack<Y, N> dy[kPiecePacks], y[kPiecePacks];
      Ring::read(piece, 0, shifts[0], dy);
      if (!kLog) Ring::read(piece, 1, shifts[1], y);
      if (cols - first < kPieceCols) {
        const int left = cols - first - group.lane() * N;
        clear_from(dy, left);
        if (!kLog) clear_from(y, left);
      }
      Accumulator<Y> added[N];
      gradient_sums<kLog>(dy, y, added);
#pragma unroll
      for (int i = 0; i < N; ++i) of_lane[i] += added[i];
    }
    const auto sum = sums.total(group, turn, group.reduce_lanes(sum_of(of_lane), SumOf()));

    // Packs begin at the pack boundaries of dx, `head` columns late. So the span's last one ends in
    // the next span's columns, and those of the row's start are left over.
    const int head = kRegular ? 0 : store.template first_boundary<N>(row);
    const int offsets[2] = {shifts[0] + head * static_cast<int>(sizeof(Y)),
                            shifts[1] + head * static_cast<int>(sizeof(Y))};
    cursor = oldest;
    for (int k = 0; k < pieces; ++k) {
      const auto piece = ring.wait(k, turn, cursor);
      const int first = first_col + k * kPieceCols;
      Pack<Y, N> dy[kPiecePacks], y[kPiecePacks];
      if (first < cols) {
        if (!kRegular && first == 0 && group.lane() < head) {
          Accumulator<Y> dx[1];
          gradient<kLog>(Ring::read_element(piece, 0, shifts[0], group.lane()),
                         Ring::read_element(piece, 1, shifts[1], group.lane()), sum, load.scale,
                         dx);
          store.template put<kRegular>(row, group.lane(), dx);
        }
        Ring::read(piece, 0, offsets[0], dy);
        Ring::read(piece, 1, offsets[1], y);
      }
#pragma unroll
      for (int p = 0; p < kPiecePacks; ++p) {
        if (first >= cols) break;
        Accumulator<Y> dx[N];
        gradient<kLog>(dy[p], y[p], sum, load.scale, dx);
        store.template put<kRegular>(row, first + head + (p * kWarpSize + group.lane()) * N, dx);
      }
      // Only now: reads from shared memory wait behind stores, which copies into it do not.
      ring.release();
    }
    oldest = cursor;
  }
}

template <typename Y>
__global__ void __launch_bounds__(kMaxSpanWarps* kWarpSize, 1)
    softmax_backward_ring(const __grid_constant__ GradientLoad<Y> load,
                          const __grid_constant__ BoundaryStore<Y> store, bool regular, bool log,
                          int pieces, int slots) {
#if __CUDA_ARCH__ >= 900
  __shared__ SpanSums::Slots sum_slots;
  with_form<true>(regular, log, [&](auto is_regular, auto is_log) {
    softmax_backward_spans<decltype(is_regular)::value, decltype(is_log)::value>(
        load, store, pieces, slots, sum_slots);
  });
#endif
}

}  // namespace fused_norm
