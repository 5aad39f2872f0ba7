// What fused_norm._C has of the softmaxes. Their operators are in torch.ops.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "ops/call.h"

namespace fused_norm::ops {

// softmax of `input` over `dim`, or its logarithm, in out_dtype (input's if none). Over the last
// dimension also softmax of scale * input, without the elements where a boolean mask is true, or
// with a floating mask added. The mask broadcasts against the input. causal: the last two
// dimensions are (queries, keys), and key j is masked for query i where j > i + keys - queries. A
// row whose every element is masked gives zeros.
struct SoftmaxCall {
  const at::Tensor& input;
  int64_t dim;
  bool log;
  std::optional<at::ScalarType> out_dtype;
  const OptionalTensor& mask;
  double scale;
  bool causal;

  auto fields() const { return std::tie(input, dim, log, out_dtype, mask, scale, causal); }

  at::ScalarType y_dtype() const { return out_dtype.value_or(input.scalar_type()); }
  bool hides() const { return has(mask) || causal; }
};

// The wish for a tier, for tests and benchmarks on CUDA rows along the last dimension: "auto",
// "warp", "block" or "uncached". An error at the next call that the tier does not take.
void force_softmax_tier(const std::string& name);

// What functional softmaxes call: the operator softmax_forward, recorded for autograd. Undefined,
// or None, where the caller is to see to it that torch.jit.trace records an operator.
at::Tensor softmax(const SoftmaxCall& call);

}  // namespace fused_norm::ops
