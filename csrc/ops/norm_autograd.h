// The norms as autograd records them: which of a call's tensors are saved, and the gradients from
// those. In C++, as softmax's (softmax_autograd.cpp): with a Python autograd.Function a call took
// the host twice as long.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>
#include <vector>

namespace fused_norm::ops {

// What a norm is called with, beside its tensors.
struct NormOptions {
  std::vector<c10::SymInt> normalized_shape;
  double eps, weight_offset;
  bool rms;
  std::optional<at::ScalarType> out_dtype, residual_dtype;
};

// The results of norm_forward, on record: differentiable in all that depends on the input. `room`
// is kSaveInput, or that for listed columns of a call that saves its output; with 0 it has no list.
std::vector<at::Tensor> record_norm(const at::Tensor& input,
                                    const std::optional<at::Tensor>& residual,
                                    const std::optional<at::Tensor>& weight,
                                    const std::optional<at::Tensor>& bias,
                                    const NormOptions& options, const c10::SymInt& room);

// What functional norms give: the same results, recorded if autograd is to, with what is saved and
// the room for it chosen here; or, under a transform, those of the operator's own Autograd kernel.
std::vector<at::Tensor> norm(const at::Tensor& input, const std::optional<at::Tensor>& residual,
                             const std::optional<at::Tensor>& weight,
                             const std::optional<at::Tensor>& bias, const NormOptions& options,
                             bool memory_efficient);

}  // namespace fused_norm::ops
