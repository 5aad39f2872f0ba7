// The derivatives of gated RMSNorm, as kernels of the dispatcher's Autograd key. The first is the
// kernels'; of higher ones, forward mode and torch.func transforms decompositions take care.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/norm_gated.h"

namespace fused_norm::ops {
namespace {

using at::Tensor;
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

const auto& forward_op() {
  static const auto op = find_operator<GatedForwardOp>("fused_norm::rms_norm_gated_forward");
  return op;
}
const auto& backward_op() {
  static const auto op = find_operator<GatedBackwardOp>("fused_norm::rms_norm_gated_backward");
  return op;
}

// Tensors of a call in the order in which they are saved, with one more behind them.
enum Saved { kInput, kGate, kWeight, kMore };

void save(AutogradContext* ctx, const GatedCall& c, const Tensor& more) {
  ctx->save_for_backward({c.input, c.gate, c.weight.value_or(Tensor()), more});
  ctx->set_materialize_grads(false);
  ctx->saved_data["shape"] = c10::SymIntArrayRef(c.normalized_shape);
  ctx->saved_data["group_size"] = c.group_size;
  ctx->saved_data["numbers"] = c10::List<double>({c.eps, c.weight_offset});
  ctx->saved_data["flags"] = packed(std::array<bool, 2>{c.norm_before_gate, c.silu});
}

GatedCall saved_call(AutogradContext* ctx, const variable_list& tensors) {
  const auto numbers = ctx->saved_data["numbers"].toDoubleVector();
  const auto flags = unpacked<std::array<bool, 2>>(ctx->saved_data["flags"].toInt());
  const c10::IValue& group_size = ctx->saved_data["group_size"];
  return {tensors[kInput],
          tensors[kGate],
          tensors[kWeight].defined() ? OptionalTensor(tensors[kWeight]) : std::nullopt,
          ctx->saved_data["shape"].toSymIntVector(),
          numbers[0],
          numbers[1],
          flags[0],
          flags[1],
          group_size.isNone() ? std::nullopt : std::optional(group_size.toSymInt())};
}

}  // namespace

// Profiles show the names of these structs. The tensors that are differentiated come by themselves
// too: autograd does not look into `call`.
struct RMSNormGatedFunction : torch::autograd::Function<RMSNormGatedFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor&, const Tensor&,
                               const OptionalTensor&, const GatedCall& call) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [output, rstd] = call_gated_forward(forward_op(), call);
    save(ctx, call, rstd);
    ctx->mark_non_differentiable({rstd});
    return {output, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(4);
    const Tensor& dy = grads[0];
    if (!dy.defined()) return results;
    const variable_list saved = ctx->get_saved_variables();
    const bool weighted = saved[kWeight].defined();
    const std::array<bool, 3> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                        weighted && ctx->needs_input_grad(2)};
    // With create_graph=True, or a tangent, the operator's own Autograd kernel decides.
    std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
    if (!at::GradMode::is_enabled() && !has_tangent(dy)) below_autograd.emplace();
    std::tie(results[0], results[1], results[2]) =
        call_gated_backward(backward_op(), dy, saved[kMore], saved_call(ctx, saved), wanted);
    return results;
  }
};

// rms_norm_gated_backward where it is to be differentiated in turn: the kernels' values, and
// derivatives to any order. rstd is a function of the call's tensors, whose gradients hold its
// share.
struct RMSNormGatedBackwardFunction : torch::autograd::Function<RMSNormGatedBackwardFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& dy, const Tensor&, const Tensor&,
                               const OptionalTensor&, const Tensor& rstd, const GatedCall& call,
                               std::array<bool, 3> wanted) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    save(ctx, call, dy);
    ctx->saved_data["wanted"] = packed(wanted);
    const auto [dinput, dgate, dweight] =
        call_gated_backward(backward_op(), dy, rstd, call, wanted);
    variable_list made;  // a Function gives no undefined tensors
    for (const Tensor& gradient : {dinput, dgate, dweight}) {
      if (gradient.defined()) made.push_back(gradient);
    }
    return made;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode enable_grad(true);
    const variable_list saved = ctx->get_saved_variables();
    // Aliases: of the tensors themselves some may be functions of others.
    variable_list aliases(saved.size());
    for (size_t i = 0; i < saved.size(); ++i) {
      if (saved[i].defined()) aliases[i] = saved[i].view_as(saved[i]);
    }
    const GatedGradients made = decomposed::rms_norm_gated_backward(
        aliases[kMore], saved_call(ctx, aliases),
        unpacked<std::array<bool, 3>>(ctx->saved_data["wanted"].toInt()));
    variable_list outputs, of_outputs;
    size_t result = 0;
    for (const Tensor* gradient : {&made.input, &made.gate, &made.weight}) {
      if (!gradient->defined()) continue;
      const Tensor& of_gradient = grads[result++];
      if (!of_gradient.defined() || !gradient->requires_grad()) continue;
      outputs.push_back(*gradient);
      of_outputs.push_back(of_gradient);
    }

    const Saved order[] = {kMore, kInput, kGate, kWeight};  // of forward's arguments
    variable_list results(std::size(order) + 3), inputs;
    std::vector<size_t> places;
    size_t edge = 0;  // counted over the tensors that the call had
    for (size_t i = 0; i < std::size(order); ++i) {
      if (!saved[order[i]].defined() || !ctx->needs_input_grad(edge++)) continue;
      inputs.push_back(aliases[order[i]]);
      places.push_back(i);
    }
    if (outputs.empty() || inputs.empty()) return results;
    const variable_list gradients = torch::autograd::grad(
        outputs, inputs, of_outputs, /*retain_graph=*/std::nullopt, create_graph, true);
    for (size_t i = 0; i < places.size(); ++i) results[places[i]] = gradients[i];
    return results;
  }
};

namespace {

std::pair<Tensor, Tensor> forward_autograd(const GatedCall& call) {
  if (is_transformed(call.input, call.gate, call.weight))
    return decomposed::rms_norm_gated_forward(call);
  if (needs_grad(call.input, call.gate, call.weight)) {
    check_rms_norm_gated(call);  // Function asks for sizes, which not every tensor has
    const variable_list results =
        RMSNormGatedFunction::apply(call.input, call.gate, call.weight, call);
    return {results[0], results[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto [output, rstd] = call_gated_forward(forward_op(), call);
  return {output, rstd};
}

GatedGradients backward_autograd(const Tensor& dy, const Tensor& rstd, const GatedCall& call,
                                 const std::array<bool, 3>& wanted) {
  if (is_transformed(dy, call.input, call.gate, call.weight))
    return decomposed::rms_norm_gated_backward(dy, call, wanted);
  if (needs_grad(dy, call.input, call.gate, call.weight)) {
    const variable_list results = RMSNormGatedBackwardFunction::apply(
        dy, call.input, call.gate, call.weight, rstd, call, wanted);
    GatedGradients made;
    size_t result = 0;
    if (wanted[0]) made.input = results[result++];
    if (wanted[1]) made.gate = results[result++];
    if (wanted[2] && call.weight.has_value()) made.weight = results[result++];
    return made;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto [dinput, dgate, dweight] = call_gated_backward(backward_op(), dy, rstd, call, wanted);
  return {dinput, dgate, dweight};
}

TORCH_LIBRARY_IMPL(fused_norm, Autograd, m) {
  m.impl("rms_norm_gated_forward", &gated_forward_kernel<forward_autograd>);
  m.impl("rms_norm_gated_backward", &gated_backward_kernel<backward_autograd>);
}

// torch.vmap: torch's own rules for the decompositions.
GatedGradients batched_backward(const Tensor& dy, const Tensor&, const GatedCall& call,
                                const std::array<bool, 3>& wanted) {
  return decomposed::rms_norm_gated_backward(dy, call, wanted);
}
TORCH_LIBRARY_IMPL(fused_norm, FuncTorchBatched, m) {
  m.impl("rms_norm_gated_forward", &gated_forward_kernel<decomposed::rms_norm_gated_forward>);
  m.impl("rms_norm_gated_backward", &gated_backward_kernel<batched_backward>);
}

}  // namespace
}  // namespace fused_norm::ops
