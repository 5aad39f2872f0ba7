// softmax and log_softmax on the CPU. Arguments are already checked; every tensor is a CPU tensor.
// What is written is contiguous and of any dtype. Arithmetic is in fp32 (fp64 for fp64 input);
// results do not depend on the number of threads.
#pragma once

#include <ATen/core/Tensor.h>

namespace fused_norm::cpu {

// Into y, softmax of scale * x, or its logarithm, over dimension 1 of x: (outer, cols, inner), all
// positive, any strides. With inner 1 also without what `mask` takes away: where a boolean mask is
// true, or by adding a floating one. mask is undefined, or has an element for each of x by
// expand(): its strides are followed, it is never copied whole. queries: 0, or of causal rows how
// many make up a matrix (queries, cols), whose element (i, j) is masked where j > i + cols -
// queries. A row with nothing left gives zeros.
void softmax_forward(const at::Tensor& x, bool log, const at::Tensor& mask, double scale,
                     int64_t queries, const at::Tensor& y);

// Into dx, scale * (dy - sum(y * dy)) * y, or with log scale * (dy - exp(y) * sum(dy)); sums over
// dimension 1 of (outer, cols, inner).
void softmax_backward(const at::Tensor& dy, const at::Tensor& y, bool log, double scale,
                      const at::Tensor& dx);

}  // namespace fused_norm::cpu
