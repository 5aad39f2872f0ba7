// The derivatives of the softmax operators, as kernels of the dispatcher's Autograd key. In C++:
// torch's own softmax takes the host 6 us a call with a graph, and a Python autograd.Function alone
// as much again. The first derivative is the kernels'; of higher ones, forward mode and torch.func
// transforms the operators' decompositions take care.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/softmax.h"
#include "ops/softmax_decomposition.h"

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using ForwardOp = Tensor(const Tensor&, int64_t, bool, std::optional<ScalarType>);
using MaskedOp = Tensor(const Tensor&, const std::optional<Tensor>&, double, bool,
                        std::optional<ScalarType>);
using BackwardOp = Tensor(const Tensor&, const Tensor&, int64_t, bool, ScalarType, double);

const auto& forward_op() {
  static const auto op = find_operator<ForwardOp>("fused_norm::softmax_forward");
  return op;
}
const auto& masked_op() {
  static const auto op = find_operator<MaskedOp>("fused_norm::scaled_masked_softmax");
  return op;
}
const auto& backward_op() {
  static const auto op = find_operator<BackwardOp>("fused_norm::softmax_backward");
  return op;
}

// What a call saves beside tensors, and the scale of its input.
struct Call {
  int16_t dim;
  bool log;
  ScalarType input_dtype;
};

void save(AutogradContext* ctx, variable_list tensors, int64_t dim, bool log,
          ScalarType input_dtype, double scale) {
  ctx->save_for_backward(std::move(tensors));
  ctx->set_materialize_grads(false);
  ctx->saved_data["call"] = packed(Call{static_cast<int16_t>(dim), log, input_dtype});
  ctx->saved_data["scale"] = scale;
}

Call saved_call(AutogradContext* ctx) { return unpacked<Call>(ctx->saved_data["call"].toInt()); }

double saved_scale(AutogradContext* ctx) { return ctx->saved_data["scale"].toDouble(); }

Tensor gradient(AutogradContext* ctx, const Tensor& dy) {
  if (!dy.defined()) return {};
  const Tensor output = ctx->get_saved_variables()[0];
  const Call call = saved_call(ctx);
  const auto run = [&] {
    return backward_op().call(dy, output, call.dim, call.log, call.input_dtype, saved_scale(ctx));
  };
  // With create_graph=True, or a tangent, the operator's own Autograd kernel decides.
  if (at::GradMode::is_enabled() || has_tangent(dy)) return run();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return run();
}

}  // namespace

// Profiles show the names of these structs, which are to be the same in every build.
struct SoftmaxFunction : torch::autograd::Function<SoftmaxFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, int64_t dim, bool log,
                        std::optional<ScalarType> out_dtype) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensor output = forward_op().call(input, dim, log, out_dtype);
    save(ctx, {output}, dim, log, input.scalar_type(), 1);
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& dy) {
    return {gradient(ctx, dy[0]), {}, {}, {}};
  }
};

struct ScaledMaskedSoftmaxFunction : torch::autograd::Function<ScaledMaskedSoftmaxFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input,
                        const std::optional<Tensor>& mask, double scale, bool causal,
                        std::optional<ScalarType> out_dtype) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensor output = masked_op().call(input, mask, scale, causal, out_dtype);
    save(ctx, {output}, -1, false, input.scalar_type(), scale);
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& dy) {
    return {gradient(ctx, dy[0]), {}, {}, {}, {}};
  }
};

// softmax_backward where it is to be differentiated in turn: the kernels' values, and derivatives
// to any order.
struct SoftmaxBackwardFunction : torch::autograd::Function<SoftmaxBackwardFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& dy, const Tensor& output, int64_t dim,
                        bool log, ScalarType input_dtype, double scale) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    save(ctx, {dy, output}, dim, log, input_dtype, scale);
    return backward_op().call(dy, output, dim, log, input_dtype, scale);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& ddx) {
    if (!ddx[0].defined()) return {{}, {}, {}, {}, {}, {}};
    const auto saved = ctx->get_saved_variables();
    const Call call = saved_call(ctx);
    const auto [of_dy, of_output] = decomposed::softmax_backward_backward(
        ddx[0], saved[0], saved[1], call.dim, call.log, saved_scale(ctx));
    return {of_dy, of_output, {}, {}, {}, {}};
  }
};

namespace {

Tensor forward_autograd(const Tensor& input, int64_t dim, bool log,
                        std::optional<ScalarType> out_dtype) {
  if (is_transformed(input)) {
    return decomposed::softmax_forward(input, dim, log, out_dtype);
  }
  if (needs_grad(input)) {
    check_layout(input, "input");  // Function asks for sizes, which not every tensor has
    return SoftmaxFunction::apply(input, dim, log, out_dtype);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return forward_op().call(input, dim, log, out_dtype);
}

Tensor masked_autograd(const Tensor& input, const std::optional<Tensor>& mask, double scale,
                       bool causal, std::optional<ScalarType> out_dtype) {
  TORCH_CHECK(!needs_grad(mask) && !has_tangent(mask),
              "mask requires grad, but scaled_masked_softmax does not differentiate a mask: pass "
              "mask.detach(), or add it to the input before softmax");
  if (is_transformed(input)) {
    return decomposed::scaled_masked_softmax(input, mask, scale, causal, out_dtype);
  }
  if (needs_grad(input)) {
    check_layout(input, "input");
    return ScaledMaskedSoftmaxFunction::apply(input, mask, scale, causal, out_dtype);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return masked_op().call(input, mask, scale, causal, out_dtype);
}

Tensor backward_autograd(const Tensor& dy, const Tensor& output, int64_t dim, bool log,
                         ScalarType input_dtype, double scale) {
  if (is_transformed(dy, output)) {
    return decomposed::softmax_backward(dy, output, dim, log, input_dtype, scale);
  }
  if (needs_grad(dy, output)) {
    return SoftmaxBackwardFunction::apply(dy, output, dim, log, input_dtype, scale);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return backward_op().call(dy, output, dim, log, input_dtype, scale);
}

TORCH_LIBRARY_IMPL(fused_norm, Autograd, m) {
  m.impl("softmax_forward", &forward_autograd);
  m.impl("scaled_masked_softmax", &masked_autograd);
  m.impl("softmax_backward", &backward_autograd);
}

}  // namespace

Tensor softmax(const Tensor& input, int64_t dim, bool log, std::optional<ScalarType> out_dtype) {
  return forward_op().call(input, dim, log, out_dtype);
}

}  // namespace fused_norm::ops
