// Gated RMSNorm: y = norm(x) * act(gate) or norm(x * act(gate)), with norm(x) = x * rstd * (weight
// + weight_offset) and act silu or sigmoid; core/norm/gated.cuh. Its operators are in torch.ops
// alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace fused_norm::ops {

struct GatedCall {
  at::Tensor input, gate;
  std::optional<at::Tensor> weight;
  std::vector<c10::SymInt> normalized_shape;
  double eps, weight_offset;
  bool norm_before_gate, silu;
  std::optional<c10::SymInt> group_size;  // elements of a row that are normalized together
};

// Undefined where not asked for.
struct GatedGradients {
  at::Tensor input, gate, weight;
};

// (output, rstd): rstd has the leading dimensions of input and one for the groups, and is not
// differentiated. Of a meta tensor their shapes alone.
std::pair<at::Tensor, at::Tensor> rms_norm_gated_forward(const GatedCall& call);
GatedGradients rms_norm_gated_backward(const at::Tensor& dy, const at::Tensor& rstd,
                                       const GatedCall& call, const std::array<bool, 3>& wanted);

// The checks that every call passes.
void check_rms_norm_gated(const GatedCall& call);

// The same as chains of torch's own, differentiable in every tensor: for derivatives above the
// first, forward mode, torch.func transforms, the CPU, and what the kernels do not do.
namespace decomposed {
std::pair<at::Tensor, at::Tensor> rms_norm_gated_forward(const GatedCall& call);
// Makes rstd again: its own gradient is a part of the input's.
GatedGradients rms_norm_gated_backward(const at::Tensor& dy, const GatedCall& call,
                                       const std::array<bool, 3>& wanted);
}  // namespace decomposed

// The schemas' order of arguments, written once: a function of a GatedCall as a kernel.
using OptionalSymInt = std::optional<c10::SymInt>;

template <auto function>
std::tuple<at::Tensor, at::Tensor> gated_forward_kernel(
    const at::Tensor& input, const at::Tensor& gate, const std::optional<at::Tensor>& weight,
    c10::SymIntArrayRef normalized_shape, double eps, double weight_offset, bool norm_before_gate,
    bool silu, OptionalSymInt group_size) {
  return function({input, gate, weight, normalized_shape.vec(), eps, weight_offset,
                   norm_before_gate, silu, std::move(group_size)});
}

template <auto function>
std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_backward_kernel(
    const at::Tensor& dy, const at::Tensor& rstd, const at::Tensor& input, const at::Tensor& gate,
    const std::optional<at::Tensor>& weight, c10::SymIntArrayRef normalized_shape, double eps,
    double weight_offset, bool norm_before_gate, bool silu, OptionalSymInt group_size,
    std::array<bool, 3> output_mask) {
  GatedGradients made = function(dy, rstd,
                                 {input, gate, weight, normalized_shape.vec(), eps, weight_offset,
                                  norm_before_gate, silu, std::move(group_size)},
                                 output_mask);
  return {made.input, made.gate, made.weight};
}

using GatedForwardOp = decltype(gated_forward_kernel<rms_norm_gated_forward>);
using GatedBackwardOp = decltype(gated_backward_kernel<rms_norm_gated_backward>);

// And a call of an operator, from a GatedCall.
template <typename Operator>
std::tuple<at::Tensor, at::Tensor> call_gated_forward(const Operator& op, const GatedCall& c) {
  return op.call(c.input, c.gate, c.weight, c.normalized_shape, c.eps, c.weight_offset,
                 c.norm_before_gate, c.silu, c.group_size);
}
template <typename Operator>
std::tuple<at::Tensor, at::Tensor, at::Tensor> call_gated_backward(
    const Operator& op, const at::Tensor& dy, const at::Tensor& rstd, const GatedCall& c,
    const std::array<bool, 3>& wanted) {
  return op.call(dy, rstd, c.input, c.gate, c.weight, c.normalized_shape, c.eps, c.weight_offset,
                 c.norm_before_gate, c.silu, c.group_size, wanted);
}

}  // namespace fused_norm::ops
