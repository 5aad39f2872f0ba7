// Gated RMSNorm: y = norm(x) * act(gate) or norm(x * act(gate)), with norm(x) = x * rstd * (weight
// + weight_offset) and act silu or sigmoid; core/norm/gated.cuh. Its operators are in torch.ops
// alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "ops/call.h"

namespace fused_norm::ops {

struct GatedCall {
  at::Tensor input, gate;
  OptionalTensor weight;
  c10::SymIntArrayRef normalized_shape;
  double eps, weight_offset;
  bool norm_before_gate, silu;
  std::optional<c10::SymInt> group_size;  // elements of a row that are normalized together

  template <typename Self>
  static auto fields(Self& c) {
    return std::tie(c.input, c.gate, c.weight, c.normalized_shape, c.eps, c.weight_offset,
                    c.norm_before_gate, c.silu, c.group_size);
  }
};

// What is differentiated, in this order.
enum GatedGradient { kInput, kGate, kWeight };

// What the backward operator is called with.
struct GatedBackwardCall {
  const at::Tensor &dy, &rstd;
  GatedCall forward;
  std::array<bool, 3> wanted;

  template <typename Self>
  static auto fields(Self& c) {
    return std::tuple_cat(std::tie(c.dy, c.rstd), GatedCall::fields(c.forward), std::tie(c.wanted));
  }
};

// (output, rstd): rstd has the leading dimensions of input and one for the groups, and is not
// differentiated. Of a meta tensor their shapes alone.
Forward rms_norm_gated_forward(const GatedCall& call);
Gradients<3> rms_norm_gated_backward(const GatedBackwardCall& call);

// The checks that every call passes, for decompositions too.
void check_rms_norm_gated(const GatedCall& call);

// The Autograd kernel of the forward operator.
Forward differentiate_rms_norm_gated(const GatedCall& call);

}  // namespace fused_norm::ops
