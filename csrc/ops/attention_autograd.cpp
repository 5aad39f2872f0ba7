// The derivatives of the attention operators.
#include <ATen/ops/zeros_like.h>

#include "ops/attention.h"
#include "ops/autograd.h"

namespace fused_norm::ops {

using at::Tensor;

// Profiles show this name.
struct AttentionFunction : CallFunction<AttentionFunction> {
  static constexpr const char* kBackward = "fused_norm::attention_backward";
  static constexpr std::array<int64_t, kAttentionGradients> kPlaces = {0, 1, 2, 3, 5};
  static constexpr bool kSavesFirst = true, kDifferentiatesSecond = true;

  static const auto& op() {
    static const Operator op("attention_forward", kernel<attention_forward>);
    return op;
  }
  static c10::Stack before(const variable_list& grads, const Tensor& out, const Tensor& lse) {
    return {grads[0].defined() ? grads[0] : at::zeros_like(out), optional(grads[1]), out, lse};
  }
};

Forward differentiate_attention(const AttentionCall& call) {
  const OptionalTensor& slopes = call.alibi_slopes;
  TORCH_CHECK(!needs_grad(slopes) && !has_tangent(slopes),
              "alibi_slopes requires grad, but attention does not differentiate them: pass "
              "alibi_slopes.detach(), or a float attn_mask");
  return differentiate_call<AttentionFunction>(call, check_attention);
}

Forward attention(const AttentionCall& call) { return AttentionFunction::op().call(call); }

}  // namespace fused_norm::ops
