#include "core/attention/portable_launch.cuh"

namespace fused_norm {

template <>
cudaError_t attention_backward_portable<__half>(const AttentionGradient& g, cudaStream_t stream) {
  return attention_scores_are_plain(g.params.forward) ? portable::backward<__half, false>(g, stream)
                                                      : portable::backward<__half, true>(g, stream);
}

template <>
cudaError_t attention_mask_gradient_portable<__half>(const AttentionGradient& g,
                                                     cudaStream_t stream) {
  return portable::mask_gradient<__half>(g, stream);
}

}  // namespace fused_norm
