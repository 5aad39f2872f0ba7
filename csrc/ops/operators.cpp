// The operators of the dispatcher, torch.ops.fused_norm.*: schemas and kernels.
#include "ops/operators.h"

#include "ops/attention.h"
#include "ops/norm.h"

namespace fused_norm::ops {
namespace {

TORCH_LIBRARY_FRAGMENT(fused_norm, m) {
  define_differentiable(
      m, "norm_forward",
      "(Tensor input, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, float eps, float "
      "weight_offset=0.0, bool rms=False, ScalarType? out_dtype=None, Tensor? residual=None, "
      "ScalarType? residual_dtype=None, SymInt? room=None) -> Tensor[]",
      kernel<norm_forward>, kernel<differentiate_norm>);
  define_backward(
      m, "norm_backward",
      "(Tensor dy, Tensor saved, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, SymInt[] "
      "normalized_shape, float weight_offset, bool rms, bool from_output, ScalarType input_dtype, "
      "bool[3] output_mask, Tensor? side=None, Tensor? columns=None, Tensor? dresidual=None) -> "
      "(Tensor dx, Tensor dweight, Tensor dbias)",
      kernel<norm_backward>);
  // The input's gradient from those of mean, rstd and side: a decomposition alone.
  m.def(
      "norm_statistics_backward(Tensor? dmean, Tensor? drstd, Tensor? dside, Tensor saved, Tensor? "
      "mean, Tensor rstd, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, float "
      "weight_offset, bool rms, bool from_output, ScalarType input_dtype, Tensor? side, Tensor? "
      "columns) -> Tensor");
  define(m, "unrecoverable_columns",
         "(Tensor? weight, Tensor? bias, float weight_offset, ScalarType out_dtype) -> Tensor",
         &unrecoverable_columns);

  const std::string attention =
      "Tensor query, Tensor? key, Tensor? value, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? "
      "sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng, SymInt max_seqlen_q, SymInt "
      "max_seqlen_k, float scale, float softcap, SymInt? window_left, SymInt? window_right, bool "
      "top_left, float dropout_p";
  define_differentiable(m, "attention_forward", "(" + attention + ") -> (Tensor out, Tensor lse)",
                        kernel<attention_forward>, kernel<differentiate_attention>);
  define_backward(m, "attention_backward",
                  "(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, " + attention +
                      ", bool[5] output_mask) -> (Tensor dquery, Tensor dkey, Tensor dvalue, "
                      "Tensor dmask, Tensor dsink)",
                  kernel<attention_backward>);
  // Beside the others, so that those are functions of their arguments alone: they may be made again
  // or merged where this one may not.
  define(m, "attention_rng", "(Tensor query) -> Tensor", &attention_rng,
         {at::Tag::nondeterministic_seeded});
  m.impl("attention_rng",
         torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough()));
}

}  // namespace
}  // namespace fused_norm::ops
