// Who runs a plan.
#pragma once

#include "core/softmax/plan.h"
#include "core/softmax/softmax.h"

namespace fused_norm {

// Rows in registers or a ring. T is the dtype of what is read, x in forward and y in backward:
// f16.cu, bf16.cu and f32.cu.
template <typename T>
cudaError_t softmax_of(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream);
template <typename T>
cudaError_t softmax_of(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream);

// RowPlace::kFlat: flat.cu.
cudaError_t softmax_in_tiles(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                             cudaStream_t stream);
cudaError_t softmax_in_tiles(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                             cudaStream_t stream);

// SoftmaxTier::kUncached: streaming.cu.
cudaError_t softmax_streaming(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                              cudaStream_t stream);
cudaError_t softmax_streaming(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                              cudaStream_t stream);

}  // namespace fused_norm
