// The schemas of the attention operators, and their kernels on CPU, CUDA and meta tensors. In
// torch.ops alone: what differentiates them is attention_autograd.cpp.
#include <torch/library.h>

#include "ops/attention.h"

namespace fused_norm::ops {
namespace {

TORCH_LIBRARY_FRAGMENT(fused_norm, m) {
  const std::string call =
      "Tensor query, Tensor? key, Tensor? value, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? "
      "sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng, SymInt max_seqlen_q, SymInt "
      "max_seqlen_k, float scale, float softcap, SymInt? window_left, SymInt? window_right, bool "
      "top_left, float dropout_p";
  m.def(("attention_forward(" + call + ") -> (Tensor out, Tensor lse)").c_str());
  m.def(("attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, " + call +
         ", bool[5] output_mask) -> (Tensor dquery, Tensor dkey, "
         "Tensor dvalue, Tensor dmask, Tensor dsink)")
            .c_str());
  // Beside the others, so that those are functions of their arguments alone: they may be made again
  // or merged where this one may not.
  m.def("attention_rng(Tensor query) -> Tensor", {at::Tag::nondeterministic_seeded});
}

// attention.cpp looks at devices and layouts itself, so that it can say what is wrong.
void register_kernels(torch::Library& m) {
  m.impl("attention_forward", &forward_kernel<attention_forward>);
  m.impl("attention_backward", &backward_kernel<attention_backward>);
  m.impl("attention_rng", &attention_rng);
}
TORCH_LIBRARY_IMPL(fused_norm, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, Meta, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, SparseCPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, SparseCUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, NestedTensorCPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(fused_norm, NestedTensorCUDA, m) { register_kernels(m); }

}  // namespace
}  // namespace fused_norm::ops
