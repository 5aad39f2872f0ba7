#include "ops/norm_gated.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>

#include <utility>

#include "ops/norm.h"
#include "ops/rows.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "core/norm/norm.h"
#include "ops/device.h"
#endif

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymInt;
using SymShape = std::vector<SymInt>;

// A call's rows of `cols` elements, and the leading dimensions; the last is that of the groups.
struct Groups {
  SymShape lead;
  SymInt groups, cols;

  explicit Groups(const GatedCall& call) : groups(1), cols(1) {
    const auto sizes = call.input.sym_sizes();
    const size_t dims = sizes.size() - call.normalized_shape.size();
    lead.assign(sizes.begin(), sizes.begin() + dims);
    for (const SymInt& size : call.normalized_shape) cols *= size;
    if (call.group_size.has_value()) {
      groups = cols / *call.group_size;
      cols = *call.group_size;
    }
    lead.push_back(groups);
  }
  SymShape shape() const {
    SymShape shape = lead;
    shape.push_back(cols);
    return shape;
  }
};

// Chains of ATen's operators, for the CPU and what the kernels do not do.

// The tensors of a call in the precision of sums, as (..., groups, cols).
struct Wide {
  Tensor x, z, act, sigmoid, weight, v, rstd, xhat;

  explicit Wide(const GatedCall& call) {
    const Groups of(call);
    const ScalarType dtype = accumulate_dtype(call.input.scalar_type());
    x = call.input.to(dtype).reshape_symint(of.shape());
    z = call.gate.to(dtype).reshape_symint(of.shape());
    sigmoid = at::sigmoid(z);
    act = call.silu ? z * sigmoid : sigmoid;
    if (has(call.weight)) {
      weight = (call.weight->to(dtype) + call.weight_offset).reshape_symint({of.groups, of.cols});
    }
    v = call.norm_before_gate ? x : x * act;
    rstd = at::rsqrt((v * v).mean(-1, /*keepdim=*/true) + call.eps);
    xhat = v * rstd;
  }
};

Forward forward_by_chain(const GatedCall& call) {
  const Wide wide(call);
  Tensor y = wide.xhat;
  if (wide.weight.defined()) y = y * wide.weight;
  if (call.norm_before_gate) y = y * wide.act;
  return {y.reshape_symint(call.input.sym_sizes()).to(call.input.scalar_type()),
          wide.rstd.squeeze(-1)};
}

Gradients<3> backward_by_chain(const Tensor& dy, const GatedCall& call,
                               const std::array<bool, 3>& wanted) {
  const Wide wide(call);
  const Tensor& weight = wide.weight;
  const auto sizes = call.input.sym_sizes();
  const Tensor d = dy.to(wide.x.scalar_type()).reshape_symint(Groups(call).shape());
  const Tensor of_norm = call.norm_before_gate ? d * wide.act : d;
  Gradients<3> made;
  if (wanted[kWeight] && weight.defined()) {
    // Rows by themselves: sum() takes an empty list of dimensions for all.
    Tensor sum = of_norm * wide.xhat;
    const int64_t lead = sum.dim() - 2;
    if (lead > 0) sum = sum.flatten(0, lead - 1).sum(0);
    made[kWeight] = sum.reshape_symint(call.normalized_shape).to(call.weight->scalar_type());
  }
  if (!wanted[kInput] && !wanted[kGate]) return made;
  const Tensor w = weight.defined() ? of_norm * weight : of_norm;
  const Tensor dv = wide.rstd * (w - wide.xhat * (w * wide.xhat).mean(-1, /*keepdim=*/true));
  if (wanted[kInput]) {
    const Tensor dx = call.norm_before_gate ? dv : dv * wide.act;
    made[kInput] = dx.reshape_symint(sizes).to(call.input.scalar_type());
  }
  if (wanted[kGate]) {
    const Tensor normalized = weight.defined() ? wide.xhat * weight : wide.xhat;
    const Tensor of_act = call.norm_before_gate ? d * normalized : dv * wide.x;
    const Tensor& s = wide.sigmoid;
    const Tensor slope = call.silu ? s * (wide.z * (1 - s) + 1) : s * (1 - s);
    made[kGate] = (of_act * slope).reshape_symint(sizes).to(call.gate.scalar_type());
  }
  return made;
}

#ifdef FUSED_NORM_WITH_CUDA

// A tensor of a call as rows of (..., groups, cols). The kernels read packs where there are several
// groups, and in backward: a tensor that is not aligned as these is copied.
Rows rows_of(const Tensor& tensor, at::IntArrayRef shape, bool packs) {
  const Rows rows = as_rows(tensor.reshape(shape), 1);
  const int64_t pack = 16 / tensor.element_size();
  const bool aligned = reinterpret_cast<uintptr_t>(rows.tensor.const_data_ptr()) % 16 == 0 &&
                       rows.layout.stride % pack == 0 && rows.layout.outer_stride % pack == 0;
  if (!packs || aligned) return rows;
  return as_rows(rows.tensor.clone(at::MemoryFormat::Contiguous), 1);
}

// What forward and backward have in common.
struct Launch {
  Groups of;
  at::DimVector shape;
  int64_t rows, groups, cols;
  const DeviceProperties& device = current_device_properties();

  explicit Launch(const GatedCall& call)
      : of(call), groups(of.groups.expect_int()), cols(of.cols.expect_int()) {
    for (const SymInt& size : of.shape()) shape.push_back(size.expect_int());
    rows = c10::multiply_integers(shape.begin(), shape.end() - 1);
  }
  bool has_kernels(const GatedCall& call, bool backward) const {
    return groups <= (1 << 16) &&
           norm_gates(static_cast<int32_t>(cols), static_cast<int32_t>(groups),
                      to_dtype(call.input.scalar_type()), backward, device);
  }
  template <typename Params>
  Params params(const GatedCall& call, const Tensor& weight) const {
    Params params{};
    params.rows = rows;
    params.cols = static_cast<int32_t>(cols);
    params.x_dtype = params.y_dtype = to_dtype(call.input.scalar_type());
    params.rms = true;
    params.weight_offset = call.weight_offset;
    params.weight = to_param(weight);
    params.gate.form = {static_cast<int32_t>(groups), call.norm_before_gate, call.silu};
    return params;
  }
};

// An fp32 gate beside 16-bit input: in fp32, whose kernels read both.
GatedCall in_fp32(const GatedCall& call) {
  GatedCall wide = call;
  wide.input = call.input.to(at::kFloat);
  return wide;
}
bool has_two_dtypes(const GatedCall& call) {
  return call.gate.scalar_type() != call.input.scalar_type() && is_16_bit(call.input.scalar_type());
}

Forward forward_cuda(const GatedCall& call) {
  if (has_two_dtypes(call)) {
    const auto [y, rstd] = forward_cuda(in_fp32(call));
    return {y.to(call.input.scalar_type()), rstd};
  }
  const c10::cuda::CUDAGuard guard(call.input.device());
  const Launch launch(call);
  if (!launch.has_kernels(call, /*backward=*/false)) return forward_by_chain(call);
  const Rows x = rows_of(call.input, launch.shape, launch.groups > 1);
  const Rows z = rows_of(call.gate, launch.shape, launch.groups > 1);
  const Tensor weight = aligned_param(or_undefined(call.weight));
  const Tensor y = empty_tensor(call.input.sizes(), call.input.scalar_type());
  const Tensor rstd =
      empty_tensor(at::IntArrayRef(launch.shape).slice(0, launch.shape.size() - 1), at::kFloat);
  auto params = launch.params<NormForwardParams>(call, weight);
  params.eps = call.eps;
  params.x = x.tensor.const_data_ptr();
  params.x_layout = x.layout;
  params.gate.data = z.tensor.const_data_ptr();
  params.gate.layout = z.layout;
  params.y = y.mutable_data_ptr();
  params.rstd = rstd.mutable_data_ptr();
  check_launch(launch_norm_forward(params, launch.device, at::cuda::getCurrentCUDAStream()));
  return {y, rstd};
}

Gradients<3> backward_cuda(const Tensor& dy, const Tensor& rstd, const GatedCall& call,
                           const std::array<bool, 3>& wanted) {
  if (has_two_dtypes(call)) {
    Gradients<3> made = backward_cuda(dy.to(at::kFloat), rstd, in_fp32(call), wanted);
    if (made[kInput].defined()) made[kInput] = made[kInput].to(call.input.scalar_type());
    return made;
  }
  const c10::cuda::CUDAGuard guard(dy.device());
  const Launch launch(call);
  if (!launch.has_kernels(call, /*backward=*/true)) return backward_by_chain(dy, call, wanted);
  const Rows d = rows_of(dy, launch.shape, true), x = rows_of(call.input, launch.shape, true);
  const Rows z = rows_of(call.gate, launch.shape, true);
  const Tensor weight = aligned_param(or_undefined(call.weight));
  Gradients<3> made;
  auto params = launch.params<NormBackwardParams>(call, weight);
  params.dy = d.tensor.const_data_ptr();
  params.dy_layout = d.layout;
  params.saved = x.tensor.const_data_ptr();
  params.saved_layout = x.layout;
  params.rstd = rstd.const_data_ptr();
  params.gate.data = z.tensor.const_data_ptr();
  params.gate.layout = z.layout;
  if (wanted[kInput] || wanted[kGate]) {
    made[kInput] = empty_tensor(dy.sizes(), dy.scalar_type());
    made[kGate] = empty_tensor(dy.sizes(), dy.scalar_type());
    params.dx = made[kInput].mutable_data_ptr();
    params.gate.gradient = made[kGate].mutable_data_ptr();
  }
  if (wanted[kWeight] && weight.defined()) {
    made[kWeight] = empty_tensor(weight.sizes(), weight.scalar_type());
    params.dweight = made[kWeight].mutable_data_ptr();
  }
  const c10::DataPtr workspace = c10::cuda::CUDACachingAllocator::get()->allocate(
      norm_backward_workspace(params, launch.device));
  params.workspace = workspace.get();
  check_launch(launch_norm_backward(params, launch.device, at::cuda::getCurrentCUDAStream()));
  return made;
}

#endif  // FUSED_NORM_WITH_CUDA

}  // namespace

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
  SymInt cols = 1;
  for (const SymInt& size : shape) cols *= size;
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

Forward rms_norm_gated_forward(const GatedCall& call) {
  const at::AutoDispatchBelowADInplaceOrView guard_views;
  check_rms_norm_gated(call);
  const Tensor& input = call.input;
  if (input.is_meta() || input.sym_numel() == 0) {
    const auto options = input.options().dtype(accumulate_dtype(input.scalar_type()));
    const Tensor rstd = at::empty_symint(Groups(call).lead, options);
    return {new_like(input, input.scalar_type()), input.is_meta() ? rstd : rstd.zero_()};
  }
#ifdef FUSED_NORM_WITH_CUDA
  if (input.is_cuda()) return forward_cuda(call);
#else
  if (!input.is_cpu()) raise_cpu_only(input);
#endif
  const auto [y, rstd] = forward_by_chain(call);
  return {y.contiguous(), rstd.contiguous()};
}

Gradients<3> rms_norm_gated_backward(const Tensor& dy, const Tensor& rstd, const GatedCall& call,
                                     const std::array<bool, 3>& wanted) {
  const at::AutoDispatchBelowADInplaceOrView guard_views;
  check_rms_norm_gated(call);
  check_layout(dy, "dy");
  const Tensor& input = call.input;
  TORCH_CHECK(dy.sym_sizes() == input.sym_sizes() && dy.scalar_type() == input.scalar_type() &&
                  dy.device() == input.device(),
              "dy must have input's shape ", input.sym_sizes(), ", dtype ", input.scalar_type(),
              " and device ", input.device(), ", but has shape ", dy.sym_sizes(), ", dtype ",
              dy.scalar_type(), " and is on ", dy.device());
  const Groups of(call);
  TORCH_CHECK(rstd.sym_sizes() == c10::SymIntArrayRef(of.lead) && rstd.is_contiguous() &&
                  rstd.scalar_type() == accumulate_dtype(input.scalar_type()) &&
                  rstd.device() == input.device(),
              "rstd must be that of rms_norm_gated_forward, contiguous and of shape ",
              c10::SymIntArrayRef(of.lead), ", but has shape ", rstd.sym_sizes());
  Gradients<3> made;
  if (input.is_meta() || input.sym_numel() == 0) {
    const auto make = [](const Tensor& of) { return new_like(of, of.scalar_type()).zero_(); };
    if (wanted[kInput]) made[kInput] = make(input);
    if (wanted[kGate]) made[kGate] = make(call.gate);
    if (wanted[kWeight] && has(call.weight)) made[kWeight] = make(*call.weight);
    return made;
  }
#ifdef FUSED_NORM_WITH_CUDA
  made =
      input.is_cuda() ? backward_cuda(dy, rstd, call, wanted) : backward_by_chain(dy, call, wanted);
#else
  if (!input.is_cpu()) raise_cpu_only(input);
  made = backward_by_chain(dy, call, wanted);
#endif
  const auto given = [](bool is_wanted, const Tensor& gradient) {
    return is_wanted && gradient.defined() ? gradient.contiguous() : Tensor();
  };
  return {given(wanted[kInput], made[kInput]), given(wanted[kGate], made[kGate]),
          given(wanted[kWeight], made[kWeight])};
}

}  // namespace fused_norm::ops
