// The softmax operators as chains of torch's own, for what the kernels do not do: second and higher
// derivatives, forward-mode derivatives and torch.func transforms. Arguments, results, dtypes and
// errors are those of the operators of the same names in softmax.h; each chain is differentiable in
// `input`, `dy` and `output`.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace fused_norm::ops::decomposed {

at::Tensor softmax_forward(const at::Tensor& input, int64_t dim, bool log,
                           std::optional<at::ScalarType> out_dtype);

at::Tensor scaled_masked_softmax(const at::Tensor& input, const std::optional<at::Tensor>& mask,
                                 double scale, bool causal,
                                 std::optional<at::ScalarType> out_dtype);

at::Tensor softmax_backward(const at::Tensor& dy, const at::Tensor& output, int64_t dim, bool log,
                            at::ScalarType input_dtype, double scale);

// The gradients of softmax_backward's `dy` and `output` from that of its result.
std::pair<at::Tensor, at::Tensor> softmax_backward_backward(const at::Tensor& ddx,
                                                            const at::Tensor& dy,
                                                            const at::Tensor& output, int64_t dim,
                                                            bool log, double scale);

}  // namespace fused_norm::ops::decomposed
