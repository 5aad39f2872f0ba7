// Attention of short sequences, as of an image's windows or a video's frames: the queries of a head
// are one tile and its keys another, so that a block makes all of a head at once, backward every
// gradient. A block walks over (sequence, head) pairs that have the same mask. A thread keeps its
// part of the mask in registers, and backward the sums of its gradient.
#include "core/attention/portable.cuh"

namespace fused_norm {
namespace one_tile {

constexpr int kThreads = kOneTileRows / 16 * kWarpSize;  // a warp has 16 queries

// The pairs of a block, and how they share masks.
struct Work {
  MaskShare share;
  int32_t masks, masks_of_block;  // of the call, and of a block whose masks are not in parts
  float exponent;                 // query . key times it is an exponent of 2
};
struct Pair {
  Sequence s;
  int head, index;         // `index`: among the call's pairs
  bool is_first, is_last;  // of the block's pairs with this mask
};

// Calls load(pair, stage) for each of a block's pairs, one ahead, and use(pair, stage). Pairs with
// one mask follow each other: where it serves all sequences those of a head, else of a sequence.
template <typename Load, typename Use>
__device__ __forceinline__ void for_pairs(const Work& work, const AttentionParams& params,
                                          Load load, Use use) {
  const MaskShare& share = work.share;
  const int part = blockIdx.x % share.parts, mask = blockIdx.x / share.parts * work.masks_of_block;
  const int mask_end = min(mask + work.masks_of_block, work.masks);
  const int first = mask * share.served + part * share.pairs;
  const int end = min(mask_end * share.served, share.parts > 1 ? first + share.pairs : INT_MAX);
  const bool of_head = share.batch == 1 && share.heads > 1;
  const int turns = of_head ? params.batch : params.heads;
  // Of the next pair. They are counted: divisions for each pair took up to a fifth of the time.
  int outer = first / turns, inner = first % turns, member = first % share.served;
  const auto load_next = [&](int index, int stage) {
    const int batch = of_head ? inner : outer, head = of_head ? outer : inner;
    Pair pair{{batch, 0, params.queries, 0, params.keys}, head, index};
    pair.is_first = index == first || member == 0;
    if (++member == share.served) member = 0;
    pair.is_last = index + 1 == end || member == 0;
    if (++inner == turns) inner = 0, ++outer;
    load(pair, stage);
    commit_copies();
    if (share.served == 1) {
      portable::prefetch_mask<kOneTileRows>(ScoreRules<float>(params, pair.s, pair.head), 0,
                                            params.queries, 0, params.keys);
    }
    return pair;
  };
  Pair pair{}, next{};
  for (int index = first - 1, stage = 1; index < end; ++index, stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // and the other stage is done with
    if (index + 1 < end) next = load_next(index + 1, stage ^ 1);
    if (index >= first) use(pair, stage);
    pair = next;
  }
}

// A kernel's constants and functions.
template <typename T_, int kDim_>
struct Shape {
  using T = T_;
  static constexpr int kDim = kDim_, kOwn = kOneTileRows, kOthers = kOneTileRows;
  static constexpr int kM = 1, kN = kOthers / 8, kThreads = one_tile::kThreads;
  static constexpr int kTileBytes = kOwn * kDim * 2, kWeightBytes = kOwn * kOthers * 2;
  using Scores = mma::Accumulators<kM, kN>;
  using Out = mma::Accumulators<kM, kDim / 8>;

  // Tiles of a pair in shared memory, which has the next pair's too.
  struct ForwardTiles {
    char query[kTileBytes], key[kTileBytes], value[kTileBytes];
  };
  struct BackwardTiles : ForwardTiles {
    char dout[kTileBytes], out[kTileBytes];
  };
  struct BackwardMemory {
    BackwardTiles stage[2];
    char weights[kWeightBytes], gradient[kWeightBytes];  // P and W
    float2 statistics[kOwn];                             // of a query: exponent and delta
  };

  // Starts to copy the rows of a head to a tile; zeros outside `valid`.
  static __device__ __forceinline__ void copy(char* tile, const AttentionTensor& tensor,
                                              const Pair& pair, Range valid, int cols) {
    portable::copy_rows<Shape, kOwn>(shared_address(tile),
                                     row_of<const T>(tensor, pair.s.batch, pair.head, 0),
                                     tensor.row_stride, 0, valid, cols);
  }

  // acc = left x right^T, of a warp's rows of one tile and all of another.
  static __device__ __forceinline__ void multiply_rows(Scores& acc, const char* left,
                                                       const char* right) {
    mma::multiply_rows<T>(acc, mma::left_rows<kDim>(shared_address(left), threadIdx.x / 32 * 16),
                          mma::right_rows<kDim>(shared_address(right)));
  }

  // What is added to a thread's scores, as exponents of 2: the mask, and -inf where the band or the
  // end of the sequence hides the key.
  static __device__ __forceinline__ void read_mask(const AttentionParams& params, const Pair& pair,
                                                   Scores& added) {
    const AttentionMask& mask = params.mask;
    const Sequence& s = pair.s;
    const portable::TilePlace<false> place(s, 0, 0, threadIdx.x / 32 * 16);
    const int64_t corner = s.batch * mask.batch_stride + pair.head * mask.head_stride;
    mma::clear(added);
    if (mask.data != nullptr) {
      with_mask_reader(mask, [&](auto read) {
        mma::for_elements<kM, kN>([&](int m, int n, int e, int row, int col) {
          row = min(place.row + row, s.queries - 1), col = min(place.col + col, s.keys - 1);
          added[m][n][e] = kLog2E * read(corner + row * mask.row_stride + col * mask.key_stride);
        });
      });
    }
    portable::hide_outside(added, band_of(params, s), place);
  }

  // Query . key, times `factor`, and what is added. A hidden key's is -inf, whatever the key holds.
  static __device__ __forceinline__ void make_scores(Scores& scores, const char* query,
                                                     const char* key, const Scores& added,
                                                     float factor) {
    multiply_rows(scores, query, key);
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
      const float a = added[m][n][e];
      scores[m][n][e] = a == -INFINITY ? a : fmaf(scores[m][n][e], factor, a);
    });
  }

  // acc = weights x rows of a tile; once more without unseen rows if a NaN or Inf in one spoils it.
  static __device__ __forceinline__ void multiply_weights(Out& acc, const Scores& weights,
                                                          char* tile) {
    const auto multiply = [&] {
      mma::clear(acc);
      mma::multiply_weights<T>(acc, weights, mma::left_rows<kDim>(shared_address(tile), 0));
    };
    multiply();
    if (!__syncthreads_or(mma::has_nan(acc))) return;
    portable::clear_unseen_rows<Shape>(tile, weights);
    multiply();
  }

  // acc = weights^T x rows of a tile, for 16 columns of the weights that all warps stored.
  static __device__ __forceinline__ void multiply_columns(Out& acc, const char* weights,
                                                          const char* tile) {
    mma::clear(acc);
    mma::multiply_columns<T, kOwn>(
        acc, mma::right_rows<kOthers>(shared_address(weights), threadIdx.x / 32 * 16),
        mma::left_rows<kDim>(shared_address(tile), 0));
  }

  // Scores become probabilities times their row's sum, 1 / factor; writes the log-sum-exp.
  static __device__ __forceinline__ void softmax(const AttentionParams& params, const Pair& pair,
                                                 Scores& scores, float exponent,
                                                 float (&factor)[2]) {
    RowState rows;
    float rescale[2], lse[2];
    softmax_step<Moves::kFirst>(reinterpret_cast<float(&)[4 * kN]>(scores), rows, exponent,
                                rescale);
    softmax_end(rows, {-INFINITY, -INFINITY}, factor, lse);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = threadIdx.x / 32 * 16 + 8 * r + lane / 4;
      if (lane % 4 != 0 || row >= params.queries) continue;
      static_cast<float*>(params.lse)[first_lse(params, pair.s, pair.head) + row] = lse[r];
    }
  }

  // Rounds a warp's weights and stores them as rows of a tile.
  static __device__ __forceinline__ void store_weights(char* tile, const Scores& weights) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16 + lane / 4;
    mma::for_elements<kM, kN>([&](int m, int n, int e, int row, int) {
      if (e % 2 == 1) return;
      *reinterpret_cast<uint32_t*>(tile + mma::Tile<kOthers>::at(0, first + row, n) +
                                   lane % 4 * 4) =
          round_pair(weights[m][n][e], weights[m][n][e + 1], T());
    });
  }

  // Two threads a row: its exponent, +inf of a row that sees nothing, and, of tiles of dout and
  // out, delta = rowsum(dout * out) - dlse. A warp's rows are its own.
  static __device__ __forceinline__ void find_statistics(const AttentionGradient& g,
                                                         const Pair& pair, const char* dout,
                                                         const char* out, float2* statistics) {
    using Tile = mma::Tile<kDim>;
    const int row = threadIdx.x / 2, half = threadIdx.x % 2;
    float sum = 0;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks / 2; ++chunk) {
      const uint32_t at = Tile::at(0, row, half * (Tile::kChunks / 2) + chunk);
      const uint4 a = *reinterpret_cast<const uint4*>(dout + at);
      const uint4 b = *reinterpret_cast<const uint4*>(out + at);
      const auto add = [&](uint32_t x, uint32_t y) {
        const float2 left = to_floats(x, T());
        const float2 right = to_floats(y, T());
        sum = fmaf(left.x, right.x, fmaf(left.y, right.y, sum));
      };
      add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    float lse = -INFINITY;
    if (row < pair.s.queries) {
      const int64_t at = first_lse(g.params.forward, pair.s, pair.head) + row;
      lse = static_cast<const float*>(g.params.forward.lse)[at];
      if (g.params.dlse != nullptr) sum -= static_cast<const float*>(g.params.dlse)[at];
    }
    if (half == 0) statistics[row] = {lse == -INFINITY ? INFINITY : lse * kLog2E, sum};
    __syncwarp();
  }

  // P, and W = P (D - delta), of which dmask is the sum. On entry they are exponents and D.
  static __device__ __forceinline__ void differentiate(Scores& weights, Scores& gradient,
                                                       Scores& sums, const float2* statistics) {
    const float2* const of_thread = statistics + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const float2 of_row[2] = {of_thread[0], of_thread[8]};
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
      const float p = exp2_fast(weights[m][n][e] - of_row[e / 2].x);
      weights[m][n][e] = p;
      gradient[m][n][e] = p == 0 ? 0 : p * (gradient[m][n][e] - of_row[e / 2].y);
      sums[m][n][e] += gradient[m][n][e];
    });
  }

  // Writes the sums of a mask's gradient, or those of a part of its pairs, for
  // attention_finish_gradients().
  static __device__ __forceinline__ void store_mask(const AttentionGradient& g, const Work& work,
                                                    int mask, const Scores& sums) {
    const AttentionParams& params = g.params.forward;
    const portable::TilePlace<false> place({0, 0, params.queries, 0, params.keys}, 0, 0,
                                           threadIdx.x / 32 * 16);
    const bool in_parts = work.share.parts > 1;
    const int64_t of_part = int64_t{blockIdx.x % work.share.parts} * work.masks;
    const int64_t first = (of_part + mask) * params.queries * params.keys;
    with_option_storage<float>(in_parts ? DType::kFloat32 : params.mask.dtype, [&](auto zero) {
      using Stored = decltype(zero);
      auto* to = static_cast<Stored*>(in_parts ? g.mask_sums : g.params.dmask) + first;
      mma::for_elements<kM, kN>([&](int m, int n, int e, int row, int col) {
        const int query = place.row + row, key = place.col + col;
        if (query >= params.queries || key >= params.keys) return;
        to[query * params.keys + key] = static_cast<Stored>(sums[m][n][e]);
      });
    });
  }
};

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, one_tile_blocks(kDim, false))
    attention_one_tile_forward(const __grid_constant__ AttentionParams params,
                               const __grid_constant__ Work work) {
  using S = Shape<T, kDim>;
  extern __shared__ __align__(1024) char shared[];
  auto* const stages = reinterpret_cast<typename S::ForwardTiles*>(shared);
  const Band band = band_of(params, {0, 0, params.queries, 0, params.keys});
  const Range queries{0, params.queries}, keys = band.keys_of(0, params.queries, params.keys);
  const auto load = [&](const Pair& pair, int stage) {
    auto& to = stages[stage];
    S::copy(to.query, params.query, pair, queries, params.head_dim);
    S::copy(to.key, params.key, pair, keys, params.head_dim);
    S::copy(to.value, params.value, pair, keys, params.value_dim);
  };
  const bool masked = params.mask.data != nullptr;
  typename S::Scores added;
  for_pairs(work, params, load, [&](const Pair& pair, int stage) {
    auto& tiles = stages[stage];
    if (pair.is_first) S::read_mask(params, pair, added);
    typename S::Scores scores;
    S::make_scores(scores, tiles.query, tiles.key, added, masked ? work.exponent : 1);
    float factor[2];
    S::softmax(params, pair, scores, masked ? 1 : work.exponent, factor);
    typename S::Out out;
    S::multiply_weights(out, scores, tiles.value);
    mma::for_elements<S::kM, S::kDim / 8>(
        [&](int m, int n, int e, int, int) { out[m][n][e] *= factor[e / 2]; });
    portable::store_tile<S>(params.out, pair.s, pair.head, 0, tiles.query, out, 0, params.queries,
                            params.value_dim);
  });
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, one_tile_blocks(kDim, true))
    attention_one_tile_gradient(const __grid_constant__ AttentionGradient g,
                                const __grid_constant__ Work work) {
  using S = Shape<T, kDim>;
  extern __shared__ __align__(1024) char shared[];
  auto& memory = *reinterpret_cast<typename S::BackwardMemory*>(shared);
  const AttentionParams& params = g.params.forward;
  const Band band = band_of(params, {0, 0, params.queries, 0, params.keys});
  // Queries that see no key by the band, and keys that no query sees, may hold a NaN.
  const Range keys = band.keys_of(0, params.queries, params.keys);
  const Range queries = band.queries_of(0, params.keys, params.queries);
  const auto load = [&](const Pair& pair, int stage) {
    auto& to = memory.stage[stage];
    S::copy(to.query, params.query, pair, queries, params.head_dim);
    S::copy(to.key, params.key, pair, keys, params.head_dim);
    S::copy(to.value, params.value, pair, keys, params.value_dim);
    S::copy(to.dout, g.params.dout, pair, queries, params.value_dim);
    S::copy(to.out, params.out, pair, queries, params.value_dim);
  };
  typename S::Scores added, sums;
  for_pairs(work, params, load, [&](const Pair& pair, int stage) {
    auto& tiles = memory.stage[stage];
    if (pair.is_first) {
      S::read_mask(params, pair, added);
      mma::clear(sums);
    }
    S::find_statistics(g, pair, tiles.dout, tiles.out, memory.statistics);
    typename S::Scores weights, gradient;
    S::make_scores(weights, tiles.query, tiles.key, added, work.exponent);
    S::multiply_rows(gradient, tiles.dout, tiles.value);
    S::differentiate(weights, gradient, sums, memory.statistics);
    S::store_weights(memory.weights, weights);
    S::store_weights(memory.gradient, gradient);
    const auto store = [&](const AttentionTensor& to, char* tile, typename S::Out& acc, float scale,
                           int rows, int cols) {
      mma::for_elements<S::kM, S::kDim / 8>(
          [&](int m, int n, int e, int, int) { acc[m][n][e] *= scale; });
      portable::store_tile<S>(to, pair.s, pair.head, 0, tile, acc, 0, rows, cols);
    };
    const float scale = static_cast<float>(params.scale);
    typename S::Out acc;
    S::multiply_weights(acc, gradient, tiles.key);  // with a barrier
    store(g.params.dquery, tiles.out, acc, scale, params.queries, params.head_dim);
    S::multiply_columns(acc, memory.weights, tiles.dout);
    store(g.params.dvalue, tiles.value, acc, 1, params.keys, params.value_dim);
    S::multiply_columns(acc, memory.gradient, tiles.query);
    store(g.params.dkey, tiles.key, acc, scale, params.keys, params.head_dim);
    if (pair.is_last && g.params.dmask != nullptr)
      S::store_mask(g, work, pair.index / work.share.served, sums);
  });
}

// Launches a kernel for the pairs of a call, about `blocks` at once.
template <typename Params>
cudaError_t launch_pairs(void (*kernel)(Params, Work), const Params& params, const MaskShare& share,
                         double scale, int blocks, int shared_bytes, cudaStream_t stream) {
  const int32_t masks = share.batch * share.heads, of_block = std::max(1, masks / blocks);
  const Work work{share, masks, of_block, static_cast<float>(scale * 1.4426950408889634)};
  return launch(kernel, static_cast<unsigned>(ceil_div(masks, of_block) * share.parts), kThreads,
                {shared_bytes}, stream, params, work);
}

template <typename Run>
cudaError_t with_shape(const AttentionParams& params, Run run) {
  return with_dtype<__half, __nv_bfloat16>(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    return one_tile_columns(params) == 32 ? run(Shape<T, 32>()) : run(Shape<T, 64>());
  });
}

}  // namespace one_tile

cudaError_t attention_forward_one_tile(const AttentionParams& params, cudaStream_t stream) {
  using namespace one_tile;
  return with_shape(params, [&](auto shape) {
    using S = decltype(shape);
    constexpr int kBlocks = kSharedBy * one_tile_blocks(S::kDim, false);
    return launch_pairs(attention_one_tile_forward<typename S::T, S::kDim>, params,
                        one_tile_share(params, kBlocks), params.scale, kBlocks,
                        2 * sizeof(typename S::ForwardTiles), stream);
  });
}

cudaError_t attention_backward_one_tile(const AttentionGradient& gradient, cudaStream_t stream) {
  using namespace one_tile;
  return with_shape(gradient.params.forward, [&](auto shape) {
    using S = decltype(shape);
    constexpr int kBlocks = kSharedBy * one_tile_blocks(S::kDim, true);
    return launch_pairs(attention_one_tile_gradient<typename S::T, S::kDim>, gradient,
                        gradient.share, gradient.params.forward.scale, kBlocks,
                        sizeof(typename S::BackwardMemory), stream);
  });
}

}  // namespace fused_norm
