// The norms as autograd records them: which of a call's tensors are saved, and the gradients from
// those. In C++: with a Python autograd.Function a call took the host twice as long.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/add.h>

#include <array>
#include <tuple>
#include <utility>

#include "ops/autograd.h"
#include "ops/column_watch.h"
#include "ops/norm.h"

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

const auto& forward_op() { return operator_of<kernel<norm_forward>>("norm_forward"); }
const auto& backward_op() { return operator_of<kernel<norm_backward>>("norm_backward"); }

// What a call saves, in this order; undefined what it does not need.
enum Saved { kSaved, kMean, kRstd, kWeight, kBias, kSide, kColumns, kSavedTensors };

// And beside them: how many dimensions are normalized, rms, from_output, and whether there is a
// residual; weight_offset, and the dtype of what is normalized.
using Form = std::tuple<int64_t, bool, bool, bool, double, ScalarType>;

}  // namespace

// Profiles show this name, which is to be the same in every build.
struct NormFunction : torch::autograd::Function<NormFunction> {
  static constexpr bool is_traceable = true;

  // What is differentiated comes by itself too: autograd does not look into `how`. Without a
  // gradient of input or residual the output alone is a result, and the others go to `constants`:
  // compiled autograd takes none that is marked as not differentiable.
  static variable_list forward(AutogradContext* ctx, const Tensor& /*input*/,
                               const OptionalTensor& /*weight*/, const OptionalTensor& /*bias*/,
                               const OptionalTensor& /*residual*/, const NormCall& how,
                               const SymInt& room, variable_list* constants) {
    NormCall with_room = how;
    if (room > 0) with_room.room = room;
    variable_list results = forward_op().below_autograd(with_room);
    const bool adds = has(how.residual), lists = room > 0, from_output = room >= 0;
    const Tensor& x = adds ? results[1] : how.input;
    // (rstd, side, columns) with a list, else (mean, rstd).
    const auto statistics = results.begin() + (adds ? 2 : 1);

    variable_list saved(kSavedTensors);
    saved[kSaved] = from_output ? saved_result(results[0]) : adds ? saved_result(x) : x;
    if (!from_output && !how.rms) saved[kMean] = saved_result(statistics[0]);
    saved[kRstd] = saved_result(statistics[lists ? 0 : 1]);
    saved[kWeight] = or_undefined(how.weight);
    saved[kBias] = or_undefined(how.bias);
    if (lists) {
      saved[kSide] = saved_result(statistics[1]);
      saved[kColumns] = statistics[2];
    }
    if ((from_output || adds) && has_saved_tensor_hooks()) {
      // Autograd checks no tensor that hooks keep. This one has its version, and no data.
      const Tensor version = at::detail::empty_cpu({0}, at::kByte);  // which no mode sees
      torch::autograd::impl::set_version_counter(
          version, torch::autograd::impl::version_counter(from_output ? results[0] : x));
      ctx->saved_data["version"] = version;
    }
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    ctx->saved_data["form"] = Form(how.normalized_shape.size(), how.rms, from_output, adds,
                                   how.weight_offset, x.scalar_type());
    if (!how.input.requires_grad() && !(adds && how.residual->requires_grad())) {
      constants->assign(results.begin() + 1, results.end());
      results.resize(1);
    }
    return results;
  }

  // `grads` are those of the results of the operator, or of its output alone.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto [row_dims, rms, from_output, adds, weight_offset, x_dtype] =
        ctx->saved_data["form"].to<Form>();
    variable_list saved = ctx->get_saved_variables();
    // A hook may give an unchanged copy of a result that was changed.
    const auto version = ctx->saved_data.find("version");
    TORCH_CHECK(version == ctx->saved_data.end() || version->second.toTensor()._version() == 0 ||
                    saved[kSaved]._version() == 0,
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: the ",
                from_output ? "output" : "residual_out", " of a norm");
    const bool lists = saved[kColumns].defined();
    // The results' numbers; with a list there is no mean, without one no side.
    const uint32_t mean_at = 1 + adds, side_at = mean_at + 1, rstd_at = lists ? mean_at : side_at;
    const bool flows = grads.size() > 1;  // to the input or the residual
    grads.resize(5);
    if (from_output || (adds && flows)) make_result(&saved[kSaved], from_output ? 0 : 1);
    if (flows) {
      make_result(&saved[kMean], mean_at);
      make_result(&saved[kRstd], rstd_at);
      make_result(&saved[kSide], side_at);
    }
    // A hook of saved tensors may give them other strides.
    for (const int i : {kMean, kRstd, kSide, kColumns})
      if (saved[i].defined()) saved[i] = saved[i].contiguous();
    const OptionalTensor mean = optional(saved[kMean]), weight = optional(saved[kWeight]),
                         bias = optional(saved[kBias]), side = optional(saved[kSide]),
                         columns = optional(saved[kColumns]);
    const SymIntArrayRef sizes = saved[kSaved].sym_sizes();
    const SymIntArrayRef shape = sizes.slice(sizes.size() - row_dims);

    // Edges are counted over the tensors that the call had: input, weight, bias, residual.
    size_t edges = 0;
    const auto needs_next = [&](bool given) { return given && ctx->needs_input_grad(edges++); };
    const bool of_input = needs_next(true), of_weight = needs_next(weight.has_value()),
               of_bias = needs_next(bias.has_value()), of_residual = needs_next(adds);
    const std::array<bool, 3> needs = {of_input || of_residual, of_weight, of_bias};

    Tensor dx = adds && needs[0] ? grads[1] : Tensor(), dweight, dbias;
    const OptionalTensor dresidual = optional(dx);
    const NormBackwardCall pass{grads[0], saved[kSaved], mean,          saved[kRstd], weight,
                                bias,     shape,         weight_offset, rms,          from_output,
                                x_dtype,  needs,         side,          columns,      dresidual};
    if (pass.dy.defined()) std::tie(dx, dweight, dbias) = backward_op().in_backward(pass);
    const OptionalTensor dmean = lists || rms ? std::nullopt : optional(grads[mean_at]);
    const OptionalTensor drstd = optional(grads[rstd_at]);
    const OptionalTensor dside = lists ? optional(grads[side_at]) : std::nullopt;
    if (needs[0] && (dmean.has_value() || drstd.has_value() || dside.has_value())) {
      c10::Stack stack = as_stack(dmean, drstd, dside, pass);
      find_operator("fused_norm::norm_statistics_backward").callBoxed(&stack);
      dx = dx.defined() ? at::add(dx, stack[0].toTensor()) : stack[0].toTensor();
    }

    // Autograd converts dx to the dtype of each.
    variable_list gradients{of_input ? dx : Tensor(), dweight, dbias, of_residual ? dx : Tensor()};
    gradients.resize(7);  // none of the call, the room and the constants
    return gradients;
  }
};

namespace {

bool is_subclass(const OptionalTensor& tensor) {  // a tracer's, or distributed
  return tensor.has_value() && tensor->key_set().has(c10::DispatchKey::Python);
}

SymInt room_of(const NormCall& call) {
  const OptionalTensor &weight = call.weight, &bias = call.bias;
  if (!has(weight) && !has(bias)) return 0;
  if (is_subclass(call.input) || is_subclass(weight) || is_subclass(bias)) return kSaveInput;
  const auto shape = c10::asIntArrayRefSlowOpt(call.normalized_shape);
  if (!shape.has_value()) return kSaveInput;
  return choose_room({or_undefined(weight), or_undefined(bias), call.weight_offset,
                      c10::multiply_integers(*shape), call.x_dtype(), call.y_dtype()});
}

// On record: differentiable in all that depends on the input. `room` is kSaveInput, or that for
// listed columns of a call that saves its output; with 0 it has no list.
variable_list record(const NormCall& call, const SymInt& room) {
  check_sizes(check_norm, call);
  variable_list constants, results = NormFunction::apply(call.input, call.weight, call.bias,
                                                         call.residual, call, room, &constants);
  results.insert(results.end(), constants.begin(), constants.end());
  return results;
}

variable_list differentiate_norm(const NormCall& call) {
  if (auto results = forward_op().unrecorded(check_norm, call)) return *std::move(results);
  TORCH_CHECK(!call.room.has_value() || *call.room > 0, "room is ", *call.room,
              "; a call that is differentiated needs room");
  return record(call, call.room.value_or(kSaveInput));
}

TORCH_LIBRARY_FRAGMENT(fused_norm, m) {
  const std::string backward_call =
      "Tensor saved, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, SymInt[] "
      "normalized_shape, float weight_offset, bool rms, bool from_output, ScalarType input_dtype, "
      "bool[3] output_mask, Tensor? side=None, Tensor? columns=None, Tensor? dresidual=None) -> ";
  define_differentiable(
      m, "norm_forward",
      "(Tensor input, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, float eps, float "
      "weight_offset=0.0, bool rms=False, ScalarType? out_dtype=None, Tensor? residual=None, "
      "ScalarType? residual_dtype=None, SymInt? room=None) -> Tensor[]",
      kernel<norm_forward>, kernel<differentiate_norm>);
  define_backward(m, "norm_backward",
                  "(Tensor dy, " + backward_call + "(Tensor dx, Tensor dweight, Tensor dbias)",
                  kernel<norm_backward>);
  // The input's gradient from those of mean, rstd and side: a decomposition alone.
  m.def(("norm_statistics_backward(Tensor? dmean, Tensor? drstd, Tensor? dside, Tensor? dy, " +
         backward_call + "Tensor")
            .c_str());
}

}  // namespace

variable_list norm(const NormCall& call, bool memory_efficient) {
  if (is_transformed(call)) return forward_op().call(call);
  if (!needs_grad(call)) return forward_op().below_autograd(call);
  return record(call, memory_efficient ? room_of(call) : SymInt(kSaveInput));
}

}  // namespace fused_norm::ops
