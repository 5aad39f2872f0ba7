// Every argument's shape, dtype, device and value, before anything runs; sizes may be symbols.
#include <c10/core/SymBool.h>

#include <cmath>

#include "ops/attention.h"
#include "ops/checks.h"

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymInt;

void check_beside(const Tensor& tensor, const char* name, const Tensor& query) {
  check_layout(tensor, name);
  check_device(tensor, name, query, "query");
}

// Of an option that has the precision of query, or fp32.
void check_option_type(const Tensor& tensor, const char* name, const Tensor& query,
                       const char* or_else) {
  const ScalarType type = tensor.scalar_type();
  TORCH_CHECK(type == query.scalar_type() || type == at::kFloat, name, " must be ", or_else,
              "float32 or query's ", query.scalar_type(), ", but is ", type);
}

void check_not_negative(const SymInt& value, const char* name) {
  TORCH_SYM_CHECK(value.sym_ge(0), name, " must not be negative, but is ", value);
}

void check_offsets(const Tensor& offsets, const char* name, const Tensor& query) {
  check_beside(offsets, name, query);
  TORCH_CHECK(offsets.scalar_type() == at::kInt, name, " must be int32, but is ",
              offsets.scalar_type());
  TORCH_CHECK(offsets.dim() == 1, name, " must have one dimension, but has shape ",
              offsets.sym_sizes());
  TORCH_SYM_CHECK(offsets.sym_size(0).sym_ge(1), name,
                  " must hold the number of sequences and one more offsets, but is empty");
}

void check_tensors(const AttentionCall& call, const QueryKeyValue& qkv) {
  const auto& [query, key, value] = qkv;
  const char* names[] = {"query", "key", "value"};
  check_floating(query.scalar_type(), "query");
  const int64_t dims = call.is_packed() ? 3 : 4;
  for (int i = 0; i < 3; ++i) {
    check_beside(qkv[i], names[i], query);
    TORCH_CHECK(qkv[i].scalar_type() == query.scalar_type(), names[i], " is ", qkv[i].scalar_type(),
                ", but query is ", query.scalar_type(), ": they must have one dtype");
    TORCH_CHECK(qkv[i].dim() == dims, names[i], " must be ",
                call.is_packed() ? "(rows, heads, head dim) with cu_seqlens"
                                 : "(batch, heads, rows, head dim)",
                ", but has shape ", qkv[i].sym_sizes());
  }
  const auto q = query.sym_sizes(), k = key.sym_sizes(), v = value.sym_sizes();
  const int64_t heads = 1, rows = call.is_packed() ? 0 : 2;
  if (!call.is_packed()) {
    TORCH_SYM_CHECK(k[0].sym_eq(q[0]), "key has batch size ", k[0], ", but query has ", q[0]);
    TORCH_SYM_CHECK(v[0].sym_eq(q[0]), "value has batch size ", v[0], ", but query has ", q[0]);
  }
  TORCH_SYM_CHECK(v[heads].sym_eq(k[heads]), "value has ", v[heads], " heads, but key has ",
                  k[heads]);
  TORCH_SYM_CHECK(v[rows].sym_eq(k[rows]), "value has ", v[rows], " rows, but key has ", k[rows]);
  TORCH_SYM_CHECK(k[dims - 1].sym_eq(q[dims - 1]), "key has head dim ", k[dims - 1],
                  ", but query has ", q[dims - 1]);
  TORCH_SYM_CHECK(q[dims - 1].sym_ge(1), "query must have a head dim of at least 1, but has 0");
  TORCH_SYM_CHECK(v[dims - 1].sym_ge(1), "value must have a head dim of at least 1, but has 0");
  // 0 query heads go with 0 key heads.
  const SymInt rest = TORCH_GUARD_OR_FALSE(k[heads].sym_eq(0)) ? q[heads] : q[heads] % k[heads];
  TORCH_SYM_CHECK(rest.sym_eq(0), "query has ", q[heads], " heads, which is no multiple of key's ",
                  k[heads]);
}

void check_mask(const Tensor& mask, const AttentionCall& call, const Tensor& query,
                const Tensor& key) {
  check_beside(mask, "attn_mask", query);
  if (mask.scalar_type() != at::kBool) check_option_type(mask, "attn_mask", query, "bool, ");
  TORCH_CHECK(!call.is_packed(), "attn_mask of shape ", mask.sym_sizes(),
              " cannot be combined with cu_seqlens");
  const SymInt full[] = {query.sym_size(0), query.sym_size(1), query.sym_size(2), key.sym_size(2)};
  TORCH_SYM_CHECK(are_alike(mask.sym_sizes(), full, /*broadcasts=*/true), "attn_mask has shape ",
                  mask.sym_sizes(),
                  ", which does not broadcast to (batch, heads, queries, keys) = (", full[0], ", ",
                  full[1], ", ", full[2], ", ", full[3], ")");
}

void check_options(const AttentionCall& call) {
  TORCH_CHECK(!call.scale || std::isfinite(*call.scale), "scale must be finite, but is ",
              *call.scale);
  TORCH_CHECK(std::isfinite(call.softcap) && call.softcap >= 0,
              "softcap must be finite and not negative, but is ", call.softcap);
  TORCH_CHECK(call.dropout_p >= 0 && call.dropout_p < 1,
              "dropout_p must be at least 0 and below 1, but is ", call.dropout_p);
  if (call.window_left)
    check_not_negative(*call.window_left, "window's left limit (None: no limit)");
  if (call.window_right)
    check_not_negative(*call.window_right, "window's right limit (None: no limit)");
}

}  // namespace

QueryKeyValue AttentionCall::apart() const {
  const int64_t dims = is_packed() ? 3 : 4;
  const auto check = [&](const Tensor& tensor, int64_t count, const char* name,
                         const char* missing) {
    check_layout(tensor, name);
    TORCH_CHECK(tensor.dim() == dims + 1 && tensor.sym_size(0) == count, name, " must hold ", count,
                " tensors of ", dims, " dimensions, as there is no ", missing, ", but has shape ",
                tensor.sym_sizes());
  };
  if (!has(key)) {
    TORCH_CHECK(!has(value), "value has shape ", value->sym_sizes(), ", but there is no key");
    check(query, 3, "query", "key");
    return {query.select(0, 0), query.select(0, 1), query.select(0, 2)};
  }
  if (has(value)) return {query, *key, *value};
  check(*key, 2, "key", "value");
  return {query, key->select(0, 0), key->select(0, 1)};
}

void check_attention_without_rng(const AttentionCall& call) {
  check_layout(call.query, "query");
  TORCH_CHECK(has(call.cu_seqlens_q) == has(call.cu_seqlens_k),
              "cu_seqlens_q and cu_seqlens_k must both be given, but cu_seqlens_",
              has(call.cu_seqlens_q) ? "k" : "q", " is None");
  const auto qkv = call.apart();
  const Tensor& query = qkv[0];
  check_tensors(call, qkv);
  if (call.is_packed()) {
    check_offsets(*call.cu_seqlens_q, has(call.key) ? "cu_seqlens_q" : "cu_seqlens", query);
    check_offsets(*call.cu_seqlens_k, "cu_seqlens_k", query);
    TORCH_SYM_CHECK(call.cu_seqlens_k->sym_size(0).sym_eq(call.cu_seqlens_q->sym_size(0)),
                    "cu_seqlens_k has ", call.cu_seqlens_k->sym_size(0),
                    " elements, but cu_seqlens_q has ", call.cu_seqlens_q->sym_size(0));
    check_not_negative(call.max_seqlen_q, has(call.key) ? "max_seqlen_q" : "max_seqlen");
    check_not_negative(call.max_seqlen_k, "max_seqlen_k");
  }
  const SymInt heads = query.sym_size(1);
  if (has(call.attn_mask)) check_mask(*call.attn_mask, call, query, qkv[1]);
  if (has(call.alibi_slopes)) {
    const Tensor& slopes = *call.alibi_slopes;
    check_beside(slopes, "alibi_slopes", query);
    TORCH_CHECK(slopes.scalar_type() == at::kFloat, "alibi_slopes must be float32, but is ",
                slopes.scalar_type());
    const SymInt batch = call.is_packed() ? call.cu_seqlens_q->sym_size(0) - 1 : query.sym_size(0);
    const c10::SymIntArrayRef sizes = slopes.sym_sizes();
    TORCH_SYM_CHECK(are_alike(sizes, {heads}).sym_or(are_alike(sizes, {batch, heads})),
                    "alibi_slopes must be (heads,) = (", heads, ",) or (batch, heads) = (", batch,
                    ", ", heads, "), but has shape ", sizes);
  }
  if (has(call.sink)) {
    check_beside(*call.sink, "sink", query);
    check_option_type(*call.sink, "sink", query, "");
    TORCH_SYM_CHECK(are_alike(call.sink->sym_sizes(), {heads}), "sink must be (heads,) = (", heads,
                    ",), but has shape ", call.sink->sym_sizes());
  }
  check_options(call);
}

void check_attention(const AttentionCall& call) {
  check_attention_without_rng(call);
  if (call.dropout_p > 0) {
    TORCH_CHECK(has(call.rng), "rng must hold a seed and an offset with dropout_p ", call.dropout_p,
                ", but is None");
    check_beside(*call.rng, "rng", call.query);
    TORCH_CHECK(
        call.rng->scalar_type() == at::kLong && call.rng->dim() == 1 && call.rng->sym_size(0) == 2,
        "rng must be int64 of shape (2,), but is ", call.rng->scalar_type(), " of shape ",
        call.rng->sym_sizes());
  }
}

void check_attention_backward(const AttentionBackwardCall& call) {
  check_attention(call.forward);
  const auto [query, key, value] = call.forward.apart();
  const auto check = [query = query](const Tensor& tensor, const char* name, ScalarType type,
                                     c10::SymIntArrayRef shape) {
    check_given(tensor, name, type, shape, query, Strides::kAny);
  };
  c10::SymDimVector shape(query.sym_sizes());
  shape.back() = value.sym_size(-1);
  check(call.out, "out", query.scalar_type(), shape);
  check(call.dout, "dout", query.scalar_type(), shape);
  shape.pop_back();
  if (call.forward.is_packed()) std::swap(shape[0], shape[1]);
  const ScalarType wide = at::toOpMathType(query.scalar_type());
  check(call.lse, "lse", wide, shape);
  if (has(call.dlse)) check(*call.dlse, "dlse", wide, shape);
}

}  // namespace fused_norm::ops
