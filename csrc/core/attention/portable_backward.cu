// The portable tier's backward kernels. A block has a tile of queries, for dquery, or of keys, for
// dkey and dvalue, and walks what the tile sees in a fixed order: no block adds to another's
// result. Both make the scores again, and the weights of the second product of a pair never leave
// registers: the accumulators of the first have the layout of its left factor.
#include "core/attention/portable_options.cuh"

namespace fused_norm {
namespace portable {

// Exponents or delta of a thread's queries: of its rows, in registers, or where keys are rows of
// its columns, in shared memory.
template <typename S>
struct QueryStatistic {
  float of_row[2 * S::kM];
  const float2* of_column;

  __device__ __forceinline__ float at(int m, int n, int e) const {
    if (!S::kOfKeys) return of_row[2 * m + e / 2];
    return e % 2 == 0 ? of_column[n * 4].x : of_column[n * 4].y;
  }
};

// Turns query . key into probabilities, and the product of dout and value, which `multiply_values`
// makes, into the derivative by query . key * scale (kBySoftcapped: by the score that the mask is
// added to). Probabilities have their dropout on return. `unit`: scores times it are exponents.
template <typename S, typename MultiplyValues>
__device__ __forceinline__ void differentiate(typename S::Scores& scores,
                                              typename S::Scores& gradient,
                                              const ScoreTile<S>& tile, float unit,
                                              const QueryStatistic<S>& exponents,
                                              const QueryStatistic<S>& delta,
                                              MultiplyValues multiply_values) {
  constexpr int kM = S::kM, kN = S::kN;
  const auto exponentiate = [&] {
    tile.hide_outside(scores);
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
      scores[m][n][e] = exp2_fast(fmaf(scores[m][n][e], unit, -exponents.at(m, n, e)));
    });
  };
  const auto subtract_delta = [&] {
    mma::for_elements<kM, kN>(
        [&](int m, int n, int e, int, int) { gradient[m][n][e] -= delta.at(m, n, e); });
  };
  if constexpr (!S::kGeneral) {
    // The exponentials can run beside the products.
    exponentiate();
    multiply_values();
    subtract_delta();
    mma::for_elements<kM, kN>(
        [&](int m, int n, int e, int, int) { gradient[m][n][e] *= scores[m][n][e]; });
  } else {
    multiply_values();
    const KeptElements<S> kept(tile);
    kept.apply(gradient);
    subtract_delta();
    unit = tile.apply_options(scores, S::kBySoftcapped ? nullptr : &gradient);
    exponentiate();
    // Hidden keys may hold a NaN.
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
      const float p = scores[m][n][e];
      gradient[m][n][e] = p == 0 ? 0 : p * gradient[m][n][e];
    });
    kept.apply(scores);
  }
}

// Walks the tiles of the other side in `range` against the own one: keys against queries, or
// kOfKeys the queries of one head against the keys. use(probabilities, gradient, tile) gets each
// tile's scores differentiated, and how far in shared memory the other side's rows are, two tensors
// one behind the other. Without `of_scores` there is no gradient.
template <typename S, typename Use>
__device__ __forceinline__ void walk(const AttentionGradient& g, char* shared, const Sequence& s,
                                     int head, int own, const Range& range, bool of_scores,
                                     Use use) {
  using T = typename S::T;
  constexpr bool kOfKeys = S::kOfKeys;
  constexpr int kDim = S::kDim, kOthers = S::kOthers;
  const AttentionParams& params = g.params.forward;
  const int warp_row = threadIdx.x / 32 * S::kM * 16;
  const float unit = static_cast<float>(params.scale) * kLog2E;
  ScoreTile<S> score_tile{{params, g.params.dout, s, head, range, range}};
  const Head<float>& h = score_tile.head;
  const uint32_t own_tile = shared_address(shared);
  const auto own_rows = mma::left_rows<kDim>(own_tile, warp_row);
  // Of queries, two floats each: behind the tiles of the other side, or a thread's own.
  constexpr int kStatistics = 2 * S::kOwnBytes + S::kStages * 2 * S::kOtherBytes;
  const float* all_exponents = static_cast<const float*>(g.exponents) + first_lse(params, s, head);
  const float* all_delta = static_cast<const float*>(g.delta) + first_lse(params, s, head);
  const auto copy_others = [&](int row, int stage) {
    const uint32_t tile = own_tile + 2 * S::kOwnBytes + stage * 2 * S::kOtherBytes;
    copy_rows<S, kOthers>(tile, kOfKeys ? h.query : h.key, row);
    copy_rows<S, kOthers>(tile + S::kOtherBytes, kOfKeys ? h.dout : h.value, row);
    if (kOfKeys && threadIdx.x < 2 * kOthers) {
      const int query = row + threadIdx.x % kOthers;
      copy_async<4>(own_tile + kStatistics + (stage * 2 * kOthers + threadIdx.x) * 4,
                    (threadIdx.x < kOthers ? all_exponents : all_delta) + query, query < s.queries);
    }
    detail::commit_copies();
  };
  QueryStatistic<S> exponents, delta;
#pragma unroll
  for (int r = 0; r < 2 * S::kM && !kOfKeys; ++r) {
    const int row = own + warp_row + threadIdx.x % 32 / 4 + r * 8;
    exponents.of_row[r] = row < s.queries ? all_exponents[row] : INFINITY;
    delta.of_row[r] = row < s.queries ? all_delta[row] : 0;
  }

  int other = range.begin / kOthers * kOthers, stage = 0;
  __syncthreads();  // what was before is done with the tiles
  copy_others(other, 0);
  for (; other < range.end; other += kOthers) {
    detail::wait_for_copies<0>();
    __syncthreads();
    if (S::kStages == 2 && other + kOthers < range.end) copy_others(other + kOthers, stage ^ 1);
    score_tile.move_to(kOfKeys ? other : own, kOfKeys ? own : other);
    if (S::kGeneral) score_tile.prefetch_mask();
    const uint32_t tile = 2 * S::kOwnBytes + stage * 2 * S::kOtherBytes;
    const auto other_rows = mma::right_rows<kDim>(own_tile + tile);
    typename S::Scores scores, gradient;
    mma::multiply_rows<T>(scores, own_rows, other_rows);
    exponents.of_column =
        reinterpret_cast<const float2*>(shared + kStatistics) + stage * kOthers + threadIdx.x % 4;
    delta.of_column = exponents.of_column + kOthers / 2;
    differentiate<S>(scores, gradient, score_tile, unit, exponents, delta, [&] {
      if (of_scores) {
        mma::multiply_rows<T>(gradient, own_rows.further(S::kOwnBytes),
                              other_rows.further(S::kOtherBytes));
      } else {
        mma::clear(gradient);
      }
    });
    use(scores, gradient, tile);
    if constexpr (S::kStages == 2) {
      stage ^= 1;
    } else if (other + kOthers < range.end) {
      __syncthreads();
      copy_others(other + kOthers, 0);
    }
  }
  detail::wait_for_copies<0>();
}

// dquery of a tile of queries, or kOfKeys dkey and dvalue of a tile of keys, for the heads of its
// group in order; of two parts the first is dvalue, the second dkey. `clean` is forward_tile's; so
// is what it returns.
template <typename S>
__device__ __forceinline__ bool gradient_tile(const AttentionGradient& g, char* shared,
                                              const Sequence& s, int own_head, int own, int part,
                                              bool clean) {
  using T = typename S::T;
  constexpr bool kOfKeys = S::kOfKeys, kBoth = S::kParts == 1;
  constexpr int kDim = S::kDim, kM = S::kM, kColumns = kDim / 8;
  const AttentionParams& params = g.params.forward;
  const int own_end = min(own + S::kOwn, kOfKeys ? s.keys : s.queries);
  const Range range =
      kOfKeys ? s.band.queries_of(own, own_end, s.queries) : s.band.keys_of(own, own_end, s.keys);
  Range valid{own, own_end};
  if (kOfKeys) {
    // Keys that no query of the call sees are zeros: they may hold a NaN.
    const Range seen = s.band.keys_of(0, s.queries, s.keys);
    valid = {max(own, seen.begin), min(own_end, seen.end)};
  }
  const int group = params.heads / params.kv_heads, head = kOfKeys ? own_head * group : own_head;
  const Head<float> h(params, g.params.dout, s, head, valid, valid);
  copy_rows<S, S::kOwn>(shared_address(shared), kOfKeys ? h.key : h.query, own);
  copy_rows<S, S::kOwn>(shared_address(shared) + S::kOwnBytes, kOfKeys ? h.value : h.dout, own);
  detail::commit_copies();
  const bool of_scores = kBoth || part == 1, of_values = kOfKeys && (kBoth || part == 0);
  typename S::Out acc, dvalue;
  mma::clear(acc);
  mma::clear(dvalue);
  const auto add_head = [&](int head) {
    walk<S>(g, shared, s, head, own, range, of_scores,
            [&](const auto& weights, const auto& gradient, uint32_t tile) {
              if (S::kRepeats && clean) {
                __syncthreads();
                clear_unseen_rows<S>(shared + tile, gradient);
              }
              const auto rows = mma::left_rows<kDim>(shared_address(shared) + tile, 0);
              if (of_values) {
                mma::multiply_weights<T>(kBoth ? dvalue : acc, weights,
                                         rows.further(S::kOtherBytes));
              }
              if (of_scores) mma::multiply_weights<T>(acc, gradient, rows);
            });
  };
  for (int i = 0; i < (kOfKeys ? group : 1); ++i) add_head(head + i);

  const bool has_nan = S::kRepeats && mma::has_nan(acc);
  const int begin = kOfKeys ? s.key_begin : s.query_begin;
  if (of_values) {
    store_tile<S>(g.params.dvalue, s, own_head, begin, shared, kBoth ? dvalue : acc, own, own_end,
                  params.value_dim);
  }
  if (of_scores) {
    const float scale = static_cast<float>(params.scale);
    mma::for_elements<kM, kColumns>([&](int m, int n, int e, int, int) { acc[m][n][e] *= scale; });
    store_tile<S>(kOfKeys ? g.params.dkey : g.params.dquery, s, own_head, begin, shared, acc, own,
                  own_end, params.head_dim);
  }
  return has_nan;
}

// A tile of an additive mask sums what its elements serve, in order.
template <typename S>
__device__ __forceinline__ void mask_gradient_tile(const AttentionGradient& g, char* shared,
                                                   const Place& place) {
  typename S::Scores sums;
  mma::clear(sums);
  for_served<S::kOwn, S::kOthers>(
      g.params, place, [&](const Sequence& s, int head, int query, const Range& keys) {
        __syncthreads();  // the tiles before are done with
        const Head<float> h(g.params.forward, g.params.dout, s, head, {query, s.queries}, keys);
        copy_rows<S, S::kOwn>(shared_address(shared), h.query, query);
        copy_rows<S, S::kOwn>(shared_address(shared) + S::kOwnBytes, h.dout, query);
        detail::commit_copies();
        walk<S>(g, shared, s, head, query, keys, true,
                [&](const auto&, const auto& gradient, uint32_t) {
                  mma::for_elements<S::kM, S::kN>(
                      [&](int m, int n, int e, int, int) { sums[m][n][e] += gradient[m][n][e]; });
                });
      });
  constexpr int kPitch = S::kOthers + 1;
  float* tile = reinterpret_cast<float*>(shared);
  __syncthreads();
  mma::for_elements<S::kM, S::kN>([&](int m, int n, int e, int row, int col) {
    const int lane = threadIdx.x % 32;
    tile[(threadIdx.x / 32 * S::kM * 16 + row + lane / 4) * kPitch + col + lane % 4 * 2] =
        sums[m][n][e];
  });
  __syncthreads();
  store_mask_tile<S::kOwn, S::kOthers>(g.params, place, tile, kPitch);
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    attention_portable_backward(const __grid_constant__ AttentionGradient g, int tiles, int parts) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (S::kBySoftcapped) {
    mask_gradient_tile<S>(g, shared, place_of(tiles, parts, g.params.mask_shape[1]));
  } else {
    run_tiles<S>(g.params.forward, tiles, parts,
                 [&](const Sequence& s, int head, int row, int part, bool clean) {
                   return gradient_tile<S>(g, shared, s, head, row, part, clean);
                 });
  }
}

}  // namespace portable

template <typename T>
cudaError_t attention_backward_portable(const AttentionGradient& g, cudaStream_t stream) {
  using namespace portable;
  const auto kernel_of = [](auto shape) { return attention_portable_backward<decltype(shape)>; };
  cudaError_t error = launch<T, Kernel::kQueryGradient>(g, stream, kernel_of);
  if (error == cudaSuccess) error = launch<T, Kernel::kKeyGradient>(g, stream, kernel_of);
  if (error == cudaSuccess) error = launch<T, Kernel::kMaskGradient>(g, stream, kernel_of);
  return error;
}

template cudaError_t attention_backward_portable<__nv_bfloat16>(const AttentionGradient&,
                                                                cudaStream_t);
template cudaError_t attention_backward_portable<__half>(const AttentionGradient&, cudaStream_t);

}  // namespace fused_norm
