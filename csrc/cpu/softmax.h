// softmax and log_softmax on the CPU. Arguments are already checked; every tensor is a CPU tensor.
// Arithmetic is in fp32 (fp64 for fp64 input); results do not depend on the number of threads.
#pragma once

#include <ATen/core/Tensor.h>

namespace fused_norm::cpu {

// Over dimension 1 of x: (outer, cols, inner), all positive, any strides. Contiguous, in out_dtype.
at::Tensor softmax_forward(const at::Tensor& x, bool log, at::ScalarType out_dtype);

// Softmax of scale * x over the last dimension of x (any number of leading ones, not empty), with
// what `mask` takes away: where a boolean mask is true, or by adding a floating one. mask is
// undefined, or has x's shape by expand(): its strides are followed, it is never copied whole.
// causal: element (i, j) of the last two dimensions (q, k) is masked where j > i + k - q. A row
// with nothing left gives zeros.
at::Tensor scaled_masked_softmax(const at::Tensor& x, const at::Tensor& mask, double scale,
                                 bool causal, at::ScalarType out_dtype);

// scale * (dy - sum(y * dy)) * y, or with log scale * (dy - exp(y) * sum(dy)); sums over dimension
// 1 of (outer, cols, inner). Contiguous, in input_dtype.
at::Tensor softmax_backward(const at::Tensor& dy, const at::Tensor& y, bool log,
                            at::ScalarType input_dtype, double scale);

}  // namespace fused_norm::cpu
