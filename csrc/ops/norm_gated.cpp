#include "ops/norm_gated.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <torch/library.h>

#include <utility>

#include "ops/checks.h"
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

ScalarType accumulate_dtype(ScalarType input) {
  return input == at::kDouble ? at::kDouble : at::kFloat;
}

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

bool has_weight(const GatedCall& call) { return call.weight.has_value() && call.weight->defined(); }

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
    if (has_weight(call)) {
      weight = (call.weight->to(dtype) + call.weight_offset).reshape_symint({of.groups, of.cols});
    }
    v = call.norm_before_gate ? x : x * act;
    rstd = at::rsqrt((v * v).mean(-1, /*keepdim=*/true) + call.eps);
    xhat = v * rstd;
  }
};

}  // namespace

void check_rms_norm_gated(const GatedCall& call) {
  const Tensor &input = call.input, &gate = call.gate;
  check_layout(input, "input");
  check_layout(gate, "gate");
  const ScalarType dtype = input.scalar_type();
  const bool weighted = has_weight(call);
  check_norm_options(dtype, weighted ? std::optional(call.weight->scalar_type()) : std::nullopt,
                     std::nullopt, dtype, call.eps, call.weight_offset);
  TORCH_CHECK(gate.scalar_type() == dtype || gate.scalar_type() == at::kFloat, "gate is ",
              gate.scalar_type(), ", which does not go with ", dtype,
              " input: it must have the input's dtype, or be float32");
  TORCH_CHECK(gate.sym_sizes() == input.sym_sizes(), "gate must have the shape of input ",
              input.sym_sizes(), ", but has shape ", gate.sym_sizes());
  TORCH_CHECK(gate.device() == input.device(), "gate is on ", gate.device(), ", but input is on ",
              input.device());
  const c10::SymIntArrayRef shape = call.normalized_shape;
  TORCH_CHECK(!shape.empty(), "normalized_shape must have at least one dimension, but is []");
  const int64_t lead = input.dim() - static_cast<int64_t>(shape.size());
  TORCH_CHECK(lead >= 0 && input.sym_sizes().slice(lead) == shape, "normalized_shape is ", shape,
              ", but input has shape ", input.sym_sizes(),
              ", whose last dimensions differ from it");
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
  if (!weighted) return;
  check_layout(*call.weight, "weight");
  TORCH_CHECK(call.weight->sym_sizes() == shape, "weight must have the shape of normalized_shape ",
              shape, ", but has shape ", call.weight->sym_sizes());
  TORCH_CHECK(call.weight->device() == input.device(), "weight is on ", call.weight->device(),
              ", but input is on ", input.device());
}

std::pair<Tensor, Tensor> decomposed::rms_norm_gated_forward(const GatedCall& call) {
  check_rms_norm_gated(call);
  const Wide wide(call);
  Tensor y = wide.xhat;
  if (wide.weight.defined()) y = y * wide.weight;
  if (call.norm_before_gate) y = y * wide.act;
  return {y.reshape_symint(call.input.sym_sizes()).to(call.input.scalar_type()),
          wide.rstd.squeeze(-1)};
}

GatedGradients decomposed::rms_norm_gated_backward(const Tensor& dy, const GatedCall& call,
                                                   const std::array<bool, 3>& wanted) {
  const Wide wide(call);
  const Tensor& weight = wide.weight;
  const auto sizes = call.input.sym_sizes();
  const Tensor d = dy.to(wide.x.scalar_type()).reshape_symint(Groups(call).shape());
  const Tensor of_norm = call.norm_before_gate ? d * wide.act : d;
  GatedGradients made;
  if (wanted[2] && weight.defined()) {
    // Rows by themselves: sum() takes an empty list of dimensions for all.
    Tensor sum = of_norm * wide.xhat;
    const int64_t lead = sum.dim() - 2;
    if (lead > 0) sum = sum.flatten(0, lead - 1).sum(0);
    made.weight = sum.reshape_symint(call.normalized_shape).to(call.weight->scalar_type());
  }
  if (!wanted[0] && !wanted[1]) return made;
  const Tensor w = weight.defined() ? of_norm * weight : of_norm;
  const Tensor dv = wide.rstd * (w - wide.xhat * (w * wide.xhat).mean(-1, /*keepdim=*/true));
  if (wanted[0]) {
    const Tensor dx = call.norm_before_gate ? dv : dv * wide.act;
    made.input = dx.reshape_symint(sizes).to(call.input.scalar_type());
  }
  if (wanted[1]) {
    const Tensor normalized = weight.defined() ? wide.xhat * weight : wide.xhat;
    const Tensor of_act = call.norm_before_gate ? d * normalized : dv * wide.x;
    const Tensor& s = wide.sigmoid;
    const Tensor slope = call.silu ? s * (wide.z * (1 - s) + 1) : s * (1 - s);
    made.gate = (of_act * slope).reshape_symint(sizes).to(call.gate.scalar_type());
  }
  return made;
}

namespace {

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

std::pair<Tensor, Tensor> forward_cuda(const GatedCall& call) {
  if (has_two_dtypes(call)) {
    const auto [y, rstd] = forward_cuda(in_fp32(call));
    return {y.to(call.input.scalar_type()), rstd};
  }
  const c10::cuda::CUDAGuard guard(call.input.device());
  const Launch launch(call);
  if (!launch.has_kernels(call, /*backward=*/false))
    return decomposed::rms_norm_gated_forward(call);
  const Rows x = rows_of(call.input, launch.shape, launch.groups > 1);
  const Rows z = rows_of(call.gate, launch.shape, launch.groups > 1);
  const Tensor weight = aligned_param(call.weight.value_or(Tensor()));
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

GatedGradients backward_cuda(const Tensor& dy, const Tensor& rstd, const GatedCall& call,
                             const std::array<bool, 3>& wanted) {
  if (has_two_dtypes(call)) {
    GatedGradients made = backward_cuda(dy.to(at::kFloat), rstd, in_fp32(call), wanted);
    if (made.input.defined()) made.input = made.input.to(call.input.scalar_type());
    return made;
  }
  const c10::cuda::CUDAGuard guard(dy.device());
  const Launch launch(call);
  if (!launch.has_kernels(call, /*backward=*/true))
    return decomposed::rms_norm_gated_backward(dy, call, wanted);
  const Rows d = rows_of(dy, launch.shape, true), x = rows_of(call.input, launch.shape, true);
  const Rows z = rows_of(call.gate, launch.shape, true);
  const Tensor weight = aligned_param(call.weight.value_or(Tensor()));
  GatedGradients made;
  auto params = launch.params<NormBackwardParams>(call, weight);
  params.dy = d.tensor.const_data_ptr();
  params.dy_layout = d.layout;
  params.saved = x.tensor.const_data_ptr();
  params.saved_layout = x.layout;
  params.rstd = rstd.const_data_ptr();
  params.gate.data = z.tensor.const_data_ptr();
  params.gate.layout = z.layout;
  if (wanted[0] || wanted[1]) {
    made.input = empty_tensor(dy.sizes(), dy.scalar_type());
    made.gate = empty_tensor(dy.sizes(), dy.scalar_type());
    params.dx = made.input.mutable_data_ptr();
    params.gate.gradient = made.gate.mutable_data_ptr();
  }
  if (wanted[2] && weight.defined()) {
    made.weight = empty_tensor(weight.sizes(), weight.scalar_type());
    params.dweight = made.weight.mutable_data_ptr();
  }
  const c10::DataPtr workspace = c10::cuda::CUDACachingAllocator::get()->allocate(
      norm_backward_workspace(params, launch.device));
  params.workspace = workspace.get();
  check_launch(launch_norm_backward(params, launch.device, at::cuda::getCurrentCUDAStream()));
  return made;
}

#endif  // FUSED_NORM_WITH_CUDA

Tensor empty_as(const Tensor& tensor) {
  return at::empty_symint(tensor.sym_sizes(), tensor.options());
}

}  // namespace

std::pair<Tensor, Tensor> rms_norm_gated_forward(const GatedCall& call) {
  const at::AutoDispatchBelowADInplaceOrView guard_views;
  check_rms_norm_gated(call);
  const Tensor& input = call.input;
  if (input.is_meta() || input.sym_numel() == 0) {
    const auto options = input.options().dtype(accumulate_dtype(input.scalar_type()));
    const Tensor rstd = at::empty_symint(Groups(call).lead, options);
    return {empty_as(input), input.is_meta() ? rstd : rstd.zero_()};
  }
#ifdef FUSED_NORM_WITH_CUDA
  if (input.is_cuda()) return forward_cuda(call);
#else
  if (!input.is_cpu()) raise_cpu_only(input);
#endif
  const auto [y, rstd] = decomposed::rms_norm_gated_forward(call);
  return {y.contiguous(), rstd.contiguous()};
}

GatedGradients rms_norm_gated_backward(const Tensor& dy, const Tensor& rstd, const GatedCall& call,
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
  GatedGradients made;
  if (input.is_meta() || input.sym_numel() == 0) {
    if (wanted[0]) made.input = empty_as(input);
    if (wanted[1]) made.gate = empty_as(call.gate);
    if (wanted[2] && has_weight(call)) {
      made.weight = empty_as(*call.weight);
      if (!input.is_meta()) made.weight.zero_();
    }
    return made;
  }
#ifdef FUSED_NORM_WITH_CUDA
  made = input.is_cuda() ? backward_cuda(dy, rstd, call, wanted)
                         : decomposed::rms_norm_gated_backward(dy, call, wanted);
#else
  if (!input.is_cpu()) raise_cpu_only(input);
  made = decomposed::rms_norm_gated_backward(dy, call, wanted);
#endif
  const auto given = [](bool is_wanted, const Tensor& gradient) {
    return is_wanted && gradient.defined() ? gradient.contiguous() : Tensor();
  };
  return {given(wanted[0], made.input), given(wanted[1], made.gate), given(wanted[2], made.weight)};
}

namespace {

TORCH_LIBRARY_FRAGMENT(fused_norm, m) {
  const std::string call =
      "Tensor input, Tensor gate, Tensor? weight, SymInt[] normalized_shape, float eps, float "
      "weight_offset, bool norm_before_gate, bool silu, SymInt? group_size";
  m.def(("rms_norm_gated_forward(" + call + ") -> (Tensor output, Tensor rstd)").c_str());
  m.def(("rms_norm_gated_backward(Tensor dy, Tensor rstd, " + call +
         ", bool[3] output_mask) -> (Tensor dinput, Tensor dgate, Tensor dweight)")
            .c_str());
}

void register_kernels(torch::Library& m) {
  m.impl("rms_norm_gated_forward", &gated_forward_kernel<rms_norm_gated_forward>);
  m.impl("rms_norm_gated_backward", &gated_backward_kernel<rms_norm_gated_backward>);
}
TORCH_LIBRARY_IMPL(fused_norm, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, Meta, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, SparseCPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, SparseCUDA, m) { register_kernels(m); }

}  // namespace
}  // namespace fused_norm::ops
