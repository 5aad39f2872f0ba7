// The pybind11 module fused_norm._C: what fused_norm's Python calls beside the operators.
#include <ATen/TracerMode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#ifdef FUSED_NORM_WITH_CUDA
#include <cuda.h>
#endif

#include "ops/attention.h"
#include "ops/column_watch.h"
#include "ops/norm.h"
#include "ops/softmax.h"

namespace fused_norm::ops {
namespace {

// What functional norms call: (output, residual_out). None: the caller is to say what is wrong, or
// to see to it that torch.jit.trace records an operator.
std::optional<std::tuple<at::Tensor, OptionalTensor>> norm_outputs(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    const std::vector<c10::SymInt>& normalized_shape, double eps, double weight_offset, bool rms,
    std::optional<at::ScalarType> out_dtype, const OptionalTensor& residual,
    std::optional<at::ScalarType> residual_dtype, bool memory_efficient) {
  if (at::tracer::impl::is_dispatch_enabled()) return std::nullopt;
  auto results = norm({input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype,
                       residual, residual_dtype, std::nullopt},
                      memory_efficient);
  if (residual.has_value()) return std::tuple{std::move(results[0]), std::move(results[1])};
  // As torch's, whose RMSNorm alone keeps channels_last. Within vmap no tensor says if it has it.
  if (rms && !results[0].key_set().has(c10::DispatchKey::FuncTorchBatched)) {
    results[0] = results[0].contiguous(input.suggest_memory_format());
  }
  return std::tuple{std::move(results[0]), std::nullopt};
}

// The loader reads this from the file, before it loads it into a torch that may be another one
// (fused_norm/_load.py): it has to be there in one piece.
[[gnu::used]] const char kBuiltWith[] = "fused_norm was built with torch " FUSED_NORM_TORCH_VERSION;

py::dict build_info() {
  py::dict info;
  info["version"] = FUSED_NORM_VERSION;
  info["torch"] = FUSED_NORM_TORCH_VERSION;
#ifdef FUSED_NORM_WITH_CUDA
  info["cuda"] = c10::str(CUDA_VERSION / 1000, ".", CUDA_VERSION % 1000 / 10);
#else
  info["cuda"] = py::none();
#endif
  info["arch_list"] = py::str(FUSED_NORM_ARCH_LIST).attr("replace")(";", " ").attr("split")();
  info["cxx"] = __VERSION__;
  return info;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "What fused_norm's Python calls beside its operators.";
  m.def("norm", &norm_outputs, py::call_guard<py::gil_scoped_release>());
  // pybind11's error for arguments of other types would print them: kernels, and a wait.
  m.def("norm", [](const py::args&) { return py::none(); });
  m.def("traced_room", &traced_room, py::call_guard<py::gil_scoped_release>());
  m.def("before_optimizer_step", &before_optimizer_step, py::call_guard<py::gil_scoped_release>());
  m.def("after_optimizer_step", &after_optimizer_step, py::call_guard<py::gil_scoped_release>());
  m.def("set_overflow_message", &set_overflow_message);
  m.def("unrecoverable_columns", &unrecoverable_columns, py::call_guard<py::gil_scoped_release>());
  m.def("softmax", kernel<softmax>, py::call_guard<py::gil_scoped_release>());
  m.def("attention", kernel<attention>, py::call_guard<py::gil_scoped_release>());
  m.def("attention", [](const py::args&) { return py::none(); });
  m.def("check_attention", kernel<check_before_drawing>);
  m.def("check_attention", [](const py::args&) {});
  m.def("force_attention_tier", &force_attention_tier);
  m.def("force_softmax_tier", &force_softmax_tier);
  m.def("build_info", &build_info);
}

}  // namespace fused_norm::ops
