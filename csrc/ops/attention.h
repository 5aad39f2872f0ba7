// The attention operators, torch.ops.fused_norm.attention_*: argument checks
// (attention_checks.cpp), allocation, derivatives, and the choice between the CPU path and the
// kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <cmath>
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
  std::optional<double> scale;  // of scores; none: 1 / sqrt(D)
  double softcap;
  std::optional<c10::SymInt> window_left, window_right;
  bool top_left;
  double dropout_p;

  auto fields() const {
    return std::tie(query, key, value, attn_mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k,
                    rng, max_seqlen_q, max_seqlen_k, scale, softcap, window_left, window_right,
                    top_left, dropout_p);
  }

  bool is_packed() const { return cu_seqlens_q.has_value(); }
  double score_scale() const { return scale.value_or(std::pow(query.size(-1), -0.5)); }
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

  auto fields() const {
    return std::tuple_cat(std::tie(dout, dlse, out, lse), forward.fields(), std::tie(wanted));
  }
};

// The wish for a tier, for tests and benchmarks on CUDA: "auto", "plain", "portable" or "hopper".
// An error at the next call that the tier does not take.
void force_attention_tier(const std::string& name);

// attention_forward through the dispatcher, and so recorded for autograd.
Forward attention(const AttentionCall& call);

// The checks that every call passes, also where the decomposition runs.
void check_attention(const AttentionCall& call);
void check_attention_without_rng(const AttentionCall& call);
// All that a call is refused for, before its seed is drawn.
void check_before_drawing(const AttentionCall& call);
void check_attention_backward(const AttentionBackwardCall& call);

// Between attention.cpp, which has checked a call and made its results, and the kernels or the CPU
// path, which fill them (attention_launch.cpp).

// Columns next to each other; one copy where they are not.
at::Tensor with_dense_rows(const at::Tensor& tensor);

// A mask of four dimensions.
at::Tensor of_four_dims(at::Tensor mask);

// Where gradients are written, undefined where they are not wanted: those of query, key and value
// may be views of what is returned.
struct NewGradients {
  AttentionGradients returned;
  QueryKeyValue qkv;
};

void run_attention_forward(const AttentionCall& call, const QueryKeyValue& qkv,
                           const at::Tensor& out, const at::Tensor& lse);
void run_attention_backward(const AttentionBackwardCall& call, const QueryKeyValue& qkv,
                            const NewGradients& made);

}  // namespace fused_norm::ops
