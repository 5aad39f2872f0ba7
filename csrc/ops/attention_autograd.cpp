// The derivatives of the attention operators.
#include <ATen/ops/zeros_like.h>

#include "ops/attention.h"
#include "ops/autograd.h"

namespace fused_norm::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const auto& forward_op() {
  static const Operator<decltype(AttentionKernels::forward<attention_forward>)> op(
      "attention_forward");
  return op;
}
const auto& backward_op() {
  static const Operator<decltype(AttentionBackward::kernel<attention_backward>)> op(
      "attention_backward");
  return op;
}

// A call's tensors in the order in which they are saved, and the results behind them.
enum Saved { kOut = 9, kLse };
constexpr int kPlaces[kAttentionGradients] = {0, 1, 2, 3, 5};  // of what is differentiated

}  // namespace

// Profiles show this name.
struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static constexpr bool is_traceable = true;

  // The tensors that are differentiated come by themselves too: autograd does not look into `call`.
  static variable_list forward(AutogradContext* ctx, const Tensor&, const OptionalTensor&,
                               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const AttentionCall& call) {
    const auto [out, lse] = forward_op().below_autograd(call);
    save_call(ctx, call, {out, lse});
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(kAttentionGradients + 1);
    if (!grads[0].defined() && !grads[1].defined()) return results;
    const variable_list saved = ctx->get_saved_variables();
    AttentionWanted wanted{};
    size_t edge = 0;  // counted over the tensors that the call had
    for (int i = 0; i < kAttentionGradients; ++i) {
      if (saved[kPlaces[i]].defined()) wanted[i] = ctx->needs_input_grad(edge++);
    }
    const Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(saved[kOut]);
    const auto call = saved_call<AttentionCall>(ctx, saved);
    std::tie(results[kQuery], results[kKey], results[kValue], results[kMask], results[kSink]) =
        backward_op().in_backward(dout, optional(grads[1]), saved[kOut], saved[kLse], call, wanted);
    return results;
  }
};

Forward differentiate_attention(const AttentionCall& call) {
  const auto& [query, key, value, mask, slopes, sink] =
      std::tie(call.query, call.key, call.value, call.attn_mask, call.alibi_slopes, call.sink);
  TORCH_CHECK(!needs_grad(slopes) && !has_tangent(slopes),
              "alibi_slopes requires grad, but attention does not differentiate them: pass "
              "alibi_slopes.detach(), or a float attn_mask");
  if (is_transformed(query, key, value, mask, sink)) {
    check_attention(call);
    return forward_op().decomposed(call);
  }
  if (!needs_grad(query, key, value, mask, sink)) return forward_op().below_autograd(call);
  check_layout(query, "query");  // Function asks for sizes, which not every tensor has
  const variable_list results = AttentionFunction::apply(query, key, value, mask, sink, call);
  return {results[0], results[1]};
}

Forward attention(const AttentionCall& call) { return forward_op().call(call); }

}  // namespace fused_norm::ops
