// What a norm's forward and backward pass check, and the count of columns that a saved output does
// not give back.
#include "ops/norm.h"

#include <ATen/ops/ones_like.h>

#include <cmath>

#include "core/norm/recoverable.h"
#include "ops/rows.h"

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymIntArrayRef;

// `x` is the dtype of what is normalized, whose name is `x_name`.
void check_param_dtype(ScalarType x, const char* x_name, std::optional<ScalarType> param,
                       const char* name) {
  if (!param.has_value()) return;
  check_floating(*param, name);
  TORCH_CHECK(*param == x || *param == at::kFloat || (x == at::kFloat && is_16_bit(*param)), name,
              " is ", *param, ", which does not go with ", x, " ", x_name,
              ": it must have the dtype of ", x_name, " or be float32 (float32 ", x_name,
              " also takes 16-bit parameters)");
}

}  // namespace

void check_norm_options(ScalarType input, std::optional<ScalarType> weight,
                        std::optional<ScalarType> bias, ScalarType out, double eps,
                        double weight_offset, std::optional<ScalarType> residual,
                        std::optional<ScalarType> residual_dtype) {
  check_floating(input, "input");
  ScalarType x = input;
  const char* x_name = "input";
  if (residual.has_value()) {
    x = residual_dtype.value_or(*residual);
    x_name = "residual_out";
    const auto goes_with_input = [&](ScalarType dtype) {
      return dtype == input || (is_16_bit(input) && dtype == at::kFloat);
    };
    // residual_dtype is the residual's by default: a caller who gave none reads of the residual.
    TORCH_CHECK(goes_with_input(*residual), "residual is ", *residual, ", which does not go with ",
                input, " input: it must have the input's dtype, or be float32 for 16-bit input");
    TORCH_CHECK(goes_with_input(x), "residual_dtype is ", x, ", which does not go with ", input,
                " input: it must be the input's dtype, or float32 for 16-bit input");
    TORCH_CHECK(*residual == input || *residual == x, "residual is ", *residual,
                ", which does not go with ", input, " input and residual_dtype ", x,
                ": it must have the dtype of one of them");
  }
  TORCH_CHECK(
      out == x || (is_16_bit(x) && out == at::kFloat) || (x == at::kFloat && is_16_bit(out)),
      "out_dtype is ", out, ", which does not go with ", x, " ", x_name,
      ": it must be its dtype, float32 for 16 bit, or 16-bit for float32");
  check_param_dtype(x, x_name, weight, "weight");
  check_param_dtype(x, x_name, bias, "bias");
  TORCH_CHECK(std::isfinite(eps) && eps >= 0, "eps must be finite and not negative, but is ", eps);
  TORCH_CHECK(std::isfinite(weight_offset), "weight_offset must be finite, but is ", weight_offset);
  TORCH_CHECK(weight.has_value() || weight_offset == 0, "weight_offset is ", weight_offset,
              ", but there is no weight to add it to");
}

void check_params(const OptionalTensor& weight, const OptionalTensor& bias, bool rms,
                  SymIntArrayRef normalized_shape, const Tensor& input) {
  check_param(weight, "weight", normalized_shape, input);
  check_param(bias, "bias", normalized_shape, input);
  TORCH_CHECK(!rms || !has(bias), "bias must be None with rms=True, but has shape ",
              bias->sym_sizes());
}

c10::SymDimVector stats_shape(const Tensor& input, SymIntArrayRef normalized_shape) {
  const SymIntArrayRef sizes = input.sym_sizes();
  c10::SymDimVector shape(sizes.begin(), sizes.end() - normalized_shape.size());
  shape.resize(sizes.size(), 1);
  return shape;
}

void check_norm(const NormCall& call) {
  const Tensor& input = call.input;
  check_layout(input, "input");
  if (has(call.residual)) check_layout(*call.residual, "residual");
  check_norm_options(input.scalar_type(), dtype_of(call.weight), dtype_of(call.bias),
                     call.y_dtype(), call.eps, call.weight_offset, dtype_of(call.residual),
                     call.residual_dtype);
  if (has(call.residual)) check_like(*call.residual, "residual", input, "input");
  check_normalized(input, "input", call.normalized_shape);
  check_params(call.weight, call.bias, call.rms, call.normalized_shape, input);
}

Tensor unrecoverable_columns(const OptionalTensor& weight, const OptionalTensor& bias,
                             double weight_offset, ScalarType out_dtype) {
  const auto limits = recoverable_limits<double>(to_dtype(out_dtype));
  // In fp64, so that no comparison over- or underflows whatever the parameters' dtype; but the
  // offset is added in the precision in which the kernels add it.
  const Tensor g = has(weight) ? weight->to(accumulate_dtype(weight->scalar_type()))
                                     .add(weight_offset)
                                     .to(at::kDouble)
                                     .abs()
                               : at::ones_like(*bias, bias->options().dtype(at::kDouble));
  Tensor recoverable = g.ge(limits.smallest).logical_and_(g.le(limits.largest));
  if (has(bias)) recoverable.logical_and_(bias->to(at::kDouble).abs().mul_(limits.ratio).le(g));
  return recoverable.logical_not_().sum();
}

}  // namespace fused_norm::ops
