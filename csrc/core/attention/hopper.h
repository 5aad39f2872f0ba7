// Attention's kernels for Hopper (compute capability 9.0): for calls that hopper_takes_forward().
#pragma once

#include <cuda_runtime_api.h>

#include "core/attention/hopper_plan.h"
#include "core/attention/workspace.h"

namespace fused_norm {

#ifdef FUSED_NORM_WITH_HOPPER
cudaError_t launch_attention_forward_hopper(const AttentionParams& params,
                                            const DeviceProperties& device, void* workspace,
                                            cudaStream_t stream);
// Of hopper_takes_backward(): dquery, dkey and dvalue.
cudaError_t launch_attention_backward_hopper(const AttentionGradient& gradient,
                                             const DeviceProperties& device, void* workspace,
                                             cudaStream_t stream);

// The kernels of a head dimension: hopper_launch.cuh.
namespace hopper {
template <int kDim>
cudaError_t launch_forward(const AttentionParams& params, const DeviceProperties& device,
                           void* tickets, cudaStream_t stream);
template <int kDim>
cudaError_t launch_backward(const AttentionGradient& gradient, const DeviceProperties& device,
                            void* tickets, cudaStream_t stream);
}  // namespace hopper
#else
inline cudaError_t launch_attention_forward_hopper(const AttentionParams&, const DeviceProperties&,
                                                   void*, cudaStream_t) {
  return cudaErrorNotSupported;
}
inline cudaError_t launch_attention_backward_hopper(const AttentionGradient&,
                                                    const DeviceProperties&, void*, cudaStream_t) {
  return cudaErrorNotSupported;
}
#endif

}  // namespace fused_norm
