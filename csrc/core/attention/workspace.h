// What the backward pass keeps in scratch memory, and how the tiers are called. Host and device.
#pragma once

#include <cuda_runtime_api.h>

#include "core/attention/attention.h"

namespace fused_norm {

// Bytes of the log-sum-exp.
inline size_t lse_bytes(const AttentionParams& params) {
  const int64_t rows = params.query_offsets != nullptr
                           ? int64_t{params.heads} * params.total_queries
                           : int64_t{params.batch} * params.heads * params.queries;
  return rows * (params.dtype == DType::kFloat64 ? 8 : 4);
}

// What each tier's backward pass is given beside the call, in the type and order of the
// log-sum-exp: `delta` = rowsum(dout * out) - dlse, and `exponents`, the log-sum-exp as an exponent
// of 2, +inf where nothing is seen so that probabilities are zero.
struct AttentionGradient {
  AttentionBackwardParams params;
  void *delta, *exponents;
};

// The plain tier (plain.cu). The mask's gradient comes from a kernel of its own.
cudaError_t attention_forward_plain(const AttentionParams& params, cudaStream_t stream);
cudaError_t attention_backward_plain(const AttentionGradient& gradient, cudaStream_t stream);
cudaError_t attention_mask_gradient_plain(const AttentionGradient& gradient, cudaStream_t stream);

// What every tier needs: delta, and the sink's gradient from it.
cudaError_t attention_delta_gradient(const AttentionGradient& gradient, cudaStream_t stream);
cudaError_t attention_sink_gradient(const AttentionGradient& gradient, cudaStream_t stream);

}  // namespace fused_norm
