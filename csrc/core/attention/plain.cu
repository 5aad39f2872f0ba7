// The plain tier: CUDA cores, fp32 or fp64 arithmetic, every dtype, head dimension, stride and
// option. Tiles of 64 queries by 64 keys; all products go through one function. What is right here
// is the reference of the faster tiers.
#include <algorithm>

#include "core/attention/tiles.cuh"

namespace fused_norm {
namespace plain {
namespace {

constexpr int kTile = 64;  // queries, keys, and columns of a product
constexpr int kDepth = kPlainDepth;
constexpr int kThreads = 256;  // 16 x 16, each with 4 x 4 elements of a tile
constexpr int kChunk = 128;    // columns of the outputs that a block holds in registers
constexpr int kTilesOfChunk = kChunk / kTile;
// Of a multiprocessor; fp64 needs the registers.
template <typename A>
constexpr int kBlocks = sizeof(A) == 4 ? 2 : 1;
template <typename A>
constexpr A kLowest = -static_cast<A>(INFINITY);

template <typename A>
struct Shared {
  // Depth-major, padded to spread banks and keep 16-byte rows.
  A left[kDepth][kTile + 4], right[kDepth][kTile + 4];
  A weights[kTile][kTile + 1];
  bool key_is_seen[kTile];
};

template <typename A>
using Fragment = A[4][4];
template <typename A>
using Chunk = Fragment<A>[kTilesOfChunk];

// Calls use(i, j) for the elements of a fragment.
template <typename Use>
__device__ __forceinline__ void for_fragment(Use use) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) use(i, j);
  }
}

__device__ __forceinline__ int tile_row() { return threadIdx.x / 16 * 4; }
__device__ __forceinline__ int tile_col() { return threadIdx.x % 16 * 4; }

// Stages a 64 x kDepth part of a factor: load(depth, place). Neighbouring threads load along depth,
// or along places.
template <bool kAlongDepth, typename A, typename Load>
__device__ __forceinline__ void stage(A (&to)[kDepth][kTile + 4], Load load) {
#pragma unroll
  for (int i = 0; i < kDepth * kTile / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x;
    const int depth = kAlongDepth ? at % kDepth : at / kTile;
    const int place = kAlongDepth ? at / kDepth : at % kTile;
    to[depth][place] = load(depth, place);
  }
}

// Sums of kDepth products come first: one running sum over all would round several times as much.
template <typename A>
__device__ __forceinline__ void multiply_staged(Fragment<A>& acc, const Shared<A>& shared) {
  Fragment<A> part = {};
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    A left[4], right[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      left[i] = shared.left[k][tile_row() + i];
      right[i] = shared.right[k][tile_col() + i];
    }
    for_fragment([&](int i, int j) { part[i][j] = fma(left[i], right[j], part[i][j]); });
  }
  for_fragment([&](int i, int j) { acc[i][j] += part[i][j]; });
}

// acc[i][j] = row (left_row + i) of `left` . row (right_row + j) of `right`.
template <typename A>
__device__ __forceinline__ void multiply_rows(Fragment<A>& acc, Shared<A>& shared,
                                              const HeadRows& left, int left_row,
                                              const HeadRows& right, int right_row) {
  for_fragment([&](int i, int j) { acc[i][j] = 0; });
  for (int d = 0; d < left.cols; d += kDepth) {
    __syncthreads();
    with_storage<A>(left.dtype, [&](auto t) {
      using T = decltype(t);
      stage<true>(shared.left, [&](int k, int i) -> A { return left.at<T>(left_row + i, d + k); });
      stage<true>(shared.right,
                  [&](int k, int j) -> A { return right.at<T>(right_row + j, d + k); });
    });
    __syncthreads();
    multiply_staged(acc, shared);
  }
}

template <typename A>
__device__ __forceinline__ void store_weights(Shared<A>& shared, const Fragment<A>& weights) {
  __syncthreads();
  for_fragment(
      [&](int i, int j) { shared.weights[tile_row() + i][tile_col() + j] = weights[i][j]; });
  __syncthreads();
}

// acc[c] += weights x (64 columns from `col` + 64 c of the rows from `row`); transposed: weights^T
// x. With `clean`, rows that no query gives weight to count as zeros: 0 * NaN is NaN.
template <bool kTransposed, typename A>
__device__ __forceinline__ void multiply_weights(Chunk<A>& acc, Shared<A>& shared,
                                                 const Fragment<A>& weights, const HeadRows& rows,
                                                 int row, int col, bool clean) {
  store_weights(shared, weights);
  if (clean && threadIdx.x < kTile) {
    bool seen = false;
    for (int i = 0; i < kTile; ++i) seen |= !(shared.weights[i][threadIdx.x] == 0);
    shared.key_is_seen[threadIdx.x] = seen;
  }
#pragma unroll
  for (int c = 0; c < kTilesOfChunk; ++c) {
    const int first = col + c * kTile;
    if (first >= rows.cols) break;
    for (int d = 0; d < kTile; d += kDepth) {
      __syncthreads();
      with_storage<A>(rows.dtype, [&](auto t) {
        using T = decltype(t);
        stage<false>(shared.right, [&](int k, int j) -> A {
          return !clean || shared.key_is_seen[d + k] ? rows.at<T>(row + d + k, first + j) : T(0.f);
        });
      });
      stage<!kTransposed>(shared.left, [&](int k, int i) {
        return kTransposed ? shared.weights[d + k][i] : shared.weights[i][d + k];
      });
      __syncthreads();
      multiply_staged(acc[c], shared);
    }
  }
}

// Writes rows [0, rows) of a chunk's accumulators, from row `first` and column `col` on.
template <typename A>
__device__ __forceinline__ void store_chunk(const Chunk<A>& acc, DType dtype,
                                            const AttentionTensor& tensor, int batch, int head,
                                            int first, int rows, int col, int cols) {
  if (tensor.data == nullptr) return;
  with_storage<A>(dtype, [&](auto t) {
    using T = decltype(t);
    T* data = row_of<T>(tensor, batch, head, first);
#pragma unroll
    for (int c = 0; c < kTilesOfChunk; ++c) {
      for_fragment([&](int i, int j) {
        const int row = tile_row() + i, column = col + c * kTile + tile_col() + j;
        if (row < rows && column < cols) {
          data[row * tensor.row_stride + column] = static_cast<T>(acc[c][i][j]);
        }
      });
    }
  });
}

// exp(a - b), where b is -inf only if nothing was seen.
template <typename A>
__device__ __forceinline__ A exp_difference(A a, A b) {
  return b == kLowest<A> ? A(0) : exp(a - b);
}

// What dropout multiplies the probabilities of a query and four keys by.
template <typename A>
__device__ __forceinline__ void draw(A (&kept)[4], const Head<A>& h, int query, int key) {
  const uint32_t bits = h.drops() ? h.dropout().kept(query, key) : 0xf;
  const A scale = h.drops() ? static_cast<A>(h.params.dropout_scale) : A(1);
#pragma unroll
  for (int j = 0; j < 4; ++j) kept[j] = bits >> j & 1 ? scale : A(0);
}

// Over the 16 threads that hold a row.
template <typename A, typename Op>
__device__ __forceinline__ A reduce_row(A value, Op op) {
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffffu, value, mask));
  }
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
  sum = sum * rescale + reduce_row(tile_sum, [](A a, A b) { return a + b; });
  max = new_max;
  return rescale;
}

template <typename A>
__device__ __forceinline__ void forward_tile(const AttentionParams& params, Shared<A>& shared,
                                             const Sequence& s, int head, int query, int col) {
  const int query_end = min(query + kTile, s.queries);
  const Range range = s.band.keys_of(query, query_end, s.keys);
  const Head<A> h(params, {}, s, head, {query, query_end}, range);
  A max[4], sum[4] = {};
  Chunk<A> acc = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) max[i] = kLowest<A>;

  for (int key = range.begin / kTile * kTile; key < range.end; key += kTile) {
    Fragment<A> scores;
    multiply_rows(scores, shared, h.query, query, h.key, key);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = query + tile_row() + i, first = key + tile_col();
      A kept[4];
      draw(kept, h, row, first);
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = h.score(scores[i][j], row, first + j).value;
      const A rescale = advance_softmax(scores[i], kept, max[i], sum[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < kTilesOfChunk; ++c) acc[c][i][j] *= rescale;
      }
    }
    multiply_weights<false>(acc, shared, scores, h.value, key, col, params.mask.data != nullptr);
  }

  const A sink = read_sink<A>(params, head);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
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

// A tile's probabilities, times their dropout, and the derivative by query . key * scale
// (kBySoftcapped: by the score that the mask is added to).
template <bool kBySoftcapped, typename A>
__device__ __forceinline__ void differentiate(Fragment<A>& probability, Fragment<A>& gradient,
                                              Shared<A>& shared, const AttentionGradient& g,
                                              const Head<A>& h, int query, int key) {
  multiply_rows(gradient, shared, h.dout, query, h.value, key);
  multiply_rows(probability, shared, h.query, query, h.key, key);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = query + tile_row() + i, first = key + tile_col();
    const int64_t at = first_lse(h.params, h.s, h.head) + row;
    const A lse = row < h.s.queries ? static_cast<const A*>(h.params.lse)[at] : kLowest<A>;
    const A delta = row < h.s.queries ? static_cast<const A*>(g.delta)[at] : A(0);
    A kept[4];
    draw(kept, h, row, first);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Score<A> score = h.score(probability[i][j], row, first + j);
      const A p = score.value == kLowest<A> ? A(0) : exp_difference(score.value, lse);
      const A by_score = p == 0 ? A(0) : p * (gradient[i][j] * kept[j] - delta);
      gradient[i][j] = kBySoftcapped ? by_score : by_score * score.slope;
      probability[i][j] = p * kept[j];
    }
  }
}

// dquery of a tile of queries, or kOfKeys dkey and dvalue of a tile of keys: these from the queries
// of all heads that share the keys, in order of heads and rows.
template <bool kOfKeys, typename A>
__device__ __forceinline__ void gradient_tile(const AttentionGradient& g, Shared<A>& shared,
                                              const Sequence& s, int own_head, int own, int col) {
  const AttentionParams& params = g.params.forward;
  const Range mine{own, min(own + kTile, kOfKeys ? s.keys : s.queries)};
  const Range others =
      kOfKeys ? s.band.queries_of(own, mine.end, s.queries) : s.band.keys_of(own, mine.end, s.keys);
  const bool clean = !kOfKeys && params.mask.data != nullptr;
  const int group = params.heads / params.kv_heads;
  Chunk<A> acc = {}, dvalue = {};
  const auto add_head = [&](int head) {
    const Head<A> h(params, g.params.dout, s, head, kOfKeys ? others : mine,
                    kOfKeys ? mine : others);
    for (int other = others.begin / kTile * kTile; other < others.end; other += kTile) {
      Fragment<A> probability, gradient;
      differentiate<false>(probability, gradient, shared, g, h, kOfKeys ? other : own,
                           kOfKeys ? own : other);
      if (kOfKeys) {
        multiply_weights<true>(dvalue, shared, probability, h.dout, other, col, clean);
      }
      multiply_weights<kOfKeys>(acc, shared, gradient, kOfKeys ? h.query : h.key, other, col,
                                clean);
    }
  };
  if (!kOfKeys) add_head(own_head);
  for (int i = 0; kOfKeys && i < group; ++i) add_head(own_head * group + i);
#pragma unroll
  for (int c = 0; c < kTilesOfChunk; ++c) {
    for_fragment([&](int i, int j) { acc[c][i][j] *= static_cast<A>(params.scale); });
  }
  const int first = (kOfKeys ? s.key_begin : s.query_begin) + own, rows = mine.end - own;
  store_chunk(acc, params.dtype, kOfKeys ? g.params.dkey : g.params.dquery, s.batch, own_head,
              first, rows, col, params.head_dim);
  if (kOfKeys) {
    store_chunk(dvalue, params.dtype, g.params.dvalue, s.batch, own_head, first, rows, col,
                params.value_dim);
  }
}

// A tile of the mask sums what its elements serve, in order.
template <typename A>
__device__ __forceinline__ void mask_gradient_tile(const AttentionGradient& g, Shared<A>& shared,
                                                   const Place& place) {
  Fragment<A> acc = {};
  for_served<kTile, kTile>(
      g.params, place, [&](const Sequence& s, int head, int query, const Range& keys) {
        const Head<A> h(g.params.forward, g.params.dout, s, head, {0, s.queries}, {0, s.keys});
        for (int key = keys.begin / kTile * kTile; key < keys.end; key += kTile) {
          Fragment<A> probability, gradient;
          differentiate<true>(probability, gradient, shared, g, h, query, key);
          for_fragment([&](int i, int j) { acc[i][j] += gradient[i][j]; });
        }
      });
  store_weights(shared, acc);
  store_mask_tile<kTile, kTile>(g.params, place, shared.weights[0], kTile + 1);
}

// A block has 64 rows and 128 columns of the outputs; blocks of other columns make the same scores
// again. Of the mask's gradient a block has 64 x 64 elements.
template <typename A, Kernel kKernel>
__global__ void __launch_bounds__(kThreads, kBlocks<A>)
    attention_plain(const __grid_constant__ AttentionGradient g, int tiles, int parts) {
  constexpr bool kOfKeys = kKernel == Kernel::kKeyGradient;
  extern __shared__ char memory[];
  Shared<A>& shared = *reinterpret_cast<Shared<A>*>(memory);
  if constexpr (kKernel == Kernel::kMaskGradient) {
    mask_gradient_tile(g, shared, place_of(tiles, parts, g.params.mask_shape[1]));
  } else {
    for_tiles<kTile, kOfKeys>(
        g.params.forward, tiles, parts, [&](const Sequence& s, int head, int row, int chunk) {
          if constexpr (kKernel == Kernel::kForward) {
            forward_tile(g.params.forward, shared, s, head, row, chunk * kChunk);
          } else {
            gradient_tile<kOfKeys>(g, shared, s, head, row, chunk * kChunk);
          }
        });
  }
}

template <Kernel kKernel>
cudaError_t launch(const AttentionGradient& g, cudaStream_t stream) {
  const AttentionParams& params = g.params.forward;
  const int cols = kKernel == Kernel::kForward ? params.value_dim
                   : kKernel == Kernel::kQueryGradient
                       ? params.head_dim
                       : std::max(params.head_dim, params.value_dim);
  return with_arithmetic(params.dtype, [&](auto a) {
    using A = decltype(a);
    return launch_tiles(kKernel, attention_plain<A, kKernel>, g, kTile, kTile,
                        static_cast<int>(ceil_div(cols, kChunk)), kThreads, sizeof(Shared<A>),
                        stream);
  });
}

}  // namespace
}  // namespace plain

cudaError_t attention_forward_plain(const AttentionParams& params, cudaStream_t stream) {
  return plain::launch<Kernel::kForward>({{params}}, stream);
}

cudaError_t attention_backward_plain(const AttentionGradient& g, cudaStream_t stream) {
  cudaError_t error = plain::launch<Kernel::kQueryGradient>(g, stream);
  if (error == cudaSuccess) error = plain::launch<Kernel::kKeyGradient>(g, stream);
  if (error == cudaSuccess) error = plain::launch<Kernel::kMaskGradient>(g, stream);
  return error;
}

}  // namespace fused_norm
