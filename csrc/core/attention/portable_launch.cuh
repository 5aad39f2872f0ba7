// Launches the portable tier's kernels.
#pragma once

#include <algorithm>
#include <climits>
#include <type_traits>

#include "core/attention/portable.h"
#include "core/attention/portable_backward.cuh"
#include "core/attention/portable_forward.cuh"
#include "core/attention/portable_mask_gradient.cuh"
#include "core/common/launch.cuh"

namespace fused_norm {
namespace portable {

// A block for each tile of `rows` rows of each head; nothing is launched for no rows.
template <typename Params>
cudaError_t launch_tiles(void (*kernel)(Params, int), const Params& params, int rows, int tile,
                         int heads, int batch, int threads, int shared_bytes, cudaStream_t stream) {
  const int tiles = static_cast<int>(std::max<int64_t>(1, ceil_div(rows, tile)));
  const int64_t blocks = int64_t{tiles} * heads * batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  return detail::launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), {shared_bytes},
                        stream, params, tiles);
}

template <typename S>
cudaError_t launch_forward(const AttentionParams& params, cudaStream_t stream) {
  return launch_tiles(attention_portable_forward<S>, params, params.queries, S::kQueries,
                      params.heads, params.batch, S::kThreads, S::kSharedBytes, stream);
}

// Calls launch(std::integral_constant<int, i>{}) with the index of the call's tiles.
template <typename Launch>
cudaError_t with_tiles(const AttentionParams& params, Launch launch) {
  switch (attention_tiles_index(params.head_dim, params.value_dim)) {
    case 0:
      return launch(std::integral_constant<int, 0>());
    case 1:
      return launch(std::integral_constant<int, 1>());
    default:
      return launch(std::integral_constant<int, 2>());
  }
}

template <typename T, bool kGeneral>
cudaError_t forward(const AttentionParams& params, cudaStream_t stream) {
  return with_tiles(params, [&](auto i) {
    constexpr AttentionTiles t = kForwardTiles[kGeneral][decltype(i)::value];
    return launch_forward<ForwardShape<T, t.dim, t.warps, t.fragments, t.others, kGeneral>>(params,
                                                                                            stream);
  });
}

template <typename S>
cudaError_t launch_query_gradient(const AttentionGradient& g, cudaStream_t stream) {
  const AttentionParams& params = g.params.forward;
  if (g.params.dquery.data == nullptr) return cudaSuccess;
  return launch_tiles(attention_portable_query_gradient<S>, g, params.queries, S::kOwn,
                      params.heads, params.batch, S::kThreads, S::kSharedBytes, stream);
}

template <typename S, bool kBoth>
cudaError_t launch_key_gradient(const AttentionGradient& g, cudaStream_t stream) {
  const AttentionParams& params = g.params.forward;
  if (g.params.dkey.data == nullptr && g.params.dvalue.data == nullptr) return cudaSuccess;
  return launch_tiles(attention_portable_key_gradient<S, kBoth>, g, params.keys,
                      kBoth ? S::kOwn : S::kOwn / 2, params.kv_heads, params.batch, S::kThreads,
                      S::kSharedBytes, stream);
}

template <typename T, bool kGeneral>
cudaError_t backward(const AttentionGradient& g, cudaStream_t stream) {
  return with_tiles(g.params.forward, [&](auto i) {
    constexpr AttentionTiles q = kQueryGradientTiles[kGeneral][decltype(i)::value];
    const cudaError_t error = launch_query_gradient<
        BackwardShape<T, q.dim, q.warps, q.fragments, q.others, q.stages, kGeneral>>(g, stream);
    if (error != cudaSuccess) return error;
    constexpr AttentionTiles k = kKeyGradientTiles[kGeneral][decltype(i)::value];
    return launch_key_gradient<
        BackwardShape<T, k.dim, k.warps, k.fragments, k.others, k.stages, kGeneral>,
        makes_both_key_gradients(k)>(g, stream);
  });
}

template <typename S>
cudaError_t launch_mask_gradient(const AttentionGradient& g, cudaStream_t stream) {
  const int* shape = g.params.mask_shape;
  const int64_t key_tiles = ceil_div(shape[3], S::kOthers);
  const int64_t query_tiles = ceil_div(shape[2], S::kOwn);
  const int64_t blocks = key_tiles * query_tiles * shape[1] * shape[0];
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  return detail::launch(attention_portable_mask_gradient<S>, dim3(static_cast<unsigned>(blocks)),
                        dim3(S::kThreads), {S::kSharedBytes}, stream, g,
                        static_cast<int>(key_tiles), static_cast<int>(query_tiles));
}

template <typename T>
cudaError_t mask_gradient(const AttentionGradient& g, cudaStream_t stream) {
  return with_tiles(g.params.forward, [&](auto i) {
    constexpr AttentionTiles t = kMaskGradientTiles[decltype(i)::value];
    return launch_mask_gradient<
        BackwardShape<T, t.dim, t.warps, t.fragments, t.others, t.stages, true>>(g, stream);
  });
}

}  // namespace portable
template <typename T>
cudaError_t attention_forward_portable(const AttentionParams& params, cudaStream_t stream) {
  return attention_scores_are_plain(params) ? portable::forward<T, false>(params, stream)
                                            : portable::forward<T, true>(params, stream);
}

template <typename T>
cudaError_t attention_backward_portable(const AttentionGradient& g, cudaStream_t stream) {
  const bool plain = attention_scores_are_plain(g.params.forward);
  const cudaError_t error =
      plain ? portable::backward<T, false>(g, stream) : portable::backward<T, true>(g, stream);
  if (error != cudaSuccess || g.params.dmask == nullptr) return error;
  return portable::mask_gradient<T>(g, stream);
}

}  // namespace fused_norm
