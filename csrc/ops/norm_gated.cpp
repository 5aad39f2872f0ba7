// Gated RMSNorm: y = norm(x) * act(gate) or norm(x * act(gate)), with norm(x) = x * rstd * (weight
// + weight_offset) and act silu or sigmoid; core/norm/gated.cuh. Its operators are in torch.ops
// alone.
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>

#include "ops/autograd.h"
#include "ops/launch.h"
#include "ops/norm.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

struct GatedCall {
  at::Tensor input, gate;
  OptionalTensor weight;
  c10::SymIntArrayRef normalized_shape;
  double eps, weight_offset;
  bool norm_before_gate, silu;
  std::optional<c10::SymInt> group_size;  // elements of a row that are normalized together

  auto fields() const {
    return std::tie(input, gate, weight, normalized_shape, eps, weight_offset, norm_before_gate,
                    silu, group_size);
  }
};

// What is differentiated, in this order.
enum GatedGradient { kInput, kGate, kWeight };

// What the backward operator is called with.
struct GatedBackwardCall {
  const at::Tensor &dy, &rstd;
  GatedCall forward;
  std::array<bool, 3> wanted;

  auto fields() const {
    return std::tuple_cat(std::tie(dy, rstd), forward.fields(), std::tie(wanted));
  }
};

// The shape of a call's tensors where its groups are rows: (..., groups, columns).
c10::SymDimVector shape_of(const GatedCall& call) {
  const SymIntArrayRef sizes = call.input.sym_sizes();
  c10::SymDimVector shape(sizes.begin(), sizes.end() - call.normalized_shape.size());
  const SymInt cols = c10::multiply_integers(call.normalized_shape);
  shape.push_back(call.group_size.has_value() ? cols / *call.group_size : 1);
  shape.push_back(call.group_size.value_or(cols));
  return shape;
}

// And that of rstd.
SymIntArrayRef lead_of(const c10::SymDimVector& shape) {
  return SymIntArrayRef(shape).slice(0, shape.size() - 1);
}

// Chains of ATen's operators, for the CPU and what the kernels do not do.

// The tensors of a call in the precision of sums, as (..., groups, cols).
struct Wide {
  Tensor x, z, sigmoid, act, weight, v, rstd, xhat;

  explicit Wide(const GatedCall& call) {
    const auto shape = shape_of(call);
    const ScalarType dtype = at::toOpMathType(call.input.scalar_type());
    x = call.input.to(dtype).reshape_symint(shape);
    z = call.gate.to(dtype).reshape_symint(shape);
    // ATen's own activations round the last elements of a tensor in another way.
    sigmoid = ((-z).exp() + 1).reciprocal();
    act = call.silu ? z * sigmoid : sigmoid;
    weight = has(call.weight) ? (call.weight->to(dtype) + call.weight_offset)
                                    .reshape_symint(SymIntArrayRef(shape).slice(shape.size() - 2))
                              : at::ones({}, x.options());
    v = call.norm_before_gate ? x : x * act;
    // By the norm's own kernels, as a row's bits in ATen's sums may depend on how many there are.
    const SymInt cols[] = {shape.back()};
    const auto norm = norm_forward({v, kNoTensor, kNoTensor, cols, call.eps, 0, /*rms=*/true,
                                    std::nullopt, kNoTensor, std::nullopt, std::nullopt});
    xhat = norm.front();
    rstd = norm.back();
  }
  // dv, of what is normalized.
  Tensor backward(const Tensor& dxhat) const {
    const SymInt cols[] = {v.sym_size(-1)};
    const std::array wanted{true, false, false};
    return norm_backward({dxhat, v, kNoTensor, rstd, kNoTensor, kNoTensor, cols, 0, /*rms=*/true,
                          /*from_output=*/false, v.scalar_type(), wanted, kNoTensor, kNoTensor,
                          kNoTensor})[0];
  }
};

Forward forward_by_chain(const GatedCall& call) {
  const Wide wide(call);
  Tensor y = wide.xhat * wide.weight;
  if (call.norm_before_gate) y = y * wide.act;
  y = y.reshape_symint(call.input.sym_sizes()).to(call.input.scalar_type());
  return {y.contiguous(), wide.rstd.squeeze(-1).contiguous()};
}

Gradients<3> backward_by_chain(const GatedBackwardCall& pass) {
  const GatedCall& call = pass.forward;
  const auto& wanted = pass.wanted;
  const Wide wide(call);
  const Tensor d = pass.dy.to(wide.x.scalar_type()).reshape_symint(wide.x.sym_sizes());
  const Tensor of_norm = call.norm_before_gate ? d * wide.act : d;
  const auto as_given = [](const Tensor& gradient, const Tensor& of) {
    return gradient.reshape_symint(of.sym_sizes()).to(of.scalar_type()).contiguous();
  };
  Gradients<3> made;
  if (wanted[kWeight] && has(call.weight)) {
    const Tensor sum = (of_norm * wide.xhat).sum_to_size_symint(wide.weight.sym_sizes());
    made[kWeight] = as_given(sum, *call.weight);
  }
  if (!wanted[kInput] && !wanted[kGate]) return made;
  const Tensor dv = wide.backward(of_norm * wide.weight);
  if (wanted[kInput]) {
    made[kInput] = as_given(call.norm_before_gate ? dv : dv * wide.act, call.input);
  }
  if (wanted[kGate]) {
    const Tensor of_act = call.norm_before_gate ? d * wide.xhat * wide.weight : dv * wide.x;
    const Tensor& s = wide.sigmoid;
    const Tensor slope = call.silu ? s * (wide.z * (1 - s) + 1) : s * (1 - s);
    made[kGate] = as_given(of_act * slope, call.gate);
  }
  return made;
}

#ifdef FUSED_NORM_WITH_CUDA

// A tensor of a call as rows of (..., groups, cols). Forward is fp32 `within`.
Rows rows_of(const Tensor& tensor, at::IntArrayRef shape, DType within) {
  return as_rows(tensor.reshape(shape), 1, pack_elements(to_dtype(tensor.scalar_type()), within));
}

// What forward and backward have in common.
struct Launch {
  const GatedCall& call;
  const c10::SymDimVector sym_shape = shape_of(call);
  const at::IntArrayRef shape = C10_AS_INTARRAYREF_SLOW(sym_shape);  // (..., groups, columns)
  const int64_t groups = shape.end()[-2];
  const Tensor weight = aligned(or_undefined(call.weight));

  bool has_kernels(bool backward) const {
    return groups <= (1 << 16) &&
           norm_gates(static_cast<int32_t>(shape.back()), static_cast<int32_t>(groups),
                      to_dtype(call.input.scalar_type()), backward, current_device_properties());
  }
  template <typename Params>
  Params params(const Rows& gate) const {
    const ScalarType dtype = call.input.scalar_type();
    const NormColumns norm{weight, {}, call.weight_offset, shape.back(), dtype, dtype};
    const int64_t rows = c10::multiply_integers(shape.slice(0, shape.size() - 1));
    auto params = norm_params<Params>(norm, rows, /*rms=*/true, weight, norm.bias);
    params.gate.form = {static_cast<int32_t>(groups), call.norm_before_gate, call.silu};
    gate.set(&params.gate.data, &params.gate.layout);
    return params;
  }
};

// With an fp32 gate beside 16-bit input: all in fp32, whose kernels read both.
GatedCall in_one_dtype(GatedCall call) {
  if (is_16_bit(call.input.scalar_type())) call.input = call.input.to(call.gate.scalar_type());
  return call;
}

Forward forward_cuda(const GatedCall& call) {
  const c10::cuda::CUDAGuard guard(call.input.device());
  const Launch gated{call};
  if (!gated.has_kernels(/*backward=*/false)) return forward_by_chain(call);
  const Rows x = rows_of(call.input, gated.shape, DType::kFloat32);
  const Rows z = rows_of(call.gate, gated.shape, DType::kFloat32);
  const Tensor y = new_like(call.input);
  const Tensor rstd = new_tensor(y, lead_of(gated.sym_shape), at::kFloat);
  auto params = gated.params<NormForwardParams>(z);
  params.eps = call.eps;
  x.set(&params.x, &params.x_layout);
  params.y = y.mutable_data_ptr();
  params.rstd = rstd.mutable_data_ptr();
  launch(launch_norm_forward, params);
  return {y, rstd};
}

Gradients<3> backward_cuda(const GatedBackwardCall& pass) {
  const auto& [dy, rstd, call, wanted] = pass;
  const c10::cuda::CUDAGuard guard(dy.device());
  const Launch gated{call};
  if (!gated.has_kernels(/*backward=*/true)) return backward_by_chain(pass);
  const DType dtype = to_dtype(dy.scalar_type());
  const Rows d = rows_of(dy, gated.shape, dtype), x = rows_of(call.input, gated.shape, dtype);
  const Rows z = rows_of(call.gate, gated.shape, dtype);
  auto params = gated.params<NormBackwardParams>(z);
  d.set(&params.dy, &params.dy_layout);
  x.set(&params.saved, &params.saved_layout);
  params.rstd = rstd.const_data_ptr();
  Gradients<3> made;
  if (wanted[kInput] || wanted[kGate]) {
    made[kInput] = new_like(dy);
    made[kGate] = new_like(dy);
    params.dx = made[kInput].mutable_data_ptr();
    params.gate.gradient = made[kGate].mutable_data_ptr();
  }
  if (wanted[kWeight] && gated.weight.defined()) {
    made[kWeight] = new_like(gated.weight);
    params.dweight = made[kWeight].mutable_data_ptr();
  }
  const c10::DataPtr workspace = set_workspace(&params);
  launch(launch_norm_backward, params);
  for (const auto other : {kInput, kGate}) {  // made for the one that is wanted
    if (!wanted[other]) made[other].reset();
  }
  return made;
}

#endif  // FUSED_NORM_WITH_CUDA

// The checks that every call passes, also where the decomposition runs.
void check_rms_norm_gated(const GatedCall& call) {
  const Tensor &input = call.input, &gate = call.gate;
  check_layout(input, "input");
  check_layout(gate, "gate");
  const ScalarType dtype = input.scalar_type();
  check_norm_options(dtype, dtype_of(call.weight), std::nullopt, dtype, call.eps,
                     call.weight_offset);
  TORCH_CHECK(gate.scalar_type() == dtype || gate.scalar_type() == at::kFloat, "gate is ",
              gate.scalar_type(), ", which does not go with ", dtype,
              " input: it must have the input's dtype, or be float32");
  check_like(gate, "gate", input, "input");
  const c10::SymIntArrayRef shape = call.normalized_shape;
  check_normalized(input, "input", shape);
  const SymInt cols = c10::multiply_integers(shape);
  TORCH_SYM_CHECK(cols.sym_le(kMaxCols), "normalized_shape ", shape, " has ", cols,
                  " elements; at most 2^30 are supported");
  if (call.group_size.has_value()) {
    TORCH_SYM_CHECK(call.group_size->sym_ge(1), "group_size must be at least 1, but is ",
                    *call.group_size);
    TORCH_SYM_CHECK((cols % *call.group_size).sym_eq(0), "group_size is ", *call.group_size,
                    ", which does not divide the ", cols, " elements of normalized_shape ", shape);
  }
  check_param(call.weight, "weight", shape, input);
}

// (output, rstd): rstd has the leading dimensions of input and one for the groups, and is not
// differentiated. Of a meta tensor their shapes alone.
Forward rms_norm_gated_forward(const GatedCall& call) {
  // Outputs are new tensors to autograd, also where they are views of what ATen made.
  const at::AutoDispatchBelowADInplaceOrView guard_views;
  check_rms_norm_gated(call);
  const Tensor& input = call.input;
  if (input.is_meta() || input.sym_numel() == 0) {
    const auto shape = shape_of(call);
    const ScalarType dtype = at::toOpMathType(input.scalar_type());
    return {new_like(input), new_tensor(input, lead_of(shape), dtype).zero_()};
  }
#ifdef FUSED_NORM_WITH_CUDA
  if (input.is_cuda()) {
    const auto [y, rstd] = forward_cuda(in_one_dtype(call));
    return {y.to(input.scalar_type()), rstd};
  }
#endif
  check_built_for(input);
  return forward_by_chain(call);
}

Gradients<3> rms_norm_gated_backward(const GatedBackwardCall& call) {
  const at::AutoDispatchBelowADInplaceOrView guard_views;
  const auto& [dy, rstd, forward, wanted] = call;
  check_rms_norm_gated(forward);
  const Tensor& input = forward.input;
  check_given(dy, "dy", input.scalar_type(), input.sym_sizes(), input, Strides::kAny);
  check_given(rstd, "rstd", at::toOpMathType(input.scalar_type()), lead_of(shape_of(forward)),
              input);
  if (input.is_meta() || input.sym_numel() == 0) {
    return zeroed<3>({new_like_if(wanted[kInput], input), new_like_if(wanted[kGate], forward.gate),
                      new_like_if(wanted[kWeight], forward.weight)});
  }
#ifdef FUSED_NORM_WITH_CUDA
  if (input.is_cuda()) {
    const GatedCall all = in_one_dtype(forward);
    auto made = backward_cuda({dy.to(all.input.scalar_type()), rstd, all, wanted});
    if (made[kInput].defined()) made[kInput] = made[kInput].to(input.scalar_type());
    return made;
  }
#endif
  check_built_for(input);
  return backward_by_chain(call);
}

}  // namespace

// Profiles show this name.
struct RMSNormGatedFunction : CallFunction<RMSNormGatedFunction> {
  static constexpr const char* kBackward = "fused_norm::rms_norm_gated_backward";
  static constexpr std::array<int64_t, 3> kPlaces = {kInput, kGate, kWeight};
  static constexpr auto* kCheck = &check_rms_norm_gated;
  static constexpr bool kSavesFirst = false, kDifferentiatesSecond = false;

  static const auto& op() {
    return operator_of<kernel<rms_norm_gated_forward>>("rms_norm_gated_forward");
  }
  static c10::Stack before(const variable_list& grads, const Tensor&, const Tensor& rstd) {
    return {grads[0], rstd};
  }
};

namespace {

TORCH_LIBRARY_FRAGMENT(fused_norm, m) {
  const std::string call =
      "Tensor input, Tensor gate, Tensor? weight, SymInt[] normalized_shape, float eps, float "
      "weight_offset, bool norm_before_gate, bool silu, SymInt? group_size";
  define_differentiable(
      m, "rms_norm_gated_forward", "(" + call + ") -> (Tensor output, Tensor rstd)",
      kernel<rms_norm_gated_forward>, kernel<differentiate_call<RMSNormGatedFunction, GatedCall>>);
  define_backward(m, "rms_norm_gated_backward",
                  "(Tensor dy, Tensor rstd, " + call +
                      ", bool[3] output_mask) -> (Tensor dinput, Tensor dgate, Tensor "
                      "dweight)",
                  kernel<rms_norm_gated_backward>);
}

}  // namespace
}  // namespace fused_norm::ops
