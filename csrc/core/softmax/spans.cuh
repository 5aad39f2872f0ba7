// Rows that a block's registers do not hold pass through shared memory, where they are read twice:
// once they are there for the row's sum, and for the result when that is known. What is summed and
// what results: forward_ring.cuh, backward_ring.cuh.
#pragma once

#include "core/common/cluster_parts.cuh"
#include "core/softmax/row.cuh"
#include "core/softmax/span_ring.cuh"

namespace fused_norm {

// The sum over the warps that share a row, in the blocks of a cluster: of blocks and warps powers
// of two, by halved strides over warps and then over blocks. Warp w of block b being number
// w * blocks + b, the tree is that of their total number alone.
template <typename V>
class SpanSums {
  using Parts = ClusterParts<V, kPortableClusterBlocks>;

 public:
  // In shared memory. Two sets are used in turn: nobody writes a row's sum before the block has
  // read those of the row before.
  struct Slots {
    V warps[2][kMaxWarps];
    typename Parts::Slots blocks;
  };
  // All threads of the block; a barrier of the cluster's follows.
  __device__ SpanSums(Slots& slots, const RowCluster& cluster)
      : slots_(slots), parts_(slots.blocks, cluster) {}

  // Of what the warps hold, each the same in all lanes; every thread gets the same.
  template <typename Group, typename Combine>
  __device__ __forceinline__ V total(Group& group, int turn, const V& of_warp, Combine combine) {
    const V sum = group.reduce_warps(of_warp, V(), slots_.warps, combine);
    const int blocks = parts_.blocks();
    if (blocks == 1) return sum;
    parts_.send(turn, sum);
    return group.reduce_over(parts_.wait(turn)[threadIdx.x & (blocks - 1)], blocks, combine);
  }

 private:
  Slots& slots_;
  Parts parts_;
};

// A pack whose elements from the `kept`-th on are the filler.
template <Filler kFiller, typename T, int N>
__device__ __forceinline__ Pack<T, N> filled_from(const Pack<T, N>& pack, int kept) {
  if (kept >= N) return pack;
  Words<kGranule> filler;
#pragma unroll
  for (int i = 0; i < kGranule / 4; ++i) filler.at[i] = filler_word<T, kFiller>();
  return {spliced<T>(pack.words, filler, kept)};
}

// A warp's columns of a row, and in how many pieces they come.
struct Span {
  int first, end, pieces;
};

// A Form has kTensors tensors of Element, the first kSummed of which are in the sum. A lane adds
// packs to its Part; the parts' Sums, combined, are the row's, and results_of() that turns packs
// into results.

// A lane's part of the sum of a span, whose pieces it waits for.
template <typename Form, typename Ring>
__device__ __forceinline__ auto part_of(const Span& span, const Ring& ring, RingSlot cursor,
                                        int turn, const int (&shifts)[Form::kTensors]) {
  using T = typename Form::Element;
  constexpr int kTensors = Form::kTensors, N = Form::N, kStep = kWarpSize * N;
  const int lane = threadIdx.x % kWarpSize;
  typename Form::Part part;
  for (int k = 0; k < span.pieces; ++k) {
    const auto piece = ring.wait(k, turn, cursor);
    const int left = span.end - (span.first + k * Ring::kPieceCols);
    if (left <= 0) continue;
    Pack<T, N> packs[kTensors][Ring::kPiecePacks];
#pragma unroll
    for (int t = 0; t < Form::kSummed; ++t) Ring::read(piece, t, shifts[t], packs[t]);
    if (left >= Ring::kPieceCols) {
      part.add(packs);
      continue;
    }
#pragma unroll
    for (int p = 0; p < Ring::kPiecePacks; ++p) {
      if (p * kStep >= left) break;
      Pack<T, N> one[kTensors][1];
#pragma unroll
      for (int t = 0; t < Form::kSummed; ++t)
        one[t][0] = filled_from<Form::kFiller>(packs[t][p], left - p * kStep - lane * N);
      part.add(one);
    }
  }
  return part;
}

// Writes the results of a span, piece by piece, each of which makes room for one of the next row.
// Packs begin at the pack boundaries of the results, `head` columns late. So the span's last one
// ends in the next span's columns, and those of the row's start are left over.
template <bool kRegular, typename Form, typename Ring, typename Results, typename Store>
__device__ __forceinline__ void write_span(const Span& span, Ring& ring, RingSlot& cursor, int turn,
                                           const int (&shifts)[Form::kTensors],
                                           const Results& results_of, const Store& store,
                                           int64_t row) {
  using T = typename Form::Element;
  constexpr int kTensors = Form::kTensors, N = Form::N, kStep = kWarpSize * N;
  const int head = kRegular ? 0 : store.template first_boundary<N>(row);
  const int head_bytes = head * static_cast<int>(sizeof(T)), lane = threadIdx.x % kWarpSize;
  for (int k = 0; k < span.pieces; ++k) {
    const auto piece = ring.wait(k, turn, cursor);
    const int first = span.first + k * Ring::kPieceCols;
    Pack<T, N> packs[kTensors][Ring::kPiecePacks];
    if (first < span.end) {
      if (!kRegular && first == 0 && lane < head) {
        Pack<T, 1> element[kTensors][1];
#pragma unroll
        for (int t = 0; t < kTensors; ++t)
          element[t][0] = Ring::read_element(piece, t, shifts[t], lane);
        float result[1];
        results_of(element, 0, result);
        store.template put<kRegular>(row, lane, result);
      }
#pragma unroll
      for (int t = 0; t < kTensors; ++t) Ring::read(piece, t, shifts[t] + head_bytes, packs[t]);
    }
#pragma unroll
    for (int p = 0; p < Ring::kPiecePacks; ++p) {
      if (first + p * kStep >= span.end) break;
      float results[N];
      results_of(packs, p, results);
      store.template put<kRegular>(row, first + head + p * kStep + lane * N, results);
    }
    // Only now: reads from shared memory wait behind stores, which copies into it do not.
    ring.release();
  }
}

// Persistent clusters walk over the rows. Each warp adds up its span of a row as the pieces come,
// and writes its results when the row's sum is known.
template <bool kRegular, typename Form, typename Store, typename Slots>
__device__ __forceinline__ void walk_spans(const Form& form, const Store& store, int span_cols,
                                           int pieces, int slots, Slots& sum_slots) {
  constexpr int kTensors = Form::kTensors;
  using Ring = SpanRing<typename Form::Element, kTensors, kRegular>;
  extern __shared__ __align__(128) char ring_bytes[];

  RowGroup<true> group;
  RowCluster cluster;
  const auto tensors = form.tensors();
  const typename Form::Combine combine;
  const int blocks = cluster.blocks(), warp = threadIdx.x / kWarpSize;
  const int first_col = (warp * blocks + cluster.rank()) * span_cols;
  const int64_t rows = tensors.first.rows;
  const Span span{first_col, min(tensors.first.cols, first_col + span_cols), pieces};
  const int stride = gridDim.x / blocks;
  int64_t row = blockIdx.x / blocks;
  Ring ring(ring_bytes + warp * span_ring_bytes(kTensors, pieces, slots), tensors, first_col,
            span_cols, row, stride, pieces, slots);
  SpanSums<typename Form::Sum> sums(sum_slots, cluster);
  cluster.arrive();  // nobody sends to a block that has not begun
  __syncthreads();
  cluster.wait();
  ring.start();

  RingSlot oldest;
  for (int turn = 0; row < rows; ++turn, row += stride) {
    int shifts[kTensors];
#pragma unroll
    for (int t = 0; t < kTensors; ++t) shifts[t] = ring.shift(t, row);
    const auto part = part_of<Form>(span, ring, oldest, turn, shifts);
    const auto sum = sums.total(group, turn, group.reduce_lanes(part.sum(), combine), combine);
    write_span<kRegular, Form>(span, ring, oldest, turn, shifts, form.results_of(sum), store, row);
  }
}

}  // namespace fused_norm
