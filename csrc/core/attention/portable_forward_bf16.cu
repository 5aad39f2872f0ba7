#include "core/attention/portable_launch.cuh"

namespace fused_norm {

template <>
cudaError_t attention_forward_portable<__nv_bfloat16>(const AttentionParams& params,
                                                      cudaStream_t stream) {
  return attention_scores_are_plain(params)
             ? portable::forward<__nv_bfloat16, false>(params, stream)
             : portable::forward<__nv_bfloat16, true>(params, stream);
}

}  // namespace fused_norm
