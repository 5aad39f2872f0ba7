// Who runs a plan.
#pragma once

#include "core/softmax/plan.h"
#include "core/softmax/softmax.h"

namespace fused_norm {

using RunSoftmaxForward = cudaError_t(const SoftmaxForwardParams&, const SoftmaxPlan&,
                                      cudaStream_t);
using RunSoftmaxBackward = cudaError_t(const SoftmaxBackwardParams&, const SoftmaxPlan&,
                                       cudaStream_t);

// Rows in registers or a ring. T is the dtype of what is read, x in forward and y in backward:
// f16.cu, bf16.cu and f32.cu.
template <typename T>
struct SoftmaxOf {
  static RunSoftmaxForward run;
  static RunSoftmaxBackward run;
};
// RowPlace::kFlat: flat.cu.
RunSoftmaxForward softmax_in_tiles;
RunSoftmaxBackward softmax_in_tiles;
// SoftmaxTier::kUncached: streaming.cu.
RunSoftmaxForward softmax_streaming;
RunSoftmaxBackward softmax_streaming;

}  // namespace fused_norm
