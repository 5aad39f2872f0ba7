// The two ways into the library: operators of the dispatcher (torch.ops.fused_norm.*) and the
// pybind11 module fused_norm._C, over the same functions. What differentiates the norms' operators
// is registered in Python (fused_norm/_autograd.py).
#include <ATen/TracerMode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#ifdef FUSED_NORM_WITH_CUDA
#include <cuda.h>
#endif

#include <sstream>

#include "ops/attention.h"
#include "ops/column_watch.h"
#include "ops/norm.h"
#include "ops/norm_autograd.h"
#include "ops/softmax.h"

namespace fused_norm::ops {
namespace {

TORCH_LIBRARY(fused_norm, m) {
  m.def(
      "norm_forward(Tensor input, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, float "
      "eps, float weight_offset=0.0, bool rms=False, ScalarType? out_dtype=None, Tensor? "
      "residual=None, ScalarType? residual_dtype=None, SymInt? room=None) -> Tensor[]");
  m.def(
      "norm_backward(Tensor dy, Tensor saved, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? "
      "bias, "
      "SymInt[] normalized_shape, float weight_offset, bool rms, bool from_output, ScalarType "
      "input_dtype, "
      "bool[3] output_mask, Tensor? side=None, Tensor? columns=None, Tensor? dresidual=None) -> "
      "(Tensor dx, Tensor dweight, Tensor dbias)");
  m.def(
      "norm_statistics_backward(Tensor? dmean, Tensor? drstd, Tensor? dside, Tensor saved, Tensor? "
      "mean, Tensor rstd, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, float "
      "weight_offset, bool rms, bool from_output, ScalarType input_dtype, Tensor? side, Tensor? "
      "columns) -> Tensor");
  m.def(
      "unrecoverable_columns(Tensor? weight, Tensor? bias, float weight_offset, ScalarType "
      "out_dtype) -> Tensor");
  m.def(
      "softmax_forward(Tensor input, int dim, bool log=False, ScalarType? out_dtype=None) -> "
      "Tensor");
  m.def(
      "scaled_masked_softmax(Tensor input, Tensor? mask, float scale=1.0, bool causal=False, "
      "ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "softmax_backward(Tensor dy, Tensor output, int dim, bool log, ScalarType input_dtype, "
      "float scale=1.0) -> Tensor");
}

at::Tensor softmax_forward_auto(const at::Tensor& input, int64_t dim, bool log,
                                std::optional<at::ScalarType> out_dtype) {
  return softmax_forward(input, dim, log, out_dtype);
}

at::Tensor scaled_masked_softmax_auto(const at::Tensor& input, const OptionalTensor& mask,
                                      double scale, bool causal,
                                      std::optional<at::ScalarType> out_dtype) {
  return scaled_masked_softmax(input, mask, scale, causal, out_dtype);
}

at::Tensor softmax_backward_auto(const at::Tensor& dy, const at::Tensor& output, int64_t dim,
                                 bool log, at::ScalarType input_dtype, double scale) {
  return softmax_backward(dy, output, dim, log, input_dtype, scale);
}

// The functions look at device and layout themselves, so that a CPU-only build can say what is
// missing and a sparse argument is named.
void register_kernels(torch::Library& m) {
  m.impl("norm_forward", &norm_forward);
  m.impl("norm_backward", &norm_backward);
  m.impl("unrecoverable_columns", &unrecoverable_columns);
  m.impl("softmax_forward", &softmax_forward_auto);
  m.impl("scaled_masked_softmax", &scaled_masked_softmax_auto);
  m.impl("softmax_backward", &softmax_backward_auto);
}
TORCH_LIBRARY_IMPL(fused_norm, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, Meta, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, SparseCPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, SparseCUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, SparseCsrCPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, SparseCsrCUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, MkldnnCPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, QuantizedCPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, QuantizedCUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, NestedTensorCPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, NestedTensorCUDA, m) { register_kernels(m); }

// _C bypasses the dispatcher and with it autograd, so a call that should be differentiated must not
// pass.
void check_no_grad(const char* function, std::initializer_list<OptionalTensor> tensors) {
  if (!at::GradMode::is_enabled()) return;
  for (const OptionalTensor& tensor : tensors) {
    TORCH_CHECK(!tensor.has_value() || !tensor->defined() || !tensor->requires_grad(),
                "fused_norm._C.", function,
                " does not differentiate: call it under torch.no_grad(), or use "
                "fused_norm.functional");
  }
}

std::vector<at::Tensor> norm_forward_no_grad(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    std::vector<int64_t> normalized_shape, double eps, double weight_offset, bool rms,
    std::optional<at::ScalarType> out_dtype, const OptionalTensor& residual,
    std::optional<at::ScalarType> residual_dtype, std::optional<int64_t> room) {
  check_no_grad("norm_forward", {input, weight, bias, residual});
  at::AutoDispatchBelowADInplaceOrView guard;
  return norm_forward(input, weight, bias, c10::fromIntArrayRefSlow(normalized_shape), eps,
                      weight_offset, rms, out_dtype, residual, residual_dtype, room);
}

TensorTriple norm_backward_no_grad(const at::Tensor& dy, const at::Tensor& saved,
                                   const OptionalTensor& mean, const at::Tensor& rstd,
                                   const OptionalTensor& weight, const OptionalTensor& bias,
                                   std::vector<int64_t> normalized_shape, double weight_offset,
                                   bool rms, bool from_output, at::ScalarType input_dtype,
                                   std::array<bool, 3> output_mask, const OptionalTensor& side,
                                   const OptionalTensor& columns, const OptionalTensor& dresidual) {
  check_no_grad("norm_backward", {dy, saved, weight, bias, dresidual});
  at::AutoDispatchBelowADInplaceOrView guard;
  return norm_backward(dy, saved, mean, rstd, weight, bias,
                       c10::fromIntArrayRefSlow(normalized_shape), weight_offset, rms, from_output,
                       input_dtype, output_mask, side, columns, dresidual);
}

// What functional softmaxes call.
at::Tensor softmax_output(const at::Tensor& input, int64_t dim, bool log,
                          std::optional<at::ScalarType> out_dtype) {
  if (at::tracer::impl::is_dispatch_enabled()) return {};  // None, as below
  return softmax(input, dim, log, out_dtype);
}

// What functional norms call: (output, residual_out). None: the caller is to say what is wrong, or
// to see to it that torch.jit.trace records an operator.
using Shape = std::vector<c10::SymInt>;

std::optional<std::tuple<at::Tensor, OptionalTensor>> norm_outputs(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    Shape normalized_shape, double eps, double weight_offset, bool rms,
    std::optional<at::ScalarType> out_dtype, const OptionalTensor& residual,
    std::optional<at::ScalarType> residual_dtype, bool memory_efficient) {
  if (at::tracer::impl::is_dispatch_enabled()) return std::nullopt;
  const NormOptions options{
      std::move(normalized_shape), eps, weight_offset, rms, out_dtype, residual_dtype};
  auto results = norm(input, residual, weight, bias, options, memory_efficient);
  if (residual.has_value()) return std::tuple{std::move(results[0]), std::move(results[1])};
  // As torch's, whose RMSNorm alone keeps channels_last.
  if (rms) results[0] = results[0].contiguous(input.suggest_memory_format());
  return std::tuple{std::move(results[0]), std::nullopt};
}

// What the operator's Autograd kernel calls.
std::vector<at::Tensor> record_norm_of(const at::Tensor& input, const OptionalTensor& weight,
                                       const OptionalTensor& bias, Shape normalized_shape,
                                       double eps, double weight_offset, bool rms,
                                       std::optional<at::ScalarType> out_dtype,
                                       const OptionalTensor& residual,
                                       std::optional<at::ScalarType> residual_dtype,
                                       std::optional<c10::SymInt> room) {
  const NormOptions options{
      std::move(normalized_shape), eps, weight_offset, rms, out_dtype, residual_dtype};
  return record_norm(input, residual, weight, bias, options, room.value_or(kSaveInput));
}

int64_t traced_room_of(const OptionalTensor& weight, const OptionalTensor& bias,
                       double weight_offset, at::ScalarType x_dtype, at::ScalarType y_dtype,
                       int generation, bool looks) {
  const at::Tensor g = weight.value_or(at::Tensor()), b = bias.value_or(at::Tensor());
  const int64_t cols = g.defined() ? g.numel() : b.defined() ? b.numel() : 0;
  return traced_room({g, b, weight_offset, cols, x_dtype, y_dtype}, generation, looks);
}

// `message` takes a list of (address of the parameter's TensorImpl, description, columns).
void set_overflow_message_of(const py::function& message) {
  auto* const kept = new py::function(message);
  set_overflow_message([kept](const std::vector<Overflow>& overflows) {
    const py::gil_scoped_acquire gil;
    py::list list;
    for (const Overflow& overflow : overflows) {
      list.append(py::make_tuple(reinterpret_cast<uintptr_t>(overflow.weight), overflow.description,
                                 overflow.columns));
    }
    return py::cast<std::string>((*kept)(list));
  });
}

// The loader reads this from the file, before it loads it into a torch that may be another one
// (fused_norm/_load.py).
constexpr char kBuiltWith[] = "fused_norm was built with torch " FUSED_NORM_TORCH_VERSION;

SoftmaxTier tier_of(const std::string& name) {
  if (name == "auto") return SoftmaxTier::kAuto;
  if (name == "warp") return SoftmaxTier::kWarp;
  if (name == "block") return SoftmaxTier::kBlock;
  if (name == "uncached") return SoftmaxTier::kUncached;
  TORCH_CHECK_VALUE(false, "tier must be 'auto', 'warp', 'block' or 'uncached', but is '", name,
                    "'");
}

at::Tensor softmax_forward_no_grad(const at::Tensor& input, int64_t dim, bool log,
                                   std::optional<at::ScalarType> out_dtype,
                                   const std::string& tier) {
  check_no_grad("softmax_forward", {input});
  at::AutoDispatchBelowADInplaceOrView guard;
  return softmax_forward(input, dim, log, out_dtype, tier_of(tier));
}

at::Tensor scaled_masked_softmax_no_grad(const at::Tensor& input, const OptionalTensor& mask,
                                         double scale, bool causal,
                                         std::optional<at::ScalarType> out_dtype,
                                         const std::string& tier) {
  check_no_grad("scaled_masked_softmax", {input, mask});
  at::AutoDispatchBelowADInplaceOrView guard;
  return scaled_masked_softmax(input, mask, scale, causal, out_dtype, tier_of(tier));
}

at::Tensor softmax_backward_no_grad(const at::Tensor& dy, const at::Tensor& output, int64_t dim,
                                    bool log, at::ScalarType input_dtype, double scale,
                                    const std::string& tier) {
  check_no_grad("softmax_backward", {dy, output});
  at::AutoDispatchBelowADInplaceOrView guard;
  return softmax_backward(dy, output, dim, log, input_dtype, scale, tier_of(tier));
}

py::dict build_info() {
  py::dict info;
  info["version"] = FUSED_NORM_VERSION;
  info["torch"] =
      std::string(kBuiltWith).substr(sizeof(kBuiltWith) - sizeof(FUSED_NORM_TORCH_VERSION));
#ifdef FUSED_NORM_WITH_CUDA
  info["cuda"] =
      std::to_string(CUDA_VERSION / 1000) + "." + std::to_string(CUDA_VERSION % 1000 / 10);
#else
  info["cuda"] = py::none();
#endif
  py::list arch_list;
  std::stringstream archs(FUSED_NORM_ARCH_LIST);
  for (std::string arch; std::getline(archs, arch, ';');) arch_list.append(arch);
  info["arch_list"] = arch_list;
  info["cxx"] = __VERSION__;
  return info;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "fused_norm's operators without the dispatcher.";
  m.def("norm_forward", &norm_forward_no_grad, py::arg("input"), py::arg("weight"), py::arg("bias"),
        py::arg("normalized_shape"), py::arg("eps"), py::arg("weight_offset") = 0.0,
        py::arg("rms") = false, py::arg("out_dtype") = py::none(), py::arg("residual") = py::none(),
        py::arg("residual_dtype") = py::none(), py::arg("room") = py::none(),
        py::call_guard<py::gil_scoped_release>());
  m.def("norm_backward", &norm_backward_no_grad, py::arg("dy"), py::arg("saved"), py::arg("mean"),
        py::arg("rstd"), py::arg("weight"), py::arg("bias"), py::arg("normalized_shape"),
        py::arg("weight_offset"), py::arg("rms"), py::arg("from_output"), py::arg("input_dtype"),
        py::arg("output_mask"), py::arg("side") = py::none(), py::arg("columns") = py::none(),
        py::arg("dresidual") = py::none(), py::call_guard<py::gil_scoped_release>());
  m.def("norm", &norm_outputs, py::call_guard<py::gil_scoped_release>());
  // pybind11's error for arguments of other types would print them: kernels, and a wait.
  m.def("norm", [](const py::args&) { return py::none(); });
  m.def("record_norm", &record_norm_of, py::call_guard<py::gil_scoped_release>());
  m.def("traced_room", &traced_room_of, py::call_guard<py::gil_scoped_release>());
  m.def("before_optimizer_step", &before_optimizer_step, py::call_guard<py::gil_scoped_release>());
  m.def("after_optimizer_step", &after_optimizer_step, py::call_guard<py::gil_scoped_release>());
  m.def("set_overflow_message", &set_overflow_message_of);
  m.def("unrecoverable_columns", &unrecoverable_columns, py::arg("weight"), py::arg("bias"),
        py::arg("weight_offset"), py::arg("out_dtype"), py::call_guard<py::gil_scoped_release>());
  m.def("check_norm_options", &check_norm_options, py::arg("input"), py::arg("weight"),
        py::arg("bias"), py::arg("out"), py::arg("eps"), py::arg("weight_offset"));
  m.def("check_add_norm_options", &check_add_norm_options, py::arg("input"), py::arg("residual"),
        py::arg("residual_out"), py::arg("weight"), py::arg("bias"), py::arg("out"), py::arg("eps"),
        py::arg("weight_offset"));
  m.def("softmax", &softmax_output, py::call_guard<py::gil_scoped_release>());
  m.def("softmax_forward", &softmax_forward_no_grad, py::arg("input"), py::arg("dim"),
        py::arg("log") = false, py::arg("out_dtype") = py::none(), py::arg("tier") = "auto",
        py::call_guard<py::gil_scoped_release>());
  m.def("scaled_masked_softmax", &scaled_masked_softmax_no_grad, py::arg("input"), py::arg("mask"),
        py::arg("scale") = 1.0, py::arg("causal") = false, py::arg("out_dtype") = py::none(),
        py::arg("tier") = "auto", py::call_guard<py::gil_scoped_release>());
  m.def("softmax_backward", &softmax_backward_no_grad, py::arg("dy"), py::arg("output"),
        py::arg("dim"), py::arg("log"), py::arg("input_dtype"), py::arg("scale") = 1.0,
        py::arg("tier") = "auto", py::call_guard<py::gil_scoped_release>());
  m.def("check_softmax_options", &check_softmax_options, py::arg("input"), py::arg("out"),
        py::arg("ndim"), py::arg("dim"));
  m.def("check_masked_softmax_options", &check_masked_softmax_options, py::arg("input"),
        py::arg("mask"), py::arg("out"), py::arg("ndim"), py::arg("scale"), py::arg("causal"));
  m.def("attention", &forward_kernel<attention>, py::call_guard<py::gil_scoped_release>());
  m.def("attention", [](const py::args&) { return py::none(); });
  m.def("force_attention_tier", &force_attention_tier);
  m.def("build_info", &build_info);
}

}  // namespace fused_norm::ops
