// The softmax operators: argument checks, allocation, and the choice between the CPU path and the
// kernels. Registered as torch.ops.fused_norm.* and bound in fused_norm._C (bindings.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "core/softmax/tier.h"

namespace fused_norm::ops {

// The checks that need no tensor, for batching rules too: dtypes that go together, and a dimension
// that an input of `ndim` dimensions has.
void check_softmax_options(at::ScalarType input, at::ScalarType out, int64_t ndim, int64_t dim);

// As above for scaled_masked_softmax.
void check_masked_softmax_options(at::ScalarType input, std::optional<at::ScalarType> mask,
                                  at::ScalarType out, int64_t ndim, double scale, bool causal);

// What the mask leaves of an input of this shape, as a view: undefined without a mask. Checks that
// it broadcasts.
at::Tensor expanded_mask(const std::optional<at::Tensor>& mask, const at::Tensor& input);

// softmax of `input` over `dim`, or its logarithm: contiguous, in out_dtype (input's if none).
// `tier` other than kAuto is for benchmarks and tests: CUDA rows along the last dimension.
at::Tensor softmax_forward(const at::Tensor& input, int64_t dim, bool log,
                           std::optional<at::ScalarType> out_dtype,
                           SoftmaxTier tier = SoftmaxTier::kAuto);

// The same through the dispatcher, and so recorded for autograd (softmax_autograd.cpp).
at::Tensor softmax(const at::Tensor& input, int64_t dim, bool log,
                   std::optional<at::ScalarType> out_dtype);

// softmax of scale * input over the last dimension, without the elements where a boolean mask is
// true, or with a floating mask added. The mask broadcasts against the input. causal: the last two
// dimensions are (queries, keys), and key j is masked for query i where j > i + keys - queries. A
// row whose every element is masked gives zeros.
at::Tensor scaled_masked_softmax(const at::Tensor& input, const std::optional<at::Tensor>& mask,
                                 double scale, bool causal, std::optional<at::ScalarType> out_dtype,
                                 SoftmaxTier tier = SoftmaxTier::kAuto);

// The gradient of the input from `output`, in input_dtype; of both operators above, as where an
// element was masked the output is zero.
at::Tensor softmax_backward(const at::Tensor& dy, const at::Tensor& output, int64_t dim, bool log,
                            at::ScalarType input_dtype, double scale,
                            SoftmaxTier tier = SoftmaxTier::kAuto);

}  // namespace fused_norm::ops
