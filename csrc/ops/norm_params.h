// What the launches of norms and gated norms have in common.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include "core/norm/norm.h"
#include "cpu/norm.h"
#include "ops/device.h"
#include "ops/rows.h"

namespace fused_norm::ops {

// `weight` and `bias` are aligned_param()s.
template <typename Params>
Params norm_params(const NormColumns& norm, int64_t rows, bool rms, const at::Tensor& weight,
                   const at::Tensor& bias) {
  Params params{};
  params.rows = rows;
  params.cols = static_cast<int32_t>(norm.cols);
  params.x_dtype = to_dtype(norm.x_dtype);
  params.y_dtype = to_dtype(norm.y_dtype);
  params.rms = rms;
  params.weight_offset = norm.weight_offset;
  params.weight = to_param(weight);
  params.bias = to_param(bias);
  return params;
}

// Owns what params->workspace points to.
inline c10::DataPtr set_workspace(NormBackwardParams* params) {
  c10::DataPtr memory = c10::cuda::CUDACachingAllocator::get()->allocate(
      norm_backward_workspace(*params, current_device_properties()));
  params->workspace = memory.get();
  return memory;
}

}  // namespace fused_norm::ops
