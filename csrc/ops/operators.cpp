// The operators of the dispatcher, torch.ops.fused_norm.*: schemas and kernels.
#include <torch/library.h>

#include "ops/attention.h"
#include "ops/autograd.h"
#include "ops/norm.h"
#include "ops/norm_gated.h"
#include "ops/softmax.h"

namespace fused_norm::ops {
namespace {

// The functions look at device and layout themselves, so that a CPU-only build can say what is
// missing and a sparse argument is named. Of meta tensors they give shapes and dtypes.
constexpr c10::DispatchKey kBackends[] = {c10::DispatchKey::CPU,
                                          c10::DispatchKey::CUDA,
                                          c10::DispatchKey::Meta,
                                          c10::DispatchKey::SparseCPU,
                                          c10::DispatchKey::SparseCUDA,
                                          c10::DispatchKey::SparseCsrCPU,
                                          c10::DispatchKey::SparseCsrCUDA,
                                          c10::DispatchKey::MkldnnCPU,
                                          c10::DispatchKey::QuantizedCPU,
                                          c10::DispatchKey::QuantizedCUDA,
                                          c10::DispatchKey::NestedTensorCPU,
                                          c10::DispatchKey::NestedTensorCUDA};

template <typename Kernel>
void define(torch::Library& m, const std::string& name, const std::string& signature,
            Kernel* function, const std::vector<at::Tag>& tags = {}) {
  m.def((name + signature).c_str(), tags);
  for (const c10::DispatchKey key : kBackends) m.impl(name.c_str(), torch::dispatch(key, function));
}

// An operator that is differentiated by `autograd`, with its decomposition, to which
// fused_norm/_decompositions.py gives a kernel.
template <typename Kernel, typename Autograd>
void define_differentiable(torch::Library& m, const std::string& name, const std::string& signature,
                           Kernel* function, Autograd&& autograd) {
  define(m, name, signature, function);
  m.def(("decomposed_" + name + signature).c_str());
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, std::move(autograd)));
}

torch::CppFunction of_backward() {
  return torch::CppFunction::makeFromBoxedFunction<&differentiate_backward>();
}

TORCH_LIBRARY(fused_norm, m) {
  define_differentiable(
      m, "norm_forward",
      "(Tensor input, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, float eps, float "
      "weight_offset=0.0, bool rms=False, ScalarType? out_dtype=None, Tensor? residual=None, "
      "ScalarType? residual_dtype=None, SymInt? room=None) -> Tensor[]",
      kernel<norm_forward>, kernel<differentiate_norm>);
  define_differentiable(
      m, "norm_backward",
      "(Tensor dy, Tensor saved, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, SymInt[] "
      "normalized_shape, float weight_offset, bool rms, bool from_output, ScalarType input_dtype, "
      "bool[3] output_mask, Tensor? side=None, Tensor? columns=None, Tensor? dresidual=None) -> "
      "(Tensor dx, Tensor dweight, Tensor dbias)",
      kernel<norm_backward>, of_backward());
  // The input's gradient from those of mean, rstd and side: a decomposition alone.
  m.def(
      "norm_statistics_backward(Tensor? dmean, Tensor? drstd, Tensor? dside, Tensor saved, Tensor? "
      "mean, Tensor rstd, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, float "
      "weight_offset, bool rms, bool from_output, ScalarType input_dtype, Tensor? side, Tensor? "
      "columns) -> Tensor");
  define(m, "unrecoverable_columns",
         "(Tensor? weight, Tensor? bias, float weight_offset, ScalarType out_dtype) -> Tensor",
         &unrecoverable_columns);

  const std::string gated =
      "Tensor input, Tensor gate, Tensor? weight, SymInt[] normalized_shape, float eps, float "
      "weight_offset, bool norm_before_gate, bool silu, SymInt? group_size";
  define_differentiable(m, "rms_norm_gated_forward",
                        "(" + gated + ") -> (Tensor output, Tensor rstd)",
                        kernel<rms_norm_gated_forward>, kernel<differentiate_rms_norm_gated>);
  define_differentiable(m, "rms_norm_gated_backward",
                        "(Tensor dy, Tensor rstd, " + gated +
                            ", bool[3] output_mask) -> (Tensor dinput, Tensor dgate, Tensor "
                            "dweight)",
                        kernel<rms_norm_gated_backward>, of_backward());

  define_differentiable(
      m, "softmax_forward",
      "(Tensor input, int dim, bool log=False, ScalarType? out_dtype=None) -> Tensor",
      &softmax_forward, &differentiate_softmax);
  define_differentiable(m, "scaled_masked_softmax",
                        "(Tensor input, Tensor? mask, float scale=1.0, bool causal=False, "
                        "ScalarType? out_dtype=None) -> Tensor",
                        &scaled_masked_softmax, &differentiate_masked_softmax);
  define_differentiable(m, "softmax_backward",
                        "(Tensor dy, Tensor output, int dim, bool log, ScalarType input_dtype, "
                        "float scale=1.0) -> Tensor",
                        &softmax_backward, of_backward());

  const std::string attention =
      "Tensor query, Tensor? key, Tensor? value, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? "
      "sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng, SymInt max_seqlen_q, SymInt "
      "max_seqlen_k, float scale, float softcap, SymInt? window_left, SymInt? window_right, bool "
      "top_left, float dropout_p";
  define_differentiable(m, "attention_forward", "(" + attention + ") -> (Tensor out, Tensor lse)",
                        kernel<attention_forward>, kernel<differentiate_attention>);
  define_differentiable(m, "attention_backward",
                        "(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, " + attention +
                            ", bool[5] output_mask) -> (Tensor dquery, Tensor dkey, Tensor dvalue, "
                            "Tensor dmask, Tensor dsink)",
                        kernel<attention_backward>, of_backward());
  // Beside the others, so that those are functions of their arguments alone: they may be made again
  // or merged where this one may not.
  define(m, "attention_rng", "(Tensor query) -> Tensor", &attention_rng,
         {at::Tag::nondeterministic_seeded});
  m.impl("attention_rng",
         torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough()));
}

}  // namespace
}  // namespace fused_norm::ops
