// The attention operators: argument checks, allocation, derivatives, and the choice between the CPU
// path and the kernels. Registered as torch.ops.fused_norm.attention_* (operators.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "ops/call.h"

namespace fused_norm::ops {

// Query, key and value, each by itself.
using QueryKeyValue = std::array<at::Tensor, 3>;

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

  template <typename Self>
  static auto fields(Self& c) {
    return std::tie(c.query, c.key, c.value, c.attn_mask, c.alibi_slopes, c.sink, c.cu_seqlens_q,
                    c.cu_seqlens_k, c.rng, c.max_seqlen_q, c.max_seqlen_k, c.scale, c.softcap,
                    c.window_left, c.window_right, c.top_left, c.dropout_p);
  }

  bool is_packed() const { return cu_seqlens_q.has_value(); }
  QueryKeyValue apart() const;
};

// What is differentiated, in this order.
enum AttentionGradient { kQuery, kKey, kValue, kMask, kSink, kAttentionGradients };
using AttentionGradients = Gradients<kAttentionGradients>;
using AttentionWanted = std::array<bool, kAttentionGradients>;

// What the backward operator is called with.
struct AttentionBackwardCall {
  const at::Tensor& dout;
  const OptionalTensor& dlse;
  const at::Tensor &out, &lse;
  AttentionCall forward;
  AttentionWanted wanted;

  template <typename Self>
  static auto fields(Self& c) {
    return std::tuple_cat(std::tie(c.dout, c.dlse, c.out, c.lse), AttentionCall::fields(c.forward),
                          std::tie(c.wanted));
  }
};

// The wish for a tier, for tests and benchmarks on CUDA: "auto", "plain", "portable" or "hopper".
// An error at the next call that the tier does not take.
void force_attention_tier(const std::string& name);

// (out, lse). Of a meta tensor their shapes and strides alone.
Forward attention_forward(const AttentionCall& call);

// The gradients; undefined where `wanted` is false, where there is no such tensor, and where it is
// stacked with the one before it.
AttentionGradients attention_backward(const AttentionBackwardCall& call);

// attention_forward through the dispatcher, and so recorded for autograd.
Forward attention(const AttentionCall& call);

// The Autograd kernel of the forward operator.
Forward differentiate_attention(const AttentionCall& call);

// Seed and offset of a call's dropout: int64 (2,) on query's device, from its default generator.
at::Tensor attention_rng(const at::Tensor& query);

// The checks that every call passes, for decompositions too (attention_checks.cpp).
void check_attention(const AttentionCall& call);
void check_attention_without_rng(const AttentionCall& call);
// All that a call is refused for, before its seed is drawn.
void check_before_drawing(const AttentionCall& call);
void check_attention_backward(const AttentionBackwardCall& call);

// Between attention.cpp, which has checked a call and made its results, and those who fill them:
// the CPU path and the CUDA kernels.

// Columns next to each other; one copy where they are not.
at::Tensor with_dense_rows(const at::Tensor& tensor);

// A mask of four dimensions.
at::Tensor of_four_dims(at::Tensor mask);

// Where gradients are written: those of query, key and value may be views of what is returned.
struct NewGradients {
  AttentionGradients returned;
  QueryKeyValue qkv;
};

using ForwardBackend = void(const AttentionCall& call, const QueryKeyValue& qkv,
                            const at::Tensor& out, const at::Tensor& lse);
// Makes the gradients of the mask and of sinks, too.
using BackwardBackend = void(const AttentionBackwardCall& call, const QueryKeyValue& qkv,
                             NewGradients* made);
namespace on_cpu {
ForwardBackend attention_forward;
BackwardBackend attention_backward;
}  // namespace on_cpu
// In a build without CUDA: errors.
namespace on_cuda {
ForwardBackend attention_forward;
BackwardBackend attention_backward;
}  // namespace on_cuda

}  // namespace fused_norm::ops
