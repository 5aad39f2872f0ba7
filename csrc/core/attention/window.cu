// Attention of short sequences with a mask, as of an image's windows: the queries of a head are one
// tile and its keys another, so that a block makes all of a head at once, backward every gradient.
// A block walks over (sequence, head) pairs that have the same mask. A thread keeps its part of the
// mask in registers, and backward the sums of its gradient.
#include "core/attention/hopper_mask_map.cuh"
#include "core/attention/portable_options.cuh"

namespace fused_norm {
namespace window {

constexpr int kThreads = kWindowRows / 16 * kWarpSize;  // a warp has 16 queries

template <typename T_, int kDim_>
struct Shape {
  using T = T_;
  static constexpr int kDim = kDim_, kOwn = kWindowRows, kOthers = kWindowRows;
  static constexpr int kM = 1, kN = kOthers / 8, kThreads = window::kThreads;
  static constexpr int kTileBytes = kOwn * kDim * 2, kWeightBytes = kOwn * kOthers * 2;
  using Scores = mma::Accumulators<kM, kN>;
  using Out = mma::Accumulators<kM, kDim / 8>;
};

// The pairs of a block, and how they share masks.
struct Work {
  MaskShare share;
  int32_t masks, masks_of_block;  // of the call, and of a block whose masks are not in parts
};

// Calls load(sequence, head, stage) for each of a block's pairs, one ahead, and use(sequence, head,
// mask, stage, is_first, is_last): `mask` is its index, of whose pairs it is the block's first or
// last.
template <typename S, typename Load, typename Use>
__device__ __forceinline__ void for_pairs(const Work& work, const AttentionParams& params,
                                          Load load, Use use) {
  const MaskShare& share = work.share;
  const int part = blockIdx.x % share.parts, mask = blockIdx.x / share.parts * work.masks_of_block;
  const int mask_end = min(mask + work.masks_of_block, work.masks);
  const int first = mask * share.served + part * share.pairs;
  const int end = min(mask_end * share.served, share.parts > 1 ? first + share.pairs : INT_MAX);
  const auto with_pair = [&](int pair, auto run) {
    const int of_mask = pair / share.served, member = pair % share.served;
    int batch = of_mask / share.heads, head = of_mask % share.heads;
    share.set_pair(member, params.heads, &batch, &head);
    run(Sequence{batch, 0, params.queries, 0, params.keys}, head, of_mask, member);
  };
  const auto start = [&](int pair, int stage) {
    with_pair(pair, [&](const Sequence& s, int head, int, int) {
      load(s, head, stage);
      if (share.served > 1) return;
      portable::prefetch_mask<S::kOwn>(ScoreRules<float>(params, s, head), 0, s.queries, 0, s.keys);
    });
    detail::commit_copies();
  };
  for (int pair = first - 1, stage = 1; pair < end; ++pair, stage ^= 1) {
    detail::wait_for_copies<0>();
    __syncthreads();  // and the other stage is done with
    if (pair + 1 < end) start(pair + 1, stage ^ 1);
    if (pair < first) continue;
    with_pair(pair, [&](const Sequence& s, int head, int of_mask, int member) {
      const bool is_last = member + 1 == share.served || pair + 1 == end;
      use(s, head, of_mask, stage, pair == first || member == 0, is_last);
    });
  }
}

// What is added to a thread's scores, as exponents of 2: the mask, and -inf where the band or the
// end of the sequence hides the key.
template <typename S>
__device__ __forceinline__ void read_mask(const AttentionParams& params, const Band& band,
                                          const Sequence& s, int head, typename S::Scores& added) {
  const AttentionMask& mask = params.mask;
  const portable::TilePlace<false> place(s, 0, 0, threadIdx.x / 32 * 16);
  const int64_t corner = s.batch * mask.batch_stride + head * mask.head_stride;
  mma::clear(added);
  hopper::with_mask_reader(mask, [&](auto read) {
    mma::for_elements<S::kM, S::kN>([&](int m, int n, int e, int row, int col) {
      const int query = min(place.row + row, s.queries - 1), key = min(place.col + col, s.keys - 1);
      if (mask.data == nullptr) return;
      added[m][n][e] = kLog2E * read(corner + query * mask.row_stride + key * mask.key_stride);
    });
  });
  portable::hide_outside(added, band, place);
}

// A thread's query . key become exponents of 2. What is hidden is -inf, whatever the key holds.
template <typename S>
__device__ __forceinline__ void add_mask(typename S::Scores& scores,
                                         const typename S::Scores& added, float unit) {
  mma::for_elements<S::kM, S::kN>([&](int m, int n, int e, int, int) {
    const float a = added[m][n][e];
    scores[m][n][e] = a == -INFINITY ? a : fmaf(scores[m][n][e], unit, a);
  });
}

// acc += weights x rows of a tile. A NaN or Inf in a row without a weight spoils all: then once
// more without such rows.
template <typename S>
__device__ __forceinline__ void multiply(typename S::Out& acc, const typename S::Scores& weights,
                                         char* shared, uint32_t tile) {
  const uint32_t base = shared_address(shared);
  mma::clear(acc);
  mma::multiply_weights<typename S::T>(acc, weights, mma::left_rows<S::kDim>(base + tile, 0));
  if (!__syncthreads_or(mma::has_nan(acc))) return;
  portable::clear_unseen_rows<S>(shared + tile, weights);
  mma::clear(acc);
  mma::multiply_weights<typename S::T>(acc, weights, mma::left_rows<S::kDim>(base + tile, 0));
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, window_blocks(kDim, false))
    attention_window_forward(const __grid_constant__ AttentionParams params,
                             const __grid_constant__ Work work) {
  using S = Shape<T, kDim>;
  extern __shared__ __align__(1024) char shared[];
  constexpr uint32_t kKeys = S::kTileBytes, kValues = 2 * S::kTileBytes, kStage = 3 * S::kTileBytes;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const Band band = band_of(params, {0, 0, params.queries, 0, params.keys});
  const Range seen = band.keys_of(0, params.queries, params.keys);
  const float unit = static_cast<float>(params.scale) * kLog2E;
  const uint32_t base = shared_address(shared);
  typename S::Scores added;
  const auto load = [&](const Sequence& s, int head, int stage) {
    const auto copy = [&](const AttentionTensor& tensor, uint32_t tile, Range valid, int cols) {
      portable::copy_rows<S, S::kOwn>(base + stage * kStage + tile,
                                      row_of<const T>(tensor, s.batch, head, 0), tensor.row_stride,
                                      0, valid, cols);
    };
    copy(params.query, 0, {0, s.queries}, params.head_dim);
    copy(params.key, kKeys, seen, params.head_dim);
    copy(params.value, kValues, seen, params.value_dim);
  };
  for_pairs<S>(work, params, load,
               [&](const Sequence& s, int head, int, int stage, bool is_first, bool) {
                 if (is_first) read_mask<S>(params, band, s, head, added);
                 const uint32_t tiles = stage * kStage;
                 typename S::Scores scores;
                 mma::multiply_rows<T>(scores, mma::left_rows<S::kDim>(base + tiles, warp_row),
                                       mma::right_rows<S::kDim>(base + tiles + kKeys));
                 add_mask<S>(scores, added, unit);
                 float factor[2];
#pragma unroll
                 for (int r = 0; r < 2; ++r) {
                   float max = -INFINITY, sum = 0;
#pragma unroll
                   for (int n = 0; n < S::kN; ++n) {
                     max = fmaxf(max, fmaxf(scores[0][n][2 * r], scores[0][n][2 * r + 1]));
                   }
                   max = quad_max(max);
                   const float shift = max == -INFINITY ? 0 : max;
#pragma unroll
                   for (int n = 0; n < S::kN; ++n) {
#pragma unroll
                     for (int e = 2 * r; e < 2 * r + 2; ++e) {
                       scores[0][n][e] = exp2_fast(scores[0][n][e] - shift);
                       sum += scores[0][n][e];
                     }
                   }
                   sum = quad_sum(sum);
                   factor[r] = sum == 0 ? 0 : 1 / sum;
                   const int row = warp_row + 8 * r + lane / 4;
                   if (lane % 4 == 0 && row < s.queries) {
                     static_cast<float*>(params.lse)[first_lse(params, s, head) + row] =
                         sum == 0 ? -INFINITY : (shift + log2f(sum)) * kLn2;
                   }
                 }
                 typename S::Out out;
                 multiply<S>(out, scores, shared, tiles + kValues);
                 mma::for_elements<S::kM, S::kDim / 8>(
                     [&](int m, int n, int e, int, int) { out[m][n][e] *= factor[e / 2]; });
                 portable::store_tile<S>(params.out, s, head, 0, shared + tiles, out, 0, s.queries,
                                         params.value_dim);
               });
}

// Rounds a warp's weights and stores them as rows of a tile.
template <typename S>
__device__ __forceinline__ void store_weights(char* tile, const typename S::Scores& weights) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16 + lane / 4;
  mma::for_elements<S::kM, S::kN>([&](int m, int n, int e, int row, int) {
    if (e % 2 == 1) return;
    *reinterpret_cast<uint32_t*>(tile + mma::Tile<S::kOthers>::at(0, first + row, n) +
                                 lane % 4 * 4) =
        detail::round_pair(weights[m][n][e], weights[m][n][e + 1], typename S::T());
  });
}

// Two threads a row: its exponent, +inf of a row that sees nothing, and delta = rowsum(dout * out)
// - dlse, of tiles of dout and out.
template <typename S>
__device__ __forceinline__ void find_statistics(const AttentionGradient& g, const Sequence& s,
                                                int head, const char* dout, const char* out,
                                                float2* statistics) {
  using Tile = mma::Tile<S::kDim>;
  const int row = threadIdx.x / 2, half = threadIdx.x % 2;
  float sum = 0;
#pragma unroll
  for (int chunk = 0; chunk < Tile::kChunks / 2; ++chunk) {
    const uint32_t at = Tile::at(0, row, half * (Tile::kChunks / 2) + chunk);
    const uint4 a = *reinterpret_cast<const uint4*>(dout + at);
    const uint4 b = *reinterpret_cast<const uint4*>(out + at);
    const auto add = [&](uint32_t x, uint32_t y) {
      const float2 left = detail::to_floats(x, typename S::T());
      const float2 right = detail::to_floats(y, typename S::T());
      sum = fmaf(left.x, right.x, fmaf(left.y, right.y, sum));
    };
    add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  if (half != 0) return;
  float lse = -INFINITY;
  if (row < s.queries) {
    const int64_t at = first_lse(g.params.forward, s, head) + row;
    lse = static_cast<const float*>(g.params.forward.lse)[at];
    if (g.params.dlse != nullptr) sum -= static_cast<const float*>(g.params.dlse)[at];
  }
  statistics[row] = {lse == -INFINITY ? INFINITY : lse * kLog2E, sum};
}

// Writes the sums of a mask's gradient, or those of a part of its pairs, for attention_sum_mask().
template <typename S>
__device__ __forceinline__ void store_mask(const AttentionGradient& g, const Work& work, int mask,
                                           const typename S::Scores& sums) {
  const AttentionParams& params = g.params.forward;
  const portable::TilePlace<false> place({0, 0, params.queries, 0, params.keys}, 0, 0,
                                         threadIdx.x / 32 * 16);
  const bool in_parts = work.share.parts > 1;
  const int64_t first =
      (int64_t{in_parts ? static_cast<int>(blockIdx.x % work.share.parts) : 0} * work.masks +
       mask) *
      params.queries * params.keys;
  with_option_storage<float>(in_parts ? DType::kFloat32 : params.mask.dtype, [&](auto zero) {
    using Stored = decltype(zero);
    auto* to = static_cast<Stored*>(in_parts ? g.mask_sums : g.params.dmask) + first;
    mma::for_elements<S::kM, S::kN>([&](int m, int n, int e, int row, int col) {
      const int query = place.row + row, key = place.col + col;
      if (query >= params.queries || key >= params.keys) return;
      to[query * params.keys + key] = static_cast<Stored>(sums[m][n][e]);
    });
  });
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, window_blocks(kDim, true))
    attention_window_gradient(const __grid_constant__ AttentionGradient g,
                              const __grid_constant__ Work work) {
  using S = Shape<T, kDim>;
  extern __shared__ __align__(1024) char shared[];
  constexpr uint32_t kTile = S::kTileBytes, kKeys = kTile, kValues = 2 * kTile, kDout = 3 * kTile;
  constexpr uint32_t kOut = 4 * kTile, kStage = 5 * kTile, kWeights = 2 * kStage;
  constexpr uint32_t kStatistics = kWeights + 2 * S::kWeightBytes;
  const AttentionParams& params = g.params.forward;
  const int warp_row = threadIdx.x / 32 * 16;
  const Band band = band_of(params, {0, 0, params.queries, 0, params.keys});
  // Queries that see no key, and keys that no query sees, may hold a NaN.
  const Range keys = band.keys_of(0, params.queries, params.keys);
  const Range queries = band.queries_of(0, params.keys, params.queries);
  const float unit = static_cast<float>(params.scale) * kLog2E;
  const uint32_t base = shared_address(shared);
  float2* const statistics = reinterpret_cast<float2*>(shared + kStatistics);
  typename S::Scores added, sums;
  const auto load = [&](const Sequence& s, int head, int stage) {
    const auto copy = [&](const AttentionTensor& tensor, uint32_t tile, Range valid, int cols) {
      portable::copy_rows<S, S::kOwn>(base + stage * kStage + tile,
                                      row_of<const T>(tensor, s.batch, head, 0), tensor.row_stride,
                                      0, valid, cols);
    };
    copy(params.query, 0, queries, params.head_dim);
    copy(params.key, kKeys, keys, params.head_dim);
    copy(params.value, kValues, keys, params.value_dim);
    copy(g.params.dout, kDout, queries, params.value_dim);
    copy(params.out, kOut, queries, params.value_dim);
  };
  for_pairs<S>(
      work, params, load,
      [&](const Sequence& s, int head, int mask, int stage, bool is_first, bool is_last) {
        if (is_first) {
          read_mask<S>(params, band, s, head, added);
          mma::clear(sums);
        }
        const uint32_t tiles = stage * kStage;
        find_statistics<S>(g, s, head, shared + tiles + kDout, shared + tiles + kOut, statistics);
        __syncwarp();  // a warp's rows are its own

        typename S::Scores weights, gradient;
        mma::multiply_rows<T>(weights, mma::left_rows<S::kDim>(base + tiles, warp_row),
                              mma::right_rows<S::kDim>(base + tiles + kKeys));
        mma::multiply_rows<T>(gradient, mma::left_rows<S::kDim>(base + tiles + kDout, warp_row),
                              mma::right_rows<S::kDim>(base + tiles + kValues));
        add_mask<S>(weights, added, unit);
        const int row = warp_row + threadIdx.x % 32 / 4;
        const float2 of_row[2] = {statistics[row], statistics[row + 8]};
        mma::for_elements<S::kM, S::kN>([&](int m, int n, int e, int, int) {
          const float p = exp2_fast(weights[m][n][e] - of_row[e / 2].x);
          weights[m][n][e] = p;
          gradient[m][n][e] = p == 0 ? 0 : p * (gradient[m][n][e] - of_row[e / 2].y);
          sums[m][n][e] += gradient[m][n][e];
        });
        store_weights<S>(shared + kWeights, weights);
        store_weights<S>(shared + kWeights + S::kWeightBytes, gradient);
        typename S::Out dquery, dkey, dvalue;
        multiply<S>(dquery, gradient, shared, tiles + kKeys);  // with a barrier
        mma::clear(dkey);
        mma::clear(dvalue);
        const auto rows = [&](uint32_t tile) { return mma::left_rows<S::kDim>(base + tile, 0); };
        const auto columns = [&](uint32_t tile) {
          return mma::left_columns<S::kOthers>(base + tile, warp_row);
        };
        mma::multiply_columns<T, S::kOwn>(dvalue[0], columns(kWeights), rows(tiles + kDout));
        mma::multiply_columns<T, S::kOwn>(dkey[0], columns(kWeights + S::kWeightBytes),
                                          rows(tiles));
        const float scale = static_cast<float>(params.scale);
        mma::for_elements<S::kM, S::kDim / 8>([&](int m, int n, int e, int, int) {
          dquery[m][n][e] *= scale;
          dkey[m][n][e] *= scale;
        });
        const auto store = [&](const AttentionTensor& to, uint32_t tile, const typename S::Out& acc,
                               int end, int cols) {
          portable::store_tile<S>(to, s, head, 0, shared + tiles + tile, acc, 0, end, cols);
        };
        store(g.params.dquery, kOut, dquery, s.queries, params.head_dim);
        store(g.params.dkey, kKeys, dkey, s.keys, params.head_dim);
        store(g.params.dvalue, kValues, dvalue, s.keys, params.value_dim);
        if (is_last && g.params.dmask != nullptr) store_mask<S>(g, work, mask, sums);
      });
}

// Launches a kernel for the pairs of a call, `blocks` at once.
template <typename Params>
cudaError_t launch_pairs(void (*kernel)(Params, Work), const Params& params, const MaskShare& share,
                         int blocks, int shared_bytes, cudaStream_t stream) {
  const int32_t masks = share.batch * share.heads;
  const auto of_block =
      static_cast<int32_t>(share.parts > 1 ? 1 : ceil_div(masks, std::min(blocks, masks)));
  const dim3 grid(static_cast<unsigned>(ceil_div(masks, of_block) * share.parts));
  return detail::launch(kernel, grid, kThreads, {shared_bytes}, stream, params,
                        Work{share, masks, of_block});
}

// run(shape) with the shape of a call's kernels.
template <typename Run>
cudaError_t with_shape(const AttentionParams& params, Run run) {
  return with_dtype<__half, __nv_bfloat16>(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    return window_columns(params) == 32 ? run(Shape<T, 32>()) : run(Shape<T, 64>());
  });
}

}  // namespace window

cudaError_t attention_forward_window(const AttentionParams& params, cudaStream_t stream) {
  using namespace window;
  return with_shape(params, [&](auto shape) {
    using S = decltype(shape);
    constexpr int kBlocks = kSharedBy * window_blocks(S::kDim, false);
    return launch_pairs(attention_window_forward<typename S::T, S::kDim>, params,
                        window_share(params, kBlocks), kBlocks, 6 * S::kTileBytes, stream);
  });
}

cudaError_t attention_backward_window(const AttentionGradient& gradient, cudaStream_t stream) {
  using namespace window;
  return with_shape(gradient.params.forward, [&](auto shape) {
    using S = decltype(shape);
    constexpr int kBytes = 10 * S::kTileBytes + 2 * S::kWeightBytes + S::kOwn * sizeof(float2);
    return launch_pairs(attention_window_gradient<typename S::T, S::kDim>, gradient, gradient.share,
                        kSharedBy * window_blocks(S::kDim, true), kBytes, stream);
  });
}

}  // namespace fused_norm
