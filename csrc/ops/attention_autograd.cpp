// The derivatives of the attention operators, as kernels of the dispatcher's Autograd key. The
// first derivative is the kernels'; of higher ones, forward mode and torch.func transforms the
// operators' decompositions take care.
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops/attention.h"
#include "ops/attention_decomposition.h"
#include "ops/autograd.h"
#include "ops/checks.h"

namespace fused_norm::ops {
namespace {

using at::Tensor;
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const auto& forward_op() {
  static const auto op = find_operator<ForwardOp>("fused_norm::attention_forward");
  return op;
}
const auto& backward_op() {
  static const auto op = find_operator<BackwardOp>("fused_norm::attention_backward");
  return op;
}

// A call's tensors, in this order; undefined what it does not have.
enum Saved { kQuery, kKey, kValue, kMask, kSink, kAlibi, kOffsetsQ, kOffsetsK, kRng, kTensors };
constexpr int kDifferentiable = kSink + 1;

variable_list tensors_of(const AttentionCall& c) {
  const auto or_undefined = [](const OptionalTensor& t) { return t.value_or(Tensor()); };
  return {c.query,
          or_undefined(c.key),
          or_undefined(c.value),
          or_undefined(c.attn_mask),
          or_undefined(c.sink),
          or_undefined(c.alibi_slopes),
          or_undefined(c.cu_seqlens_q),
          or_undefined(c.cu_seqlens_k),
          or_undefined(c.rng)};
}

void save(AutogradContext* ctx, variable_list tensors, const AttentionCall& c) {
  ctx->save_for_backward(std::move(tensors));
  ctx->set_materialize_grads(false);
  ctx->saved_data["numbers"] = c10::List<double>({c.scale, c.softcap, c.dropout_p});
  const std::vector<SymInt> sizes = {c.max_seqlen_q, c.max_seqlen_k, c.window_left.value_or(-1),
                                     c.window_right.value_or(-1), c.top_left ? 1 : 0};
  ctx->saved_data["sizes"] = c10::SymIntArrayRef(sizes);
}

AttentionCall call_of(const variable_list& t, const std::vector<double>& numbers,
                      const std::vector<SymInt>& sizes) {
  const auto optional = [&](Saved which) {
    return t[which].defined() ? OptionalTensor(t[which]) : std::nullopt;
  };
  const auto limit = [](const SymInt& size) {
    return size < 0 ? std::nullopt : std::optional(size);
  };
  return {
      t[kQuery],       optional(kKey),      optional(kValue),    optional(kMask), optional(kAlibi),
      optional(kSink), optional(kOffsetsQ), optional(kOffsetsK), optional(kRng),  sizes[0],
      sizes[1],        numbers[0],          numbers[1],          limit(sizes[2]), limit(sizes[3]),
      sizes[4] == 1,   numbers[2]};
}

AttentionCall saved_call(AutogradContext* ctx, const variable_list& tensors) {
  return call_of(tensors, ctx->saved_data["numbers"].toDoubleVector(),
                 ctx->saved_data["sizes"].toSymIntVector());
}

OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static constexpr bool is_traceable = true;

  // The tensors that are differentiated come by themselves too: autograd does not look into `call`.
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const OptionalTensor& key,
                               const OptionalTensor& value, const OptionalTensor& attn_mask,
                               const OptionalTensor& sink, const AttentionCall& call) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [out, lse] = call_forward(forward_op(), call);
    variable_list saved = tensors_of(call);
    saved.push_back(out);
    saved.push_back(lse);
    save(ctx, std::move(saved), call);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(kDifferentiable + 1);
    if (!grads[0].defined() && !grads[1].defined()) return results;
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &out = saved[kTensors], &lse = saved[kTensors + 1];
    std::array<bool, 5> wanted{};
    size_t edge = 0;  // counted over the tensors that the call had
    for (int i = 0; i < kDifferentiable; ++i) {
      if (saved[i].defined()) wanted[i] = ctx->needs_input_grad(edge++);
    }
    const Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(out);
    // With create_graph=True, or a tangent, the operator's own Autograd kernel decides.
    std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
    if (!at::GradMode::is_enabled() && !has_tangent(dout)) below_autograd.emplace();
    std::tie(results[0], results[1], results[2], results[3], results[4]) = call_backward(
        backward_op(), dout, optional(grads[1]), out, lse, saved_call(ctx, saved), wanted);
    return results;
  }
};

// attention_backward where it is to be differentiated in turn: the kernels' values, and derivatives
// to any order. out and lse are functions of the call's tensors, whose gradients hold their share.
struct AttentionBackwardFunction : torch::autograd::Function<AttentionBackwardFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& dout, const OptionalTensor& dlse,
                               const Tensor& query, const OptionalTensor& key,
                               const OptionalTensor& value, const OptionalTensor& attn_mask,
                               const OptionalTensor& sink, const Tensor& out, const Tensor& lse,
                               const AttentionCall& call, std::array<bool, 5> wanted) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list saved = tensors_of(call);
    saved.push_back(dout);
    saved.push_back(dlse.value_or(Tensor()));
    save(ctx, std::move(saved), call);
    ctx->saved_data["wanted"] = packed(wanted);
    const auto [dquery, dkey, dvalue, dmask, dsink] =
        call_backward(backward_op(), dout, dlse, out, lse, call, wanted);
    variable_list made;  // a Function gives no undefined tensors
    for (const Tensor& gradient : {dquery, dkey, dvalue, dmask, dsink}) {
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
    const AttentionGradients made = decomposed::attention_backward(
        aliases[kTensors], optional(aliases[kTensors + 1]), saved_call(ctx, aliases),
        unpacked<std::array<bool, 5>>(ctx->saved_data["wanted"].toInt()));
    variable_list outputs, of_outputs;
    const Tensor* all[] = {&made.query, &made.key, &made.value, &made.attn_mask, &made.sink};
    size_t result = 0;
    for (const Tensor* gradient : all) {
      if (!gradient->defined()) continue;
      const Tensor& of_gradient = grads[result++];
      if (!of_gradient.defined() || !gradient->requires_grad()) continue;
      outputs.push_back(*gradient);
      of_outputs.push_back(of_gradient);
    }

    // In the order of forward's arguments: dout, dlse, and what is differentiable of the call.
    const int order[] = {kTensors, kTensors + 1, kQuery, kKey, kValue, kMask, kSink};
    variable_list results(std::size(order) + 4), inputs;
    std::vector<size_t> places;
    size_t edge = 0;
    for (size_t i = 0; i < std::size(order); ++i) {
      if (!saved[order[i]].defined()) continue;
      if (!ctx->needs_input_grad(edge++)) continue;
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

std::pair<Tensor, Tensor> forward_autograd(const AttentionCall& call) {
  TORCH_CHECK(!needs_grad(call.alibi_slopes) && !has_tangent(call.alibi_slopes),
              "alibi_slopes requires grad, but attention does not differentiate them: pass "
              "alibi_slopes.detach(), or a float attn_mask");
  if (is_transformed(call.query, call.key, call.value, call.attn_mask, call.sink)) {
    return decomposed::attention_forward(call);
  }
  if (needs_grad(call.query, call.key, call.value, call.attn_mask, call.sink)) {
    check_layout(call.query, "query");  // Function asks for sizes, which not every tensor has
    const variable_list results =
        AttentionFunction::apply(call.query, call.key, call.value, call.attn_mask, call.sink, call);
    return {results[0], results[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto [out, lse] = call_forward(forward_op(), call);
  return {out, lse};
}

AttentionGradients backward_autograd(const Tensor& dout, const OptionalTensor& dlse,
                                     const Tensor& out, const Tensor& lse,
                                     const AttentionCall& call, const std::array<bool, 5>& wanted) {
  if (is_transformed(dout, dlse, call.query, call.key, call.value, call.attn_mask, call.sink)) {
    return decomposed::attention_backward(dout, dlse, call, wanted);
  }
  if (needs_grad(dout, dlse, call.query, call.key, call.value, call.attn_mask, call.sink)) {
    const variable_list results =
        AttentionBackwardFunction::apply(dout, dlse, call.query, call.key, call.value,
                                         call.attn_mask, call.sink, out, lse, call, wanted);
    AttentionGradients gradients;
    size_t result = 0;
    const auto take = [&](bool made, Tensor* gradient) {
      if (made) *gradient = results[result++];
    };
    const bool stacked = !call.key.has_value();
    take(wanted[0], &gradients.query);
    take(wanted[1] && !stacked, &gradients.key);
    take(wanted[2] && call.value.has_value(), &gradients.value);
    take(wanted[3] && call.attn_mask.has_value(), &gradients.attn_mask);
    take(wanted[4] && call.sink.has_value(), &gradients.sink);
    return gradients;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto [dquery, dkey, dvalue, dmask, dsink] =
      call_backward(backward_op(), dout, dlse, out, lse, call, wanted);
  return {dquery, dkey, dvalue, dmask, dsink};
}

TORCH_LIBRARY_IMPL(fused_norm, Autograd, m) {
  m.impl("attention_forward", &forward_kernel<forward_autograd>);
  m.impl("attention_backward", &backward_kernel<backward_autograd>);
  m.impl("attention_rng", torch::CppFunction::makeFallthrough());
}

}  // namespace

std::pair<Tensor, Tensor> attention(const AttentionCall& call) {
  const auto [out, lse] = call_forward(forward_op(), call);
  return {out, lse};
}

}  // namespace fused_norm::ops
