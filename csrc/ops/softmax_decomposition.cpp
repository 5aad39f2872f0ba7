#include "ops/softmax_decomposition.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>

#include <limits>

#include "ops/checks.h"
#include "ops/softmax.h"

namespace fused_norm::ops::decomposed {
namespace {

using at::ScalarType;
using at::Tensor;

ScalarType accumulate_dtype(ScalarType input) {
  return input == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor scaled(const Tensor& tensor, double scale) { return scale == 1 ? tensor : tensor * scale; }

}  // namespace

Tensor softmax_forward(const Tensor& input, int64_t dim, bool log,
                       std::optional<ScalarType> out_dtype) {
  check_layout(input, "input");
  const ScalarType dtype = input.scalar_type(), y_dtype = out_dtype.value_or(dtype);
  check_softmax_options(dtype, y_dtype, input.dim(), dim);
  const Tensor x = input.to(accumulate_dtype(dtype));
  return (log ? at::log_softmax(x, dim) : at::softmax(x, dim)).to(y_dtype);
}

Tensor scaled_masked_softmax(const Tensor& input, const std::optional<Tensor>& mask, double scale,
                             bool causal, std::optional<ScalarType> out_dtype) {
  check_layout(input, "input");
  const bool has_mask = mask.has_value() && mask->defined();
  const ScalarType dtype = input.scalar_type(), y_dtype = out_dtype.value_or(dtype);
  check_masked_softmax_options(dtype, has_mask ? std::optional(mask->scalar_type()) : std::nullopt,
                               y_dtype, input.dim(), scale, causal);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Tensor x = scaled(input.to(accumulate_dtype(dtype)), scale);
  if (has_mask) {
    const Tensor expanded = expanded_mask(mask, input);
    x = mask->scalar_type() == at::kBool ? x.masked_fill(expanded, -kInfinity)
                                         : x + expanded.to(x.scalar_type());
  }
  if (causal) {
    const int64_t queries = input.size(-2), keys = input.size(-1);
    const Tensor later = at::ones({queries, keys}, input.options().dtype(at::kBool));
    x = x.masked_fill(later.triu(keys - queries + 1), -kInfinity);
  }
  if (!has_mask && !causal) return at::softmax(x, -1).to(y_dtype);
  const Tensor empty = x.eq(-kInfinity).all(-1, /*keepdim=*/true);
  return at::softmax(x.masked_fill(empty, 0), -1).masked_fill(empty, 0).to(y_dtype);
}

// dx = scale (dy - sum(dy p)) p, and of the logarithm scale (dy - p sum(dy)), with p the softmax.
Tensor softmax_backward(const Tensor& dy, const Tensor& output, int64_t dim, bool log,
                        ScalarType input_dtype, double scale) {
  const ScalarType dtype = accumulate_dtype(input_dtype);
  const Tensor d = dy.to(dtype), y = output.to(dtype);
  const Tensor dx = log ? d - y.exp() * d.sum(dim, /*keepdim=*/true)
                        : (d - (d * y).sum(dim, /*keepdim=*/true)) * y;
  return scaled(dx, scale).to(input_dtype);
}

std::pair<Tensor, Tensor> softmax_backward_backward(const Tensor& ddx, const Tensor& dy,
                                                    const Tensor& output, int64_t dim, bool log,
                                                    double scale) {
  const ScalarType dtype = accumulate_dtype(ddx.scalar_type());
  const Tensor g = scaled(ddx.to(dtype), scale), d = dy.to(dtype), y = output.to(dtype);
  const Tensor p = log ? y.exp() : y, gp = g * p;
  const Tensor along = gp.sum(dim, /*keepdim=*/true);
  const Tensor sum = (log ? d : d * p).sum(dim, /*keepdim=*/true);
  const Tensor of_dy = log ? g - along : gp - p * along;
  const Tensor of_output = log ? -gp * sum : g * (d - sum) - d * along;
  return {of_dy.to(dy.scalar_type()), of_output.to(output.scalar_type())};
}

}  // namespace fused_norm::ops::decomposed
