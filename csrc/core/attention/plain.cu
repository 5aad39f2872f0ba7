// The plain tier's forward kernel, and the kernels of every tier's backward pass.
#include <limits>

#include "core/attention/plain.cuh"
#include "core/attention/plan.h"
#include "core/common/row_group.cuh"

namespace fused_norm {
namespace plain {
namespace {

// Over the 16 threads that hold a row.
template <typename A, typename Op>
__device__ __forceinline__ A reduce_row(A value, Op op) {
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) value = op(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}

// Softmax of a tile's rows: `max` and `sum` are brought forward, and the tile's probabilities
// (times their dropout) replace the scores. Returns by how much what came before is scaled.
template <typename A>
__device__ __forceinline__ A advance_softmax(A (&row)[4], const A (&kept)[4], A& max, A& sum) {
  A tile_max = row[0];
#pragma unroll
  for (int j = 1; j < 4; ++j) tile_max = fmax(tile_max, row[j]);
  tile_max = reduce_row(tile_max, [](A a, A b) { return fmax(a, b); });
  const A new_max = fmax(max, tile_max), rescale = exp_difference(max, new_max);
  A tile_sum = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    // A NaN score must show even in a row whose other keys are hidden.
    const A p = new_max == kLowest<A> && row[j] == kLowest<A> ? A(0) : exp(row[j] - new_max);
    tile_sum += p;
    row[j] = p * kept[j];
  }
  sum = sum * rescale + reduce_row(tile_sum, SumOf());
  max = new_max;
  return rescale;
}

template <typename A>
__device__ __forceinline__ void forward_tile(const AttentionParams& params, Shared<A>& shared,
                                             const Sequence& s, int head, int query, int col) {
  const int query_end = min(query + kTile, s.queries);
  const Range range = band_of(params, s).keys_of(query, query_end, s.keys);
  Head<A> h(params, {}, s, head, {query, query_end}, range);
  if (params.mask.data != nullptr) h.values.seen = shared.key_is_seen;
  A max[4], sum[4];
  Fragment<A> acc[kTilesOfChunk] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) max[i] = kLowest<A>, sum[i] = 0;

  for (int key = range.begin / kTile * kTile; key < range.end; key += kTile) {
    Fragment<A> scores;
    shared.multiply_rows(scores, params.dtype, h.queries, query, h.keys, key);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      A kept[4];
      h.draw(kept, i, query, key);
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = h.score(scores[i][j], i, j, query, key).value;
      const A rescale = advance_softmax(scores[i], kept, max[i], sum[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < kTilesOfChunk; ++c) acc[c][i][j] *= rescale;
      }
    }
    shared.store_scores(scores);
    if (h.values.seen != nullptr) shared.find_seen_keys();
    shared.template multiply_scores<false>(acc, params.dtype, h.values, key, col);
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const A sink = read_sink<A>(params, s, head, query + tile_row() + i);
    const A last_max = fmax(max[i], sink), rescale = exp_difference(max[i], last_max);
    const A total = sum[i] * rescale + exp_difference(sink, last_max);
    const A factor = total == 0 ? A(0) : rescale / total;
#pragma unroll
    for (int c = 0; c < kTilesOfChunk; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[c][i][j] *= factor;
    }
    const int row = query + tile_row() + i;
    if (col == 0 && tile_col() == 0 && row < query_end) {
      static_cast<A*>(params.lse)[first_lse(params, s, head) + row] =
          total == 0 ? kLowest<A> : last_max + log(total);
    }
  }
  store_chunk(acc, params.dtype, params.out, s.batch, head, s.query_begin + query,
              query_end - query, col, params.value_dim);
}

// A block has 64 queries and 128 columns of the output; blocks of other columns make the same
// scores again.
template <typename A>
__global__ void __launch_bounds__(kThreads, kBlocks<A>)
    attention_plain_forward(const __grid_constant__ AttentionParams params, int tiles, int chunks) {
  extern __shared__ char memory[];
  for_tiles<kTile, false>(
      params, tiles, chunks, [&](const Sequence& s, int head, int query, int chunk) {
        forward_tile(params, *reinterpret_cast<Shared<A>*>(memory), s, head, query, chunk * kChunk);
      });
}

// Part of a row of products: kDepth columns from `col` on, in the order of multiply_staged.
template <typename A, typename T>
__device__ __forceinline__ A multiply_part(const T* a, const T* b, int col, int cols,
                                           bool aligned) {
  constexpr int kPack = 16 / sizeof(T);
  A sum = 0;
#pragma unroll
  for (int at = col; at < col + kDepth; at += kPack) {
    alignas(16) T left[kPack] = {}, right[kPack] = {};
    if (aligned && at + kPack <= cols) {
      *reinterpret_cast<uint4*>(left) = *reinterpret_cast<const uint4*>(a + at);
      *reinterpret_cast<uint4*>(right) = *reinterpret_cast<const uint4*>(b + at);
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if (at + i < cols) left[i] = a[at + i], right[i] = b[at + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      sum = fma(static_cast<A>(left[i]), static_cast<A>(right[i]), sum);
  }
  return sum;
}

// AttentionGradient's statistics and zeros. A lane has kDepth columns of a row and `lanes` of them,
// a power of 2, the row. The order of the sum is that of this tier's dout . value, so that the
// gradient of a query with one key is zero to the bit.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    attention_delta(const __grid_constant__ AttentionGradient g, int tiles, int parts, int lanes,
                    bool aligned) {
  const AttentionParams& params = g.params.forward;
  const A* dlse = static_cast<const A*>(g.params.dlse);
  const int lane = threadIdx.x % lanes, cols = params.value_dim;
  const int64_t first_word = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t i = first_word; i < g.zero_words; i += int64_t{gridDim.x} * kThreads) g.zeros[i] = 0;
  for_tiles<kTile, false>(params, tiles, parts, [&](const Sequence& s, int head, int query, int) {
    const int64_t first = first_lse(params, s, head);
    for (int row = query + threadIdx.x / lanes; row < query + kTile; row += kThreads / lanes) {
      A part = 0, sum = 0;
      if (row < s.queries && !is_outside(params, s)) {
        with_storage<A>(params.dtype, [&](auto t) {
          using T = const decltype(t);
          const int at = s.query_begin + row;
          part = multiply_part<A>(row_of<T>(g.params.dout, s.batch, head, at),
                                  row_of<T>(params.out, s.batch, head, at), lane * kDepth, cols,
                                  aligned);
        });
      }
      __syncwarp();
      for (int c = 0; c < (cols + kDepth - 1) / kDepth; ++c) {
        sum += __shfl_sync(0xffffffffu, part, c, lanes);
      }
      if (lane != 0 || row >= s.queries) continue;
      if (dlse != nullptr) sum -= dlse[first + row];
      const A lse = static_cast<const A*>(params.lse)[first + row];
      const bool sees_nothing = lse == kLowest<A>;
      // That of the lowest sink would be -inf, and P of hidden scores NaN.
      constexpr A kLeast = std::numeric_limits<A>::lowest();
      const A finite = lse * static_cast<A>(1.4426950408889634);
      const A exponent = sees_nothing ? -kLowest<A> : finite < kLeast ? kLeast : finite;
      if (sees_nothing) sum = 0;  // not the NaN that dlse may have here
      A* const statistic = statistics_of<A>(g, s, head) + row;
      statistic[0] = sum;
      statistic[query_statistics(g.of_statistics)] = exponent;
    }
  });
}

// dsink = -sum over queries of exp(sink - lse) * delta; by a block.
template <typename A>
__device__ __forceinline__ void add_sinks(const AttentionGradient& g, int head) {
  const AttentionParams& params = g.params.forward;
  constexpr int kRows = 8 * kWarpSize;  // that a warp takes at a time
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  A sum = 0;
  int turn = 0;
  for (int batch = 0; batch < params.batch; ++batch) {
    const Sequence s = sequence_of(params, batch);
    const A sink = read_sink<A>(params, s, head, 0);
    const A* const delta = statistics_of<A>(g, s, head);
    const A* const lse = static_cast<const A*>(params.lse) + first_lse(params, s, head);
    for (int first = 0; first < s.queries; first += kRows) {
      if (turn++ % (kThreads / kWarpSize) != warp) continue;
      const int end = min(first + kRows, s.queries);
#pragma unroll 4
      for (int row = first + lane; row < end; row += kWarpSize) {
        sum -= exp_difference(sink, lse[row]) * delta[row];
      }
    }
  }
  __shared__ A of_thread[kThreads];
  of_thread[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) of_thread[threadIdx.x] += of_thread[threadIdx.x + half];
  }
  if (threadIdx.x == 0) {
    with_option_storage<A>(params.sink.dtype, [&](auto t) {
      using T = decltype(t);
      static_cast<T*>(g.params.dsink)[head] = static_cast<T>(of_thread[0]);
    });
  }
}
// A thread an element of a mask's gradient: adds its sums of all parts, in their order.
__device__ __forceinline__ void add_mask_parts(const AttentionGradient& g, int64_t elements,
                                               int64_t at) {
  if (at >= elements) return;
  float sum = 0;
#pragma unroll 8
  for (int part = 0; part < g.share.parts; ++part) sum += g.mask_sums[part * elements + at];
  with_option_storage<float>(g.params.forward.mask.dtype, [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(g.params.dmask)[at] = static_cast<T>(sum);
  });
}

// The first blocks have the sinks of a head each, the others what is left of a mask's gradient.
__global__ void __launch_bounds__(kThreads)
    attention_last_sums(const __grid_constant__ AttentionGradient g, int sinks, int64_t elements) {
  const int block = static_cast<int>(blockIdx.x) - sinks;
  if (block >= 0) return add_mask_parts(g, elements, int64_t{block} * kThreads + threadIdx.x);
  const bool wide = g.params.forward.dtype == DType::kFloat64;
  wide ? add_sinks<double>(g, blockIdx.x) : add_sinks<float>(g, blockIdx.x);
}

}  // namespace
}  // namespace plain

cudaError_t attention_forward_plain(const AttentionParams& params, cudaStream_t stream) {
  using namespace plain;
  return with_accumulator(params.dtype, [&](auto a) {
    using A = decltype(a);
    return launch_tiles(attention_plain_forward<A>, params, tiles_of(params.queries, kTile),
                        tiles_of(params.value_dim, kChunk), params.heads, sequences_of(params),
                        kThreads, sizeof(Shared<A>), stream);
  });
}

cudaError_t attention_delta_gradient(const AttentionGradient& g, cudaStream_t stream) {
  using namespace plain;
  const AttentionParams& params = g.params.forward;
  int lanes = 1;
  while (lanes * kDepth < params.value_dim) lanes *= 2;
  const bool aligned = attention_is_aligned(params.out, params.dtype) &&
                       attention_is_aligned(g.params.dout, params.dtype);
  return with_accumulator(params.dtype, [&](auto a) {
    return launch_tiles(attention_delta<decltype(a)>, g, tiles_of(params.queries, kTile), 1,
                        params.heads, sequences_of(params), kThreads, 0, stream, lanes, aligned);
  });
}

cudaError_t attention_finish_gradients(const AttentionGradient& g, cudaStream_t stream) {
  using namespace plain;
  const int* shape = g.params.mask_shape;
  const bool sums = g.params.dmask != nullptr && g.share.parts > 1;
  const int64_t elements = sums ? int64_t{shape[0]} * shape[1] * shape[2] * shape[3] : 0;
  const int sinks = g.params.dsink != nullptr ? g.params.forward.heads : 0;
  const dim3 blocks(static_cast<unsigned>(sinks + ceil_div(elements, kThreads)));
  if (blocks.x == 0) return cudaSuccess;
  return launch(attention_last_sums, blocks, dim3(kThreads), {}, stream, g, sinks, elements);
}

}  // namespace fused_norm
