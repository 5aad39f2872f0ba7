// Running a plan. Each dtype T that is read is one translation unit, f16.cu, bf16.cu, f32.cu or
// f64.cu: x's in forward, y's in backward.
#pragma once

#include <cuda_runtime_api.h>

#include "core/softmax/plan.h"
#include "core/softmax/softmax.h"

namespace fused_norm {

template <typename T>
cudaError_t softmax_of(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream);
template <typename T>
cudaError_t softmax_of(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream);
template <typename T>
cudaError_t softmax_of(const SoftmaxColumnsForwardParams& params, const SoftmaxColumnsPlan& plan,
                       cudaStream_t stream);
template <typename T>
cudaError_t softmax_of(const SoftmaxColumnsBackwardParams& params, const SoftmaxColumnsPlan& plan,
                       cudaStream_t stream);

}  // namespace fused_norm
