// The portable tier, by type; instantiated in portable_*.cu.
#pragma once

#include "core/attention/workspace.h"

namespace fused_norm {

template <typename T>
cudaError_t attention_forward_portable(const AttentionParams& params, cudaStream_t stream);
template <typename T>
cudaError_t attention_backward_portable(const AttentionGradient& gradient, cudaStream_t stream);

}  // namespace fused_norm
