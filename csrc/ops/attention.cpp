#include "ops/attention.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "ops/attention_backends.h"
#include "ops/checks.h"

namespace fused_norm::ops {

using at::Tensor;
using c10::SymInt;

Tensor with_dense_rows(const Tensor& tensor) {
  const bool dense = tensor.sym_size(-1) == 1 || tensor.sym_stride(-1) == 1;
  return dense ? tensor : tensor.contiguous();
}

Tensor of_four_dims(Tensor mask) {
  while (mask.dim() < 4) mask = mask.unsqueeze(0);
  return mask;
}

namespace {

Tensor new_gradient(const Tensor& of) { return at::empty_like(with_dense_rows(of)); }

// In query's own order of strides.
Tensor new_out(const Tensor& query, const SymInt& value_dim) {
  const Tensor like = with_dense_rows(query);
  if (like.sym_size(-1) == value_dim) return at::empty_like(like);
  c10::SymDimVector sizes(like.sym_sizes());
  sizes.back() = value_dim;
  return at::empty_like(like.narrow(-1, 0, 1).expand_symint(sizes));
}

Tensor new_lse(const AttentionCall& call, const Tensor& query) {
  const auto options = query.options().dtype(accumulate_dtype(query.scalar_type()));
  if (call.is_packed()) {
    return at::empty_symint({query.sym_size(1), query.sym_size(0)}, options);
  }
  return at::empty_symint({query.sym_size(0), query.sym_size(1), query.sym_size(2)}, options);
}

NewGradients new_gradients(const AttentionCall& call, const AttentionWanted& wanted) {
  NewGradients made;
  if (!has(call.key)) {
    if (!wanted[kQuery]) return made;
    const Tensor& all = made.returned[kQuery] = new_gradient(call.query);
    made.query = all.select(0, 0);
    made.key = all.select(0, 1);
    made.value = all.select(0, 2);
    return made;
  }
  if (wanted[kQuery]) made.query = made.returned[kQuery] = new_gradient(call.query);
  if (!has(call.value)) {
    if (!wanted[kKey]) return made;
    const Tensor& both = made.returned[kKey] = new_gradient(*call.key);
    made.key = both.select(0, 0);
    made.value = both.select(0, 1);
    return made;
  }
  if (wanted[kKey]) made.key = made.returned[kKey] = new_gradient(*call.key);
  if (wanted[kValue]) made.value = made.returned[kValue] = new_gradient(*call.value);
  return made;
}

// Of meta tensors, and what the kernels would write of no queries, or of packed tensors without a
// sequence.
AttentionGradients zeroed(NewGradients made, const AttentionCall& call,
                          const AttentionWanted& wanted) {
  const auto zeros = [](const OptionalTensor& like) {
    return has(like) ? at::zeros_symint(like->sym_sizes(), like->options()) : Tensor();
  };
  for (Tensor& gradient : made.returned) {
    if (gradient.defined()) gradient.zero_();
  }
  if (wanted[kMask]) made.returned[kMask] = zeros(call.attn_mask);
  if (wanted[kSink]) made.returned[kSink] = zeros(call.sink);
  return made.returned;
}

bool is_empty(const AttentionCall& call, const Tensor& out) {
  return out.numel() == 0 || (call.is_packed() && call.cu_seqlens_q->size(0) == 1);
}

}  // namespace

Forward attention_forward(const AttentionCall& call) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_attention(call);
  const auto qkv = call.apart();
  const Tensor out = new_out(qkv[0], qkv[2].sym_size(-1)), lse = new_lse(call, qkv[0]);
  if (out.is_meta()) return {out, lse};
  if (is_empty(call, out)) {
    out.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    return {out, lse};
  }
  if (out.is_cpu()) {
    on_cpu::attention_forward(call, qkv, out, lse);
    return {out, lse};
  }
#ifdef FUSED_NORM_WITH_CUDA
  on_cuda::attention_forward(call, qkv, out, lse);
  return {out, lse};
#else
  raise_cpu_only(out);
#endif
}

AttentionGradients attention_backward(const Tensor& dout, const OptionalTensor& dlse,
                                      const Tensor& out, const Tensor& lse,
                                      const AttentionCall& call, const AttentionWanted& wanted) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_attention_backward(dout, dlse, out, lse, call);
  const auto qkv = call.apart();
  NewGradients made = new_gradients(call, wanted);
  if (out.is_meta() || is_empty(call, out)) return zeroed(std::move(made), call, wanted);
  if (out.is_cpu()) {
    on_cpu::attention_backward({dout, dlse, out, lse, wanted}, call, qkv, &made);
    return made.returned;
  }
#ifdef FUSED_NORM_WITH_CUDA
  on_cuda::attention_backward({dout, dlse, out, lse, wanted}, call, qkv, &made);
  return made.returned;
#else
  raise_cpu_only(out);
#endif
}

Tensor attention_rng(const Tensor& query) {
  const Tensor rng = at::empty({2}, query.options().dtype(at::kLong));
  return rng.is_meta() ? rng : rng.random_();
}

}  // namespace fused_norm::ops
