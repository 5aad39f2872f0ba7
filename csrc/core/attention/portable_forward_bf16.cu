#include "core/attention/portable_launch.cuh"

namespace fused_norm {

template <>
cudaError_t attention_forward_portable<__nv_bfloat16>(const AttentionParams& params,
                                                      const DeviceProperties& device,
                                                      cudaStream_t stream) {
  return attention_scores_are_plain(params)
             ? portable::forward<__nv_bfloat16, false>(params, device, stream)
             : portable::forward<__nv_bfloat16, true>(params, device, stream);
}

}  // namespace fused_norm
