// The portable tier's backward kernels. A block has a tile of queries, for dquery, or of keys, for
// dkey and dvalue, and walks what the tile sees in a fixed order: no block adds to another's
// result. Both make the scores again, and the weights of the second product of a pair never leave
// registers: the accumulators of the first have the layout of its left factor.
#include "core/attention/portable.cuh"

namespace fused_norm {
namespace portable {

// Exponents or delta of a thread's queries: of its rows, or where keys are rows of its columns.
template <typename S>
struct QueryStatistic {
  float of_query[S::kOfKeys ? 2 * S::kN : 2 * S::kM];

  __device__ __forceinline__ float at(int m, int n, int e) const {
    return of_query[S::kOfKeys ? 2 * n + e % 2 : 2 * m + e / 2];
  }
  // The first `rows` from `from` on, its first row's.
  __device__ __forceinline__ void load_rows(const float* from, int rows, float beyond) {
#pragma unroll
    for (int r = 0; r < 2 * S::kM; ++r) of_query[r] = r * 8 < rows ? from[r * 8] : beyond;
  }
  // For a tile: the same, or where queries are columns those from `from` on, in shared memory.
  __device__ __forceinline__ QueryStatistic of_tile(const float* from) const {
    QueryStatistic loaded = *this;
#pragma unroll
    for (int n = 0; S::kOfKeys && n < S::kN; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(from + n * 8);
      loaded.of_query[2 * n] = pair.x, loaded.of_query[2 * n + 1] = pair.y;
    }
    return loaded;
  }
};

// Turns query . key into probabilities, and the product of dout and value, which `multiply_values`
// makes, into the derivative by query . key * scale (kBySoftcapped: by the score that the mask is
// added to). Probabilities have their dropout on return. `unit`: scores times it are exponents.
template <typename S, typename Exponents, typename Delta, typename MultiplyValues>
__device__ __forceinline__ void differentiate(typename S::Scores& scores,
                                              typename S::Scores& gradient,
                                              const ScoreRules<float>& rules, const Band& band,
                                              const TilePlace<S::kOfKeys>& place, bool all_is_seen,
                                              float unit, Exponents exponents_of, Delta delta_of,
                                              MultiplyValues multiply_values) {
  constexpr int kM = S::kM, kN = S::kN;
  const auto exponentiate = [&] {
    if (!all_is_seen) hide_outside(scores, band, place);
    const QueryStatistic<S> exponents = exponents_of();
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
      scores[m][n][e] = exp2_fast(fmaf(scores[m][n][e], unit, -exponents.at(m, n, e)));
    });
  };
  const auto subtract_delta = [&] {
    const QueryStatistic<S> delta = delta_of();
    mma::for_elements<kM, kN>(
        [&](int m, int n, int e, int, int) { gradient[m][n][e] -= delta.at(m, n, e); });
  };
  if constexpr (!S::kGeneral) {
    // The exponentials can run beside the products.
    exponentiate();
    multiply_values();
    subtract_delta();
    if (!all_is_seen) {
      // A query that sees nothing may have a NaN in dout.
      mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
        if (scores[m][n][e] == 0) gradient[m][n][e] = 0;
      });
    }
    mma::for_elements<kM, kN>(
        [&](int m, int n, int e, int, int) { gradient[m][n][e] *= scores[m][n][e]; });
  } else {
    multiply_values();
    DroppedTile<S::kOfKeys, kM, kN> kept;
    kept.draw(rules, place);
    const float dropout_scale = static_cast<float>(rules.params.dropout_scale);
    kept.apply(gradient, dropout_scale);
    subtract_delta();
    unit =
        apply_options<typename S::T>(scores, S::kBySoftcapped ? nullptr : gradient, rules, place);
    exponentiate();
    // Hidden keys may hold a NaN.
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
      const float p = scores[m][n][e];
      gradient[m][n][e] = p == 0 ? 0 : p * gradient[m][n][e];
    });
    kept.apply(scores, dropout_scale);
  }
}

// A side of the product: query and dout of a head, or its key and value.
template <typename T, bool kOfKeys>
struct Side {
  const AttentionTensor &first, &second;
  const T *first_rows, *second_rows;
  int first_cols, second_cols;

  __device__ __forceinline__ Side(const AttentionGradient& g, const Sequence& s, int head)
      : first(kOfKeys ? g.params.forward.key : g.params.forward.query),
        second(kOfKeys ? g.params.forward.value : g.params.dout),
        first_rows(row_of<const T>(first, s.batch, head, kOfKeys ? s.key_begin : s.query_begin)),
        second_rows(row_of<const T>(second, s.batch, head, kOfKeys ? s.key_begin : s.query_begin)),
        first_cols(g.params.forward.head_dim),
        second_cols(g.params.forward.value_dim) {}

  // Starts to copy rows [row, row + kRows) of both, one behind the other; zeros outside `valid`.
  template <typename S, int kRows>
  __device__ __forceinline__ void copy(uint32_t to, int row, const Range& valid) const {
    copy_rows<S, kRows>(to, first_rows, first.row_stride, row, valid, first_cols);
    copy_rows<S, kRows>(to + kRows * S::kDim * 2, second_rows, second.row_stride, row, valid,
                        second_cols);
  }
};

// Walks the tiles of the other side in `range` against the own one: keys against queries, or
// kOfKeys the queries of one head against the keys. use(probabilities, gradient, tile, address)
// gets each tile's scores differentiated, and where the other side's rows are, two tensors one
// behind the other. Without `of_scores` there is no gradient.
template <typename S, typename Use>
__device__ __forceinline__ void walk(const AttentionGradient& g, char* shared, const Sequence& s,
                                     int head, int own, const Range& range, bool of_scores,
                                     Use use) {
  using T = typename S::T;
  constexpr bool kOfKeys = S::kOfKeys;
  constexpr int kDim = S::kDim, kOthers = S::kOthers;
  const AttentionParams& params = g.params.forward;
  const int warp_row = threadIdx.x / 32 * S::kM * 16;
  const Band band = band_of(params, s);
  const ScoreRules<float> rules(params, s, head);
  const float unit = static_cast<float>(params.scale) * kLog2E;
  const Side<T, !kOfKeys> others(g, s, kOfKeys ? head : head / (params.heads / params.kv_heads));
  const uint32_t own_tile = shared_address(shared);
  const uint32_t other_tiles = own_tile + 2 * S::kOwnBytes;
  const auto own_rows = mma::left_rows<kDim>(own_tile, warp_row);
  // Of queries, two floats each: behind the tiles of the other side, or a thread's own.
  constexpr int kStatistics = 2 * S::kOwnBytes + S::kStages * 2 * S::kOtherBytes;
  const float* delta = statistics_of<float>(g, s, head);
  const float* exponents = delta + query_statistics(g.of_statistics);
  const auto copy_others = [&](int row, int stage) {
    others.template copy<S, kOthers>(other_tiles + stage * 2 * S::kOtherBytes, row, range);
    if (kOfKeys && threadIdx.x < 2 * kOthers) {
      const int query = row + threadIdx.x % kOthers;
      copy_first<4>(own_tile + kStatistics + (stage * 2 * kOthers + threadIdx.x) * 4,
                    (threadIdx.x < kOthers ? exponents : delta) + query, query < s.queries ? 4 : 0);
    }
    commit_copies();
  };
  QueryStatistic<S> row_exponents, row_delta;
  if constexpr (!kOfKeys) {
    const int row = own + warp_row + threadIdx.x % 32 / 4;
    row_exponents.load_rows(exponents + row, s.queries - row, INFINITY);
    row_delta.load_rows(delta + row, s.queries - row, 0);
  }

  int other = range.begin / kOthers * kOthers, stage = 0;
  __syncthreads();  // what was before is done with the tiles
  copy_others(other, 0);
  for (; other < range.end; other += kOthers) {
    wait_for_copies<0>();
    __syncthreads();
    if (S::kStages == 2 && other + kOthers < range.end) copy_others(other + kOthers, stage ^ 1);
    const int query = kOfKeys ? other : own, key = kOfKeys ? own : other;
    if constexpr (S::kGeneral) {
      prefetch_mask<kOfKeys ? kOthers : S::kOwn>(rules, kOfKeys ? query + kOthers : query,
                                                 s.queries, kOfKeys ? key : key + kOthers, s.keys);
    }
    const uint32_t tile = other_tiles + stage * 2 * S::kOtherBytes;
    const auto other_rows = mma::right_rows<kDim>(tile);
    typename S::Scores scores, gradient;
    mma::multiply_rows<T>(scores, own_rows, other_rows);
    const int query_end = kOfKeys ? query + kOthers : min(query + S::kOwn, s.queries);
    const int key_end = key + (kOfKeys ? S::kOwn : kOthers);
    const bool all_is_seen = key_end <= s.keys && query_end <= s.queries &&
                             band.sees_all(query, query_end, key, key_end);
    const TilePlace<kOfKeys> place(s, query, key, warp_row);
    const float* of_columns = reinterpret_cast<const float*>(shared + kStatistics) +
                              stage * 2 * kOthers + threadIdx.x % 4 * 2;
    differentiate<S>(
        scores, gradient, rules, band, place, all_is_seen, unit,
        [&] { return row_exponents.of_tile(of_columns); },
        [&] { return row_delta.of_tile(of_columns + kOthers); },
        [&] {
          if (of_scores) {
            mma::multiply_rows<T>(gradient, own_rows.further(S::kOwnBytes),
                                  other_rows.further(S::kOtherBytes));
          } else {
            mma::clear(gradient);
          }
        });
    use(scores, gradient, shared + (tile - own_tile), tile);
    if constexpr (S::kStages == 2) {
      stage ^= 1;
    } else if (other + kOthers < range.end) {
      __syncthreads();
      copy_others(other + kOthers, 0);
    }
  }
  wait_for_copies<0>();
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
  const Band band = band_of(params, s);
  const int own_end = min(own + S::kOwn, kOfKeys ? s.keys : s.queries);
  const Range range =
      kOfKeys ? band.queries_of(own, own_end, s.queries) : band.keys_of(own, own_end, s.keys);
  Range valid{own, own_end};
  if (kOfKeys) {
    // Keys that no query of the call sees are zeros: they may hold a NaN.
    const Range seen = band.keys_of(0, s.queries, s.keys);
    valid = {max(own, seen.begin), min(own_end, seen.end)};
  }
  Side<T, kOfKeys>(g, s, own_head).template copy<S, S::kOwn>(shared_address(shared), own, valid);
  commit_copies();
  const bool of_scores = kBoth || part == 1, of_values = kOfKeys && (kBoth || part == 0);
  typename S::Out acc, dvalue;
  mma::clear(acc);
  mma::clear(dvalue);
  const auto add_head = [&](int head) {
    walk<S>(g, shared, s, head, own, range, of_scores,
            [&](const auto& weights, const auto& gradient, char* others, uint32_t tile) {
              if (S::kRepeats && clean) {
                __syncthreads();
                clear_unseen_rows<S>(others, gradient);
              }
              const auto rows = mma::left_rows<kDim>(tile, 0);
              if (of_values) {
                mma::multiply_weights<T>(kBoth ? dvalue : acc, weights,
                                         rows.further(S::kOtherBytes));
              }
              if (of_scores) {
                mma::multiply_weights<T>(acc, gradient, rows);
              }
            });
  };
  const int group = params.heads / params.kv_heads;
  if (!kOfKeys) add_head(own_head);
  for (int i = 0; kOfKeys && i < group; ++i) add_head(own_head * group + i);

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

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    attention_portable_gradient(const __grid_constant__ AttentionGradient g, int tiles, int parts) {
  extern __shared__ __align__(1024) char shared[];
  run_tiles<S>(g.params.forward, tiles, parts,
               [&](const Sequence& s, int head, int row, int part, bool clean) {
                 return gradient_tile<S>(g, shared, s, head, row, part, clean);
               });
}

// A block has a tile of an additive mask and sums what its elements serve, in order.
template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    attention_portable_mask_gradient(const __grid_constant__ AttentionGradient g, int key_tiles,
                                     int query_tiles) {
  extern __shared__ __align__(1024) char shared[];
  const Place place = place_of(key_tiles, query_tiles, g.params.mask_shape[1]);
  typename S::Scores sums;
  mma::clear(sums);
  for_served<S::kOwn, S::kOthers>(
      g, place, [&](const Sequence& s, int head, int query, const Range& keys) {
        __syncthreads();  // the tiles before are done with
        Side<typename S::T, false>(g, s, head)
            .template copy<S, S::kOwn>(shared_address(shared), query,
                                       {query, min(query + S::kOwn, s.queries)});
        commit_copies();
        walk<S>(g, shared, s, head, query, keys, true,
                [&](const auto&, const auto& gradient, char*, uint32_t) {
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
  store_mask_tile<S::kOwn, S::kOthers>(g, place, tile, kPitch);
}

}  // namespace portable

cudaError_t attention_backward_portable(const AttentionGradient& g, cudaStream_t stream) {
  using namespace portable;
  const AttentionParams& forward = g.params.forward;
  const auto launch = [&](auto shape) {
    return launch_shape(shape, attention_portable_gradient<decltype(shape)>, g, forward, stream);
  };
  cudaError_t error = cudaSuccess;
  if (g.params.dquery.data != nullptr) error = with_shape<Kernel::kQueryGradient>(forward, launch);
  if (error == cudaSuccess && (g.params.dkey.data || g.params.dvalue.data)) {
    error = with_shape<Kernel::kKeyGradient>(forward, launch);
  }
  if (error == cudaSuccess && g.params.dmask != nullptr) {
    error = with_shape<Kernel::kMaskGradient>(forward, [&](auto shape) {
      using S = decltype(shape);
      const int* mask = g.params.mask_shape;
      return launch_tiles(attention_portable_mask_gradient<S>, g, tiles_of(mask[3], S::kOthers),
                          tiles_of(mask[2], S::kOwn), mask[1], mask[0] * g.share.parts, S::kThreads,
                          S::kSharedBytes, stream);
    });
  }
  return error;
}

}  // namespace fused_norm
