#include "core/attention/portable_launch.cuh"

namespace fused_norm {

template <>
cudaError_t attention_forward_portable<__half>(const AttentionParams& params, cudaStream_t stream) {
  return attention_scores_are_plain(params) ? portable::forward<__half, false>(params, stream)
                                            : portable::forward<__half, true>(params, stream);
}

}  // namespace fused_norm
