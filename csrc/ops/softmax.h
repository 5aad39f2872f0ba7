// The softmax operators: argument checks, allocation, and the choice between the CPU path and the
// kernels. Registered as torch.ops.fused_norm.* and bound in fused_norm._C (bindings.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "ops/checks.h"

namespace fused_norm::ops {

// The checks that need no tensor, for batching rules too: dtypes that go together, and a dimension
// that an input of `ndim` dimensions has.
void check_softmax_options(at::ScalarType input, at::ScalarType out, int64_t ndim, int64_t dim);

// As above for scaled_masked_softmax.
void check_masked_softmax_options(at::ScalarType input, std::optional<at::ScalarType> mask,
                                  at::ScalarType out, int64_t ndim, double scale, bool causal);

// The checks that every call passes, for decompositions too. Each gives the output's dtype.
at::ScalarType check_softmax(const at::Tensor& input, int64_t dim,
                             std::optional<at::ScalarType> out_dtype);
at::ScalarType check_masked_softmax(const at::Tensor& input, const OptionalTensor& mask,
                                    double scale, bool causal,
                                    std::optional<at::ScalarType> out_dtype);

// The wish for a tier, for tests and benchmarks on CUDA rows along the last dimension: "auto",
// "warp", "block" or "uncached". An error at the next call that the tier does not take.
void force_softmax_tier(const std::string& name);

// softmax of `input` over `dim`, or its logarithm: contiguous, in out_dtype (input's if none).
at::Tensor softmax_forward(const at::Tensor& input, int64_t dim, bool log,
                           std::optional<at::ScalarType> out_dtype);

// The same through the dispatcher, and so recorded for autograd (softmax_autograd.cpp).
at::Tensor softmax(const at::Tensor& input, int64_t dim, bool log,
                   std::optional<at::ScalarType> out_dtype);

// softmax of scale * input over the last dimension, without the elements where a boolean mask is
// true, or with a floating mask added. The mask broadcasts against the input. causal: the last two
// dimensions are (queries, keys), and key j is masked for query i where j > i + keys - queries. A
// row whose every element is masked gives zeros.
at::Tensor scaled_masked_softmax(const at::Tensor& input, const OptionalTensor& mask, double scale,
                                 bool causal, std::optional<at::ScalarType> out_dtype);

// The gradient of the input from `output`, in input_dtype; of both operators above, as where an
// element was masked the output is zero.
at::Tensor softmax_backward(const at::Tensor& dy, const at::Tensor& output, int64_t dim, bool log,
                            at::ScalarType input_dtype, double scale);

// The Autograd kernels of the forward operators.
at::Tensor differentiate_softmax(const at::Tensor& input, int64_t dim, bool log,
                                 std::optional<at::ScalarType> out_dtype);
at::Tensor differentiate_masked_softmax(const at::Tensor& input, const OptionalTensor& mask,
                                        double scale, bool causal,
                                        std::optional<at::ScalarType> out_dtype);

}  // namespace fused_norm::ops
