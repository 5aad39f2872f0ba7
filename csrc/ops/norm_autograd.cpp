// Derivatives above the first, those of statistics, forward mode and torch.func transforms are
// those of decompositions (fused_norm/_decompositions.py), which the operators' Autograd kernels
// (fused_norm/_autograd.py) ask for.
#include "ops/norm_autograd.h"

#include <ATen/TracerMode.h>
#include <ATen/ops/add.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <tuple>
#include <utility>

#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/column_watch.h"

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Dtype = std::optional<ScalarType>;
using Forward = std::vector<Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                    SymIntArrayRef, double, double, bool, Dtype,
                                    const OptionalTensor&, Dtype, std::optional<SymInt>);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                    const OptionalTensor&, const Tensor&,
                                                    const OptionalTensor&, const OptionalTensor&,
                                                    SymIntArrayRef, double, bool, bool, ScalarType,
                                                    std::array<bool, 3>, const OptionalTensor&,
                                                    const OptionalTensor&, const OptionalTensor&);
using StatisticsBackward = Tensor(const OptionalTensor&, const OptionalTensor&,
                                  const OptionalTensor&, const Tensor&, const OptionalTensor&,
                                  const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                  SymIntArrayRef, double, bool, bool, ScalarType,
                                  const OptionalTensor&, const OptionalTensor&);

// Whether the operators' Autograd kernels are to differentiate: they know torch.jit.trace too.
template <typename... Tensors>
bool is_decomposed(const Tensors&... tensors) {
  return is_transformed(tensors...) || at::tracer::impl::is_dispatch_enabled();
}

OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// The operator's results.
variable_list run_forward(const Tensor& input, const OptionalTensor& residual,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          const NormOptions& how, const SymInt& room) {
  static const auto op = find_operator<Forward>("fused_norm::norm_forward");
  return op.call(input, weight, bias, how.normalized_shape, how.eps, how.weight_offset, how.rms,
                 how.out_dtype, residual, how.residual_dtype,
                 room > 0 ? std::optional(room) : std::nullopt);
}

// What a call saves, in this order; undefined what it does not need.
enum Saved { kSaved, kMean, kRstd, kWeight, kBias, kSide, kColumns, kSavedTensors };

// The rest of it but weight_offset.
struct Call {
  uint16_t row_dims;  // how many dimensions are normalized
  bool rms, from_output, adds;
  ScalarType x_dtype, input_dtype, residual_dtype;  // x: what is normalized
};

}  // namespace

// Profiles show this name, which is to be the same in every build.
struct NormFunction : torch::autograd::Function<NormFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& input,
                               const OptionalTensor& residual, const OptionalTensor& weight,
                               const OptionalTensor& bias, const NormOptions& how,
                               const SymInt& room) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list results = run_forward(input, residual, weight, bias, how, room);
    const bool adds = residual.has_value();
    const bool lists = room > 0, from_output = room >= 0;
    const Tensor& x = adds ? results[1] : input;
    const auto statistics = results.begin() + (adds ? 2 : 1);  // (mean, rstd), or (rstd, ...)

    variable_list saved(kSavedTensors);
    saved[kSaved] = from_output ? results[0] : x;
    if (!from_output && !how.rms) saved[kMean] = statistics[0];
    saved[kRstd] = statistics[lists ? 0 : 1];
    if (weight.has_value()) saved[kWeight] = *weight;
    if (bias.has_value()) saved[kBias] = *bias;
    if (lists) {
      saved[kSide] = statistics[1];
      saved[kColumns] = statistics[2];
    }
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    ctx->saved_data["weight_offset"] = how.weight_offset;
    ctx->saved_data["call"] = packed(
        Call{static_cast<uint16_t>(how.normalized_shape.size()), how.rms, from_output, adds,
             x.scalar_type(), input.scalar_type(), (adds ? *residual : input).scalar_type()});
    return results;
  }

  // `grads` are those of the results of the operator.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const double weight_offset = ctx->saved_data["weight_offset"].toDouble();
    const Call call = unpacked<Call>(ctx->saved_data["call"].toInt());
    const bool rms = call.rms, adds = call.adds;
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor mean = optional(saved[kMean]), weight = optional(saved[kWeight]),
                         bias = optional(saved[kBias]), side = optional(saved[kSide]),
                         columns = optional(saved[kColumns]);
    const SymIntArrayRef sizes = saved[kSaved].sym_sizes();
    const SymIntArrayRef shape = sizes.slice(sizes.size() - call.row_dims);

    // Edges are counted over the tensors that the call had.
    size_t edge = 0;
    const bool of_input = ctx->needs_input_grad(edge++);
    const bool of_residual = adds && ctx->needs_input_grad(edge++);
    std::array<bool, 3> needs = {of_input || of_residual, false, false};
    if (weight.has_value()) needs[1] = ctx->needs_input_grad(edge++);
    if (bias.has_value()) needs[2] = ctx->needs_input_grad(edge++);

    const Tensor& dy = grads[0];
    Tensor dx, dweight, dbias;
    if (adds && needs[0]) dx = grads[1];
    if (dy.defined()) {
      static const auto op = find_operator<Backward>("fused_norm::norm_backward");
      // With create_graph=True, or under a transform, the operator's own Autograd kernel decides.
      std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
      if (!at::GradMode::is_enabled() && !is_decomposed(dy)) below_autograd.emplace();
      std::tie(dx, dweight, dbias) =
          op.call(dy, saved[kSaved], mean, saved[kRstd], weight, bias, shape, weight_offset, rms,
                  call.from_output, call.x_dtype, needs, side, columns, optional(dx));
    }
    const size_t first = adds ? 2 : 1;
    const bool lists = columns.has_value();
    const OptionalTensor dmean = lists || rms ? std::nullopt : optional(grads[first]);
    const OptionalTensor drstd = optional(grads[lists ? first : first + 1]);
    const OptionalTensor dside = lists ? optional(grads[first + 1]) : std::nullopt;
    if (needs[0] && (dmean.has_value() || drstd.has_value() || dside.has_value())) {
      static const auto op =
          find_operator<StatisticsBackward>("fused_norm::norm_statistics_backward");
      const Tensor more =
          op.call(dmean, drstd, dside, saved[kSaved], mean, saved[kRstd], weight, bias, shape,
                  weight_offset, rms, call.from_output, call.x_dtype, side, columns);
      dx = dx.defined() ? at::add(dx, more) : more;
    }

    // One tensor for both terms where their dtypes agree.
    const auto term = [&](bool wanted, ScalarType dtype) {
      if (!wanted || !dx.defined()) return Tensor();
      return dx.scalar_type() == dtype ? dx : dx.to(dtype);
    };
    return {term(of_input, call.input_dtype),
            term(of_residual, call.residual_dtype),
            dweight,
            dbias,
            {},
            {}};
  }
};

namespace {

bool is_subclass(const OptionalTensor& tensor) {  // a tracer's, or distributed
  return tensor.has_value() && tensor->key_set().has(c10::DispatchKey::Python);
}

SymInt room_for(const Tensor& x, ScalarType x_dtype, const OptionalTensor& weight,
                const OptionalTensor& bias, const NormOptions& how) {
  if (!weight.has_value() && !bias.has_value()) return 0;
  if (is_subclass(x) || is_subclass(weight) || is_subclass(bias)) return kSaveInput;
  int64_t cols = 1;
  for (const SymInt& size : how.normalized_shape) {
    const std::optional<int64_t> known = size.maybe_as_int();
    if (!known.has_value()) return kSaveInput;
    cols *= *known;
  }
  return choose_room({weight.value_or(Tensor()), bias.value_or(Tensor()), how.weight_offset, cols,
                      x_dtype, how.out_dtype.value_or(x.scalar_type())});
}

}  // namespace

variable_list record_norm(const Tensor& input, const OptionalTensor& residual,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          const NormOptions& options, const SymInt& room) {
  check_layout(input, "input");  // Function asks for sizes, which not every tensor has
  if (residual.has_value()) check_layout(*residual, "residual");
  if (weight.has_value()) check_layout(*weight, "weight");
  if (bias.has_value()) check_layout(*bias, "bias");
  return NormFunction::apply(input, residual, weight, bias, options, room);
}

variable_list norm(const Tensor& input, const OptionalTensor& residual,
                   const OptionalTensor& weight, const OptionalTensor& bias,
                   const NormOptions& options, bool memory_efficient) {
  if (is_decomposed(input, residual, weight, bias)) {
    return run_forward(input, residual, weight, bias, options, 0);
  }
  if (!needs_grad(input, residual, weight, bias)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return run_forward(input, residual, weight, bias, options, 0);
  }
  SymInt room = kSaveInput;
  if (memory_efficient) {
    const ScalarType x_dtype = residual.has_value()
                                   ? options.residual_dtype.value_or(residual->scalar_type())
                                   : input.scalar_type();
    room = room_for(input, x_dtype, weight, bias, options);
  }
  const EagerCall eager;
  return record_norm(input, residual, weight, bias, options, room);
}

}  // namespace fused_norm::ops
