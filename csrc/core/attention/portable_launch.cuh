// Launches the portable tier's kernels.
#pragma once

#include <algorithm>
#include <climits>

#include "core/attention/portable.h"
#include "core/attention/portable_forward.cuh"
#include "core/common/launch.cuh"

namespace fused_norm {
namespace portable {

// A block for each tile of `rows` rows of each head; nothing is launched for no rows.
template <typename Params, typename... Rest>
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

template <typename T, bool kGeneral>
cudaError_t forward(const AttentionParams& params, const DeviceProperties& device,
                    cudaStream_t stream) {
  const int dim = std::max(params.head_dim, params.value_dim);
  if (dim <= 64) return launch_forward<ForwardShape<T, 64, 4, 2, 64, kGeneral>>(params, stream);
  if (dim <= 128) return launch_forward<ForwardShape<T, 128, 4, 2, 64, kGeneral>>(params, stream);
  return launch_forward<ForwardShape<T, 256, 4, 1, 64, kGeneral>>(params, stream);
}

}  // namespace portable
}  // namespace fused_norm
