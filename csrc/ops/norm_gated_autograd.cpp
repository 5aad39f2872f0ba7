// The derivatives of gated RMSNorm.
#include "ops/autograd.h"
#include "ops/norm_gated.h"

namespace fused_norm::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const auto& forward_op() {
  static const Operator<decltype(GatedKernels::forward<rms_norm_gated_forward>)> op(
      "rms_norm_gated_forward");
  return op;
}
const auto& backward_op() {
  static const Operator<decltype(GatedBackward::kernel<rms_norm_gated_backward>)> op(
      "rms_norm_gated_backward");
  return op;
}

constexpr int kRstd = 3;  // where it is saved, behind input, gate and weight

}  // namespace

// Profiles show this name. The tensors that are differentiated come by themselves too: autograd
// does not look into `call`.
struct RMSNormGatedFunction : torch::autograd::Function<RMSNormGatedFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor&, const Tensor&,
                               const OptionalTensor&, const GatedCall& call) {
    const auto [output, rstd] = forward_op().below_autograd(call);
    save_call(ctx, call, {rstd});
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
    const auto call = saved_call<GatedCall>(ctx, saved);
    std::tie(results[0], results[1], results[2]) =
        backward_op().in_backward(dy, saved[kRstd], call, wanted);
    return results;
  }
};

Forward differentiate_rms_norm_gated(const GatedCall& call) {
  if (is_transformed(call.input, call.gate, call.weight)) {
    check_rms_norm_gated(call);
    return forward_op().decomposed(call);
  }
  if (!needs_grad(call.input, call.gate, call.weight)) return forward_op().below_autograd(call);
  check_rms_norm_gated(call);  // Function asks for sizes, which not every tensor has
  const variable_list results =
      RMSNormGatedFunction::apply(call.input, call.gate, call.weight, call);
  return {results[0], results[1]};
}

}  // namespace fused_norm::ops
