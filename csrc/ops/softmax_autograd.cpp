// The derivatives of the softmax operators. In C++: torch's own softmax takes the host 6 us a call
// with a graph, and a Python autograd.Function alone as much again.
#include <c10/util/FunctionRef.h>

#include <optional>
#include <utility>

#include "ops/autograd.h"
#include "ops/softmax.h"

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;

const auto& forward_op() {
  static const Operator op("softmax_forward", softmax_forward);
  return op;
}
const auto& masked_op() {
  static const Operator op("scaled_masked_softmax", scaled_masked_softmax);
  return op;
}
const auto& backward_op() {
  static const Operator op("softmax_backward", softmax_backward);
  return op;
}

// What a call saves beside its output, and the scale of its input.
struct Call {
  int16_t dim;
  bool log;
  ScalarType input_dtype;
};

}  // namespace

// `run` calls the operator, below autograd.
template <typename Self>
struct RecordedSoftmax : torch::autograd::Function<Self> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, int64_t dim, bool log,
                        double scale, c10::function_ref<Tensor()> run) {
    const Tensor output = run();
    ctx->save_for_backward({saved_result(output)});
    ctx->set_materialize_grads(false);
    const Call call{static_cast<int16_t>(dim), log, input.scalar_type()};
    ctx->saved_data["call"] = packed(call);
    ctx->saved_data["scale"] = scale;
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(5);
    const Tensor& dy = grads[0];
    if (!dy.defined()) return results;
    const Tensor output = ctx->get_saved_variables()[0];
    const auto call = unpacked<Call>(ctx->saved_data["call"].toInt());
    results[0] = backward_op().in_backward(dy, output, call.dim, call.log, call.input_dtype,
                                           ctx->saved_data["scale"].toDouble());
    return results;
  }
};
// Profiles show these names, which are to be the same in every build.
struct SoftmaxFunction : RecordedSoftmax<SoftmaxFunction> {};
struct ScaledMaskedSoftmaxFunction : RecordedSoftmax<ScaledMaskedSoftmaxFunction> {};

Tensor differentiate_softmax(const Tensor& input, int64_t dim, bool log,
                             std::optional<ScalarType> out_dtype) {
  const auto check = [&](const auto&...) { check_softmax(input, dim, out_dtype); };
  const auto result = forward_op().unrecorded(check, input, dim, log, out_dtype);
  if (result.has_value()) return *result;
  check_layout(input, "input");  // Function asks for sizes, which not every tensor has
  const auto run = [&] { return forward_op().below_autograd(input, dim, log, out_dtype); };
  return SoftmaxFunction::apply(input, dim, log, 1.0, run);
}

Tensor differentiate_masked_softmax(const Tensor& input, const OptionalTensor& mask, double scale,
                                    bool causal, std::optional<ScalarType> out_dtype) {
  TORCH_CHECK(!needs_grad(mask) && !any_tensor(has_tangent, mask),
              "mask requires grad, but scaled_masked_softmax does not differentiate a mask: pass "
              "mask.detach(), or add it to the input before softmax");
  const auto result =
      masked_op().unrecorded(check_masked_softmax, input, mask, scale, causal, out_dtype);
  if (result.has_value()) return *result;
  check_layout(input, "input");
  const auto run = [&] {
    return masked_op().below_autograd(input, mask, scale, causal, out_dtype);
  };
  return ScaledMaskedSoftmaxFunction::apply(input, int64_t{-1}, false, scale, run);
}

Tensor softmax(const Tensor& input, int64_t dim, bool log, std::optional<ScalarType> out_dtype) {
  return forward_op().call(input, dim, log, out_dtype);
}

}  // namespace fused_norm::ops
