#include "ops/attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
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

// Rows of `cols` columns, otherwise in the shape and the order of strides of `like`.
Tensor new_rows(const Tensor& like, const SymInt& cols) {
  Tensor rows = with_dense_rows(like);
  if (rows.sym_size(-1) != cols) {
    c10::SymDimVector sizes(rows.sym_sizes());
    sizes.back() = cols;
    rows = rows.narrow(-1, 0, 1).expand_symint(sizes);
  }
  // Of a tensor that overlaps itself, empty_like() may put columns before rows.
  return with_dense_rows(at::empty_like(rows));
}

Tensor new_lse(const AttentionCall& call, const Tensor& query) {
  c10::SymDimVector rows(query.sym_sizes());
  rows.pop_back();
  if (call.is_packed()) std::swap(rows[0], rows[1]);
  return new_tensor(query, rows, at::toOpMathType(query.scalar_type()));
}

NewGradients new_gradients(const AttentionCall& call, const AttentionWanted& wanted) {
  NewGradients made;
  // The gradient of a tensor that holds `count` of query, key and value.
  const auto make = [&](AttentionGradient of, const OptionalTensor& tensor, int count) {
    if (!wanted[of] || !has(tensor)) return;
    const Tensor& all = made.returned[of] = new_rows(*tensor, tensor->sym_size(-1));
    for (int i = 0; i < count; ++i) made.qkv[of + i] = count == 1 ? all : all.select(0, i);
  };
  make(kQuery, call.query, has(call.key) ? 1 : 3);
  make(kKey, call.key, has(call.value) ? 1 : 2);
  make(kValue, call.value, 1);
  made.returned[kMask] =
      new_like_if(wanted[kMask] && dtype_of(call.attn_mask) != at::kBool, call.attn_mask);
  made.returned[kSink] = new_like_if(wanted[kSink], call.sink);
  return made;
}

bool is_empty(const AttentionCall& call, const Tensor& out) {
  return out.numel() == 0 || (call.is_packed() && call.cu_seqlens_q->size(0) == 1);
}

// (out, lse). Of a meta tensor their shapes and strides alone.
Forward attention_forward(const AttentionCall& call) {
  check_attention(call);
  const auto qkv = call.apart();
  const Tensor out = new_rows(qkv[0], qkv[2].sym_size(-1)), lse = new_lse(call, qkv[0]);
  if (out.is_meta()) return {out, lse};
  if (is_empty(call, out)) {
    out.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    return {out, lse};
  }
  run_attention_forward(call, qkv, out, lse);
  return {out, lse};
}

// The gradients; undefined where `wanted` is false, where there is no such tensor, and where it is
// stacked with the one before it.
AttentionGradients attention_backward(const AttentionBackwardCall& call) {
  check_attention_backward(call);
  const Tensor& out = call.out;
  check_built_for(out);
  const auto qkv = call.forward.apart();
  const NewGradients made = new_gradients(call.forward, call.wanted);
  // What the kernels would write of no queries, or of packed tensors without a sequence.
  if (out.is_meta() || is_empty(call.forward, out)) return zeroed(made.returned);
  run_attention_backward(call, qkv, made);
  return made.returned;
}

}  // namespace

// Profiles show this name.
struct AttentionFunction : CallFunction<AttentionFunction> {
  static constexpr const char* kBackward = "fused_norm::attention_backward";
  static constexpr std::array<int64_t, kAttentionGradients> kPlaces = {0, 1, 2, 3, 5};
  static constexpr auto* kCheck = &check_attention;
  static constexpr bool kSavesFirst = true, kDifferentiatesSecond = true;

  static const auto& op() { return operator_of<kernel<attention_forward>>("attention_forward"); }
  static c10::Stack before(const variable_list& grads, const Tensor& out, const Tensor& lse) {
    return {grads[0].defined() ? grads[0] : at::zeros_like(out), optional(grads[1]), out, lse};
  }
};

namespace {

void check_slopes(const OptionalTensor& slopes) {
  TORCH_CHECK(!needs_grad(slopes) && !any_tensor(has_tangent, slopes),
              "alibi_slopes requires grad, but attention does not differentiate them: pass "
              "alibi_slopes.detach()");
}

Forward differentiate_attention(const AttentionCall& call) {
  check_slopes(call.alibi_slopes);
  return differentiate_call<AttentionFunction>(call);
}

// Seed and offset of a call's dropout: int64 (2,) on query's device, from its default generator.
Tensor attention_rng(const Tensor& query) {
  const Tensor rng = at::empty({2}, query.options().dtype(at::kLong));
  return rng.is_meta() ? rng : rng.random_();
}

TORCH_LIBRARY_FRAGMENT(fused_norm, m) {
  const std::string call =
      "Tensor query, Tensor? key, Tensor? value, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? "
      "sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng, SymInt max_seqlen_q, SymInt "
      "max_seqlen_k, float? scale, float softcap, SymInt? window_left, SymInt? window_right, bool "
      "top_left, float dropout_p";
  define_differentiable(m, "attention_forward", "(" + call + ") -> (Tensor out, Tensor lse)",
                        kernel<attention_forward>, kernel<differentiate_attention>);
  define_backward(m, "attention_backward",
                  "(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, " + call +
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

void check_before_drawing(const AttentionCall& call) {
  check_slopes(call.alibi_slopes);
  check_attention_without_rng(call);
}

Forward attention(const AttentionCall& call) { return AttentionFunction::op().call(call); }

}  // namespace fused_norm::ops
