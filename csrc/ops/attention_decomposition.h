// The attention operators as chains of torch's own, with all scores in memory, for what the kernels
// do not do: second and higher derivatives, forward-mode derivatives and torch.func transforms.
// Results, dtypes and errors are those of the functions of the same names in attention.h, dropout's
// mask included; each chain is differentiable in query, key, value, attn_mask, sink, dout and dlse.
#pragma once

#include "ops/attention.h"

namespace fused_norm::ops::decomposed {

std::pair<at::Tensor, at::Tensor> attention_forward(const AttentionCall& call);

// Makes out and lse again: their own gradients are parts of those of the call's tensors.
AttentionGradients attention_backward(const at::Tensor& dout, const OptionalTensor& dlse,
                                      const AttentionCall& call, const std::array<bool, 5>& wanted);

}  // namespace fused_norm::ops::decomposed
