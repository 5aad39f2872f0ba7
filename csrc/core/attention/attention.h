// FlashAttention on the GPU: out = softmax(scores) v without the scores ever being in memory, its
// log-sum-exp, and the gradients (Dao et al., 2022; Dao, 2023; Shah et al., 2024).
//
// Launchers check nothing: pointers and sizes are the caller's promise. They return what CUDA says,
// and work on the current device and the given stream, also under graph capture. `tier` is what
// attention_tier() gave.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/attention/params.h"

namespace fused_norm {

// Bytes of scratch memory of a call, contents irrelevant: O(queries + keys), forward 0 in most;
// where a mask's gradient has parts also up to 32 MB of its sums.
size_t attention_forward_workspace(const AttentionParams& params, AttentionTier tier);
cudaError_t launch_attention_forward(const AttentionParams& params, const DeviceProperties& device,
                                     AttentionTier tier, void* workspace, cudaStream_t stream);

size_t attention_backward_workspace(const AttentionBackwardParams& params, AttentionTier tier);
cudaError_t launch_attention_backward(const AttentionBackwardParams& params,
                                      const DeviceProperties& device, AttentionTier tier,
                                      void* workspace, cudaStream_t stream);

}  // namespace fused_norm
