// What the backward pass keeps in scratch memory, and how the tiers are called. Host and device.
#pragma once

#include <cuda_runtime_api.h>

#include "core/attention/attention.h"

namespace fused_norm {

// Rows of the log-sum-exp.
inline int64_t lse_rows(const AttentionParams& params) {
  return params.query_offsets != nullptr ? int64_t{params.heads} * params.total_queries
                                         : int64_t{params.batch} * params.heads * params.queries;
}

// What each tier's backward pass is given: `delta` = rowsum(dout * out) - dlse, in the type and
// place of the log-sum-exp.
struct AttentionGradient {
  AttentionBackwardParams params;
  void* delta;
};

// The plain tier (plain.cu). The mask's gradient comes from a kernel of its own.
cudaError_t attention_forward_plain(const AttentionParams& params, cudaStream_t stream);
cudaError_t attention_backward_plain(const AttentionGradient& gradient, cudaStream_t stream);
cudaError_t attention_mask_gradient_plain(const AttentionGradient& gradient, cudaStream_t stream);

// What every tier needs: delta, and the sink's gradient from it.
cudaError_t attention_delta_gradient(const AttentionGradient& gradient, cudaStream_t stream);
cudaError_t attention_sink_gradient(const AttentionGradient& gradient, cudaStream_t stream);

}  // namespace fused_norm
