#include "ops/attention.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "ops/autograd.h"

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

// In the order of strides of `like`. Where it overlaps itself, empty_like() may put columns before
// rows.
Tensor empty_rows_like(const Tensor& like) { return with_dense_rows(at::empty_like(like)); }

Tensor new_gradient(const Tensor& of) { return empty_rows_like(with_dense_rows(of)); }

// In query's own order of strides.
Tensor new_out(const Tensor& query, const SymInt& value_dim) {
  const Tensor like = with_dense_rows(query);
  if (like.sym_size(-1) == value_dim) return empty_rows_like(like);
  c10::SymDimVector sizes(like.sym_sizes());
  sizes.back() = value_dim;
  return empty_rows_like(like.narrow(-1, 0, 1).expand_symint(sizes));
}

Tensor new_lse(const AttentionCall& call, const Tensor& query) {
  c10::SymDimVector rows(query.sym_sizes());
  rows.pop_back();
  if (call.is_packed()) std::swap(rows[0], rows[1]);
  return new_tensor(query, rows, accumulate_dtype(query.scalar_type()));
}

NewGradients new_gradients(const AttentionCall& call, const AttentionWanted& wanted) {
  NewGradients made;
  // The gradient of a tensor that holds `count` of query, key and value.
  const auto make = [&](AttentionGradient of, const OptionalTensor& tensor, int count) {
    if (!wanted[of] || !has(tensor)) return;
    const Tensor& all = made.returned[of] = new_gradient(*tensor);
    for (int i = 0; i < count; ++i) made.qkv[of + i] = count == 1 ? all : all.select(0, i);
  };
  make(kQuery, call.query, has(call.key) ? 1 : 3);
  make(kKey, call.key, has(call.value) ? 1 : 2);
  make(kValue, call.value, 1);
  return made;
}

// Of meta tensors, and what the kernels would write of no queries, or of packed tensors without a
// sequence.
AttentionGradients zeroed(NewGradients made, const AttentionCall& call,
                          const AttentionWanted& wanted) {
  if (wanted[kMask] && has(call.attn_mask)) made.returned[kMask] = new_like(*call.attn_mask);
  if (wanted[kSink] && has(call.sink)) made.returned[kSink] = new_like(*call.sink);
  for (Tensor& gradient : made.returned) {
    if (gradient.defined()) gradient.zero_();
  }
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
  const auto run = out.is_cpu() ? on_cpu::attention_forward : on_cuda::attention_forward;
  run(call, qkv, out, lse);
  return {out, lse};
}

AttentionGradients attention_backward(const AttentionBackwardCall& call) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_attention_backward(call);
  const Tensor& out = call.out;
  const auto qkv = call.forward.apart();
  NewGradients made = new_gradients(call.forward, call.wanted);
  if (out.is_meta() || is_empty(call.forward, out)) {
    return zeroed(std::move(made), call.forward, call.wanted);
  }
  const auto run = out.is_cpu() ? on_cpu::attention_backward : on_cuda::attention_backward;
  run(call, qkv, &made);
  return made.returned;
}

// Profiles show this name.
struct AttentionFunction : CallFunction<AttentionFunction> {
  static constexpr const char* kBackward = "fused_norm::attention_backward";
  static constexpr std::array<int64_t, kAttentionGradients> kPlaces = {0, 1, 2, 3, 5};
  static constexpr bool kSavesFirst = true, kDifferentiatesSecond = true;

  static const auto& op() {
    static const Operator op("attention_forward", kernel<attention_forward>);
    return op;
  }
  static c10::Stack before(const variable_list& grads, const Tensor& out, const Tensor& lse) {
    return {grads[0].defined() ? grads[0] : at::zeros_like(out), optional(grads[1]), out, lse};
  }
};

static void check_slopes(const OptionalTensor& slopes) {
  TORCH_CHECK(!needs_grad(slopes) && !any_tensor(has_tangent, slopes),
              "alibi_slopes requires grad, but attention does not differentiate them: pass "
              "alibi_slopes.detach(), or a float attn_mask");
}

Forward differentiate_attention(const AttentionCall& call) {
  check_slopes(call.alibi_slopes);
  return differentiate_call<AttentionFunction>(check_attention, call);
}

void check_before_drawing(const AttentionCall& call) {
  check_slopes(call.alibi_slopes);
  check_attention_without_rng(call);
}

Forward attention(const AttentionCall& call) { return AttentionFunction::op().call(call); }

Tensor attention_rng(const Tensor& query) {
  const Tensor rng = at::empty({2}, query.options().dtype(at::kLong));
  return rng.is_meta() ? rng : rng.random_();
}

}  // namespace fused_norm::ops
