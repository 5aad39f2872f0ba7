// What fused_norm._C has of the softmaxes. Their operators are in torch.ops.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "ops/checks.h"

namespace fused_norm::ops {

// The wish for a tier, for tests and benchmarks on CUDA rows along the last dimension: "auto",
// "warp", "block" or "uncached". An error at the next call that the tier does not take.
void force_softmax_tier(const std::string& name);

// What functional softmaxes call: the operator softmax_forward, recorded for autograd. Undefined,
// or None, where the caller is to see to it that torch.jit.trace records an operator.
at::Tensor softmax(const at::Tensor& input, int64_t dim, bool log,
                   std::optional<at::ScalarType> out_dtype, const OptionalTensor& mask,
                   double scale, bool causal);

}  // namespace fused_norm::ops
