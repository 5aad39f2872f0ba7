#include "core/attention/portable_launch.cuh"

namespace fused_norm {

template <>
cudaError_t attention_backward_portable<__nv_bfloat16>(const AttentionGradient& g,
                                                       cudaStream_t stream) {
  return attention_scores_are_plain(g.params.forward)
             ? portable::backward<__nv_bfloat16, false>(g, stream)
             : portable::backward<__nv_bfloat16, true>(g, stream);
}

template <>
cudaError_t attention_mask_gradient_portable<__nv_bfloat16>(const AttentionGradient& g,
                                                            cudaStream_t stream) {
  return portable::mask_gradient<__nv_bfloat16>(g, stream);
}

}  // namespace fused_norm
