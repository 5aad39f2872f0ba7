// The attention operators: argument checks, allocation, and the choice between the CPU path and the
// kernels. Registered as torch.ops.fused_norm.attention_* (attention_bindings.cpp); differentiated
// in attention_autograd.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace fused_norm::ops {

using OptionalTensor = std::optional<at::Tensor>;

// What both operators are called with. Dense: query (B, Hq, Sq, D), key (B, Hk, Sk, D) and value
// (B, Hk, Sk, Dv). Packed sequences, with cu_seqlens: (T, H, D).
//
// Tensors that are stacked come as one, of one more dimension before the others: without a value,
// `key` is (2, ...) and holds key and value; without a key, `query` is (3, ...) and holds all
// three. Their gradient is then one tensor too.
struct AttentionCall {
  at::Tensor query;
  OptionalTensor key, value, attn_mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, rng;
  c10::SymInt max_seqlen_q, max_seqlen_k;
  double scale, softcap;
  std::optional<c10::SymInt> window_left, window_right;
  bool top_left;
  double dropout_p;

  bool is_packed() const { return cu_seqlens_q.has_value(); }
  // Query, key and value, each by itself.
  std::array<at::Tensor, 3> apart() const;
};

struct AttentionGradients {
  at::Tensor query, key, value, attn_mask, sink;
};

// The wish for a tier, for tests and benchmarks on CUDA: "auto", "plain", "portable" or "hopper".
// An error at the next call that the tier does not take.
void force_attention_tier(const std::string& name);
// The tier that runs a call of CUDA tensors.
std::string attention_tier_of(const AttentionCall& call);

// (out, lse). Of a meta tensor their shapes and strides alone.
std::pair<at::Tensor, at::Tensor> attention_forward(const AttentionCall& call);

// The gradients of query, key, value, attn_mask and sink; undefined where `wanted` is false, where
// there is no such tensor, and where it is stacked with the one before it.
AttentionGradients attention_backward(const at::Tensor& dout, const OptionalTensor& dlse,
                                      const at::Tensor& out, const at::Tensor& lse,
                                      const AttentionCall& call, const std::array<bool, 5>& wanted);

// attention_forward through the dispatcher, and so recorded for autograd (attention_autograd.cpp).
std::pair<at::Tensor, at::Tensor> attention(const AttentionCall& call);

// Seed and offset of a call's dropout: int64 (2,) on query's device, from its default generator.
at::Tensor attention_rng(const at::Tensor& query);

// The checks that every call passes, for decompositions too (attention_checks.cpp).
void check_attention(const AttentionCall& call);
void check_attention_backward(const at::Tensor& dout, const OptionalTensor& dlse,
                              const at::Tensor& out, const at::Tensor& lse,
                              const AttentionCall& call);

// The schemas' order of arguments, written once: a function of an AttentionCall as a kernel.
using ForwardResult = std::tuple<at::Tensor, at::Tensor>;
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <auto function>
ForwardResult forward_kernel(const at::Tensor& query, const OptionalTensor& key,
                             const OptionalTensor& value, const OptionalTensor& attn_mask,
                             const OptionalTensor& alibi_slopes, const OptionalTensor& sink,
                             const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                             const OptionalTensor& rng, c10::SymInt max_seqlen_q,
                             c10::SymInt max_seqlen_k, double scale, double softcap,
                             std::optional<c10::SymInt> window_left,
                             std::optional<c10::SymInt> window_right, bool top_left,
                             double dropout_p) {
  return function({query, key, value, attn_mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k,
                   rng, std::move(max_seqlen_q), std::move(max_seqlen_k), scale, softcap,
                   std::move(window_left), std::move(window_right), top_left, dropout_p});
}

template <auto function>
BackwardResult backward_kernel(const at::Tensor& dout, const OptionalTensor& dlse,
                               const at::Tensor& out, const at::Tensor& lse,
                               const at::Tensor& query, const OptionalTensor& key,
                               const OptionalTensor& value, const OptionalTensor& attn_mask,
                               const OptionalTensor& alibi_slopes, const OptionalTensor& sink,
                               const OptionalTensor& cu_seqlens_q,
                               const OptionalTensor& cu_seqlens_k, const OptionalTensor& rng,
                               c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k, double scale,
                               double softcap, std::optional<c10::SymInt> window_left,
                               std::optional<c10::SymInt> window_right, bool top_left,
                               double dropout_p, std::array<bool, 5> output_mask) {
  AttentionGradients gradients =
      function(dout, dlse, out, lse,
               {query, key, value, attn_mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, rng,
                std::move(max_seqlen_q), std::move(max_seqlen_k), scale, softcap,
                std::move(window_left), std::move(window_right), top_left, dropout_p},
               output_mask);
  return {gradients.query, gradients.key, gradients.value, gradients.attn_mask, gradients.sink};
}

using ForwardOp = decltype(forward_kernel<attention_forward>);
using BackwardOp = decltype(backward_kernel<attention_backward>);

// And a call of an operator, from an AttentionCall.
template <typename Operator>
ForwardResult call_forward(const Operator& op, const AttentionCall& c) {
  return op.call(c.query, c.key, c.value, c.attn_mask, c.alibi_slopes, c.sink, c.cu_seqlens_q,
                 c.cu_seqlens_k, c.rng, c.max_seqlen_q, c.max_seqlen_k, c.scale, c.softcap,
                 c.window_left, c.window_right, c.top_left, c.dropout_p);
}
template <typename Operator>
BackwardResult call_backward(const Operator& op, const at::Tensor& dout, const OptionalTensor& dlse,
                             const at::Tensor& out, const at::Tensor& lse, const AttentionCall& c,
                             const std::array<bool, 5>& wanted) {
  return op.call(dout, dlse, out, lse, c.query, c.key, c.value, c.attn_mask, c.alibi_slopes, c.sink,
                 c.cu_seqlens_q, c.cu_seqlens_k, c.rng, c.max_seqlen_q, c.max_seqlen_k, c.scale,
                 c.softcap, c.window_left, c.window_right, c.top_left, c.dropout_p, wanted);
}

}  // namespace fused_norm::ops
