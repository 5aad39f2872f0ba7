#include "ops/attention_decomposition.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "core/attention/dropout.h"

namespace fused_norm::ops::decomposed {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymInt;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

ScalarType accumulate_dtype(ScalarType type) { return type == at::kDouble ? type : at::kFloat; }

bool has(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// Where each row of a tensor is: its sequence, and its place there. Packed sequences are one dense
// sequence whose rows hide each other; rows of none have the number -1.
struct Rows {
  Tensor sequence, place;
  Tensor bounds;  // of packed sequences and of one empty one more
};

Rows dense_rows(const SymInt& count, const at::TensorOptions& options) {
  const Tensor place = at::arange(count, options);
  return {at::zeros_like(place), place, {}};
}

Rows packed_rows(const Tensor& offsets, const SymInt& total, const at::TensorOptions& options) {
  // As kernels read them: within the tensor, in ascending order.
  const Tensor ascending = std::get<0>(at::cummax(offsets.to(at::kLong).clamp_min(0), 0));
  const Tensor ends = at::minimum(ascending, at::full_like(ascending, total));
  const Tensor bounds = at::cat({ends, ends.slice(0, -1)});
  const Tensor row = at::arange(total, options);
  const Tensor found = at::searchsorted(ends, row, /*out_int32=*/false, /*right=*/true) - 1;
  const Tensor sequence = found.clamp_min(0);
  const Tensor inside = found.ge(0).logical_and(row < bounds.index_select(0, sequence + 1));
  return {at::where(inside, sequence, -1), row - bounds.index_select(0, sequence), bounds};
}

// Of the sequence of each row of `rows`, how many rows it has in another tensor.
Tensor lengths(const Rows& rows, const Rows& of) {
  const Tensor sequence = rows.sequence.clamp_min(0);
  return of.bounds.index_select(0, sequence + 1) - of.bounds.index_select(0, sequence);
}

// The high and the low word of a product of 32-bit numbers, in 64-bit integers that wrap around.
std::pair<Tensor, Tensor> words(const Tensor& a, int64_t b) {
  constexpr int64_t kWord = 0xFFFFFFFF;
  const Tensor product = a * b;
  return {product.bitwise_right_shift(32).bitwise_and(kWord), product.bitwise_and(kWord)};
}

// draw_dropout() (core/attention/dropout.h) of every (row, query, key).
Tensor draws(const Tensor& rng, const Tensor& row, const Tensor& query, const Tensor& key) {
  constexpr int64_t kWord = 0xFFFFFFFF;
  const auto high = [](const Tensor& t) { return t.bitwise_right_shift(32).bitwise_and(kWord); };
  const Tensor seed = rng.select(0, 0), offset = rng.select(0, 1);
  Tensor c0 = key.div(4, "floor"), c1 = query, c2 = row, c3 = offset.bitwise_and(kWord);
  Tensor k0 = seed.bitwise_and(kWord), k1 = high(seed).bitwise_xor(high(offset));
  for (int round = 0; round < 10; ++round) {
    const auto [high0, low0] = words(c0, 0xD2511F53);
    const auto [high1, low1] = words(c2, 0xCD9E8D57);
    c0 = high1.bitwise_xor(c1).bitwise_xor(k0);
    c1 = low1;
    c2 = high0.bitwise_xor(c3).bitwise_xor(k1);
    c3 = low0;
    k0 = (k0 + int64_t{0x9E3779B9}).bitwise_and(kWord);
    k1 = (k1 + int64_t{0xBB67AE85}).bitwise_and(kWord);
  }
  const Tensor lane = key.remainder(4);
  return at::where(lane.eq(0), c0, at::where(lane.eq(1), c1, at::where(lane.eq(2), c2, c3)));
}

// Everything that both directions need, in the accumulation dtype and of four dimensions.
struct Probabilities {
  Tensor query, key, value;  // (B, Hq, Sq, D), (B, Hk, 1, Sk, D), (B, Hk, 1, Sk, Dv)
  Tensor capped;             // tanh of the scores, with softcap
  Tensor all;                // (B, Hq, Sq, Sk)
  Tensor kept;               // what dropout multiplies `all` by, or undefined
  Tensor of_sink, lse;       // (B, Hq, Sq)
};

Tensor as_dense(const Tensor& tensor, bool packed) {
  return packed ? tensor.transpose(0, 1).unsqueeze(0) : tensor;
}

// The query heads of a group beside their key head, and back.
Tensor grouped(const Tensor& tensor, const SymInt& kv_heads) {
  return tensor.unflatten_symint(1, {kv_heads, tensor.sym_size(1) / kv_heads});
}
Tensor ungrouped(const Tensor& tensor) { return tensor.flatten(1, 2); }

Tensor dropped(const AttentionCall& call, const Tensor& probabilities, const Rows& q,
               const Rows& k) {
  const SymInt heads = probabilities.sym_size(1);
  const auto integers = call.rng->options();
  const Tensor sequence = call.is_packed()
                              ? q.sequence.clamp_min(0).view({1, 1, -1, 1})
                              : at::arange(probabilities.sym_size(0), integers).view({-1, 1, 1, 1});
  const Tensor head = at::arange(heads, integers).view({-1, 1, 1});
  const Tensor draw = draws(*call.rng, sequence * heads + head, q.place.unsqueeze(1), k.place);
  const auto threshold =
      static_cast<int64_t>(dropout_threshold(static_cast<float>(call.dropout_p)));
  return draw.ge(threshold).to(probabilities.scalar_type()) / (1 - call.dropout_p);
}

Tensor alibi(const AttentionCall& call, const Tensor& scores, const Rows& q,
             const Tensor& distance) {
  Tensor slopes = call.alibi_slopes->to(scores.scalar_type());
  if (slopes.dim() == 1) return slopes.view({-1, 1, 1}) * distance;
  if (!call.is_packed()) return slopes.unsqueeze(-1).unsqueeze(-1) * distance;
  // With a row more, for rows of no sequence where there is none.
  slopes = at::cat({slopes, slopes.new_zeros_symint({1, slopes.sym_size(1)})});
  return slopes.index_select(0, q.sequence.clamp_min(0)).t().unsqueeze(-1) * distance;
}

Probabilities probabilities(const AttentionCall& call) {
  const auto qkv = call.apart();
  const bool packed = call.is_packed();
  const ScalarType dtype = accumulate_dtype(call.query.scalar_type());
  Probabilities p;
  p.query = as_dense(qkv[0], packed).to(dtype);
  p.key = as_dense(qkv[1], packed).to(dtype).unsqueeze(2);
  p.value = as_dense(qkv[2], packed).to(dtype).unsqueeze(2);
  const SymInt kv_heads = p.key.sym_size(1), queries = p.query.sym_size(2),
               keys = p.key.sym_size(3);
  const auto integers = call.query.options().dtype(at::kLong);
  const Rows q =
      packed ? packed_rows(*call.cu_seqlens_q, queries, integers) : dense_rows(queries, integers);
  const Rows k =
      packed ? packed_rows(*call.cu_seqlens_k, keys, integers) : dense_rows(keys, integers);
  Tensor s = ungrouped(at::matmul(grouped(p.query, kv_heads), p.key.transpose(-1, -2)));
  s = s * call.scale;
  if (call.softcap > 0) {
    p.capped = (s / call.softcap).tanh();
    s = p.capped * call.softcap;
  }
  // Keys less queries, of each query's sequence.
  const Tensor shift = packed ? (lengths(q, k) - lengths(q, q)).unsqueeze(1)
                              : at::full_like(q.place, keys - queries).unsqueeze(1);
  const Tensor ahead = k.place - q.place.unsqueeze(1);  // j - i
  if (has(call.alibi_slopes)) s = s - alibi(call, s, q, (ahead - shift).abs());
  Tensor hidden = q.sequence.unsqueeze(1).ne(k.sequence).logical_or(q.sequence.unsqueeze(1).lt(0));
  const Tensor offset = call.top_left ? ahead : ahead - shift;
  if (call.window_left.has_value()) {
    hidden = hidden.logical_or(offset.lt(-*call.window_left));
  }
  if (call.window_right.has_value()) hidden = hidden.logical_or(offset.gt(*call.window_right));
  if (has(call.attn_mask)) {
    if (call.attn_mask->scalar_type() == at::kBool) {
      hidden = hidden.logical_or(call.attn_mask->logical_not());
    } else {
      s = s + call.attn_mask->to(dtype);
    }
  }
  s = s.masked_fill(hidden, -kInfinity);

  // The shift of the exponent is a constant: no result depends on it.
  Tensor largest = s.new_full_symint({s.sym_size(0), s.sym_size(1), s.sym_size(2)}, -kInfinity);
  if (keys != 0) largest = s.detach().amax(-1);
  Tensor sink;
  if (has(call.sink)) {
    sink = call.sink->to(dtype).unsqueeze(-1);
    largest = at::maximum(largest, sink.detach());
  }
  const Tensor base = largest.masked_fill(largest.eq(-kInfinity), 0);
  const Tensor e = (s - base.unsqueeze(-1)).exp();
  Tensor sum = e.sum(-1);
  if (sink.defined()) sum = sum + (sink - base).exp();
  const Tensor empty = sum.eq(0);
  const Tensor divisor = sum.masked_fill(empty, 1);
  p.all = e / divisor.unsqueeze(-1);
  if (sink.defined()) p.of_sink = (sink - base).exp() / divisor;
  p.lse = (base + divisor.log()).masked_fill(empty, -kInfinity);
  if (packed) {  // rows of no sequence have no sink either
    const Tensor outside = q.sequence.lt(0);
    p.lse = p.lse.masked_fill(outside, -kInfinity);
    if (sink.defined()) p.of_sink = p.of_sink.masked_fill(outside, 0);
  }
  if (call.dropout_p > 0) p.kept = dropped(call, p.all, q, k);
  return p;
}

Tensor kept_part(const Probabilities& p) { return p.kept.defined() ? p.all * p.kept : p.all; }

Tensor output(const Probabilities& p) {
  return ungrouped(at::matmul(grouped(kept_part(p), p.key.sym_size(1)), p.value));
}

Tensor from_dense(const Tensor& tensor, bool packed) {
  return packed ? tensor.squeeze(0).transpose(0, 1) : tensor;
}

// weights^T rows, summed over the heads of a group.
Tensor of_keys(const Tensor& weights, const Tensor& rows, const SymInt& kv_heads) {
  return at::matmul(grouped(weights, kv_heads).transpose(-1, -2), grouped(rows, kv_heads)).sum(2);
}

}  // namespace

std::pair<Tensor, Tensor> attention_forward(const AttentionCall& call) {
  check_attention(call);
  const Probabilities p = probabilities(call);
  const Tensor out = from_dense(output(p), call.is_packed()).to(call.query.scalar_type());
  return {out, call.is_packed() ? p.lse.squeeze(0) : p.lse};
}

AttentionGradients attention_backward(const Tensor& dout, const OptionalTensor& dlse,
                                      const AttentionCall& call,
                                      const std::array<bool, 5>& wanted) {
  check_attention(call);
  const bool packed = call.is_packed();
  const ScalarType type = call.query.scalar_type();
  const Probabilities p = probabilities(call);
  const SymInt kv_heads = p.key.sym_size(1);
  const Tensor d_out = as_dense(dout, packed).to(p.all.scalar_type());
  Tensor of_row = (d_out * output(p)).sum(-1);
  if (has(dlse)) of_row = of_row - (packed ? dlse->unsqueeze(0) : *dlse);
  Tensor dp = ungrouped(at::matmul(grouped(d_out, kv_heads), p.value.transpose(-1, -2)));
  if (p.kept.defined()) dp = dp * p.kept;
  const Tensor of_scores = p.all * (dp - of_row.unsqueeze(-1));
  Tensor ds = of_scores * call.scale;
  if (p.capped.defined()) ds = ds * (1 - p.capped * p.capped);

  const auto finished = [&](const Tensor& t) { return from_dense(t, packed).to(type); };
  const bool stacked_all = !has(call.key), stacked_two = !stacked_all && !has(call.value);
  const bool of_key = wanted[stacked_all ? 0 : 1], of_value = wanted[stacked_all   ? 0
                                                                     : stacked_two ? 1
                                                                                   : 2];
  AttentionGradients gradients;
  if (wanted[0]) {
    gradients.query = finished(ungrouped(at::matmul(grouped(ds, kv_heads), p.key)));
  }
  if (of_key) gradients.key = finished(of_keys(ds, p.query, kv_heads));
  if (of_value) gradients.value = finished(of_keys(kept_part(p), d_out, kv_heads));
  if (stacked_all && wanted[0]) {
    gradients.query = at::stack({gradients.query, gradients.key, gradients.value});
    gradients.key = gradients.value = Tensor();
  } else if (stacked_two && wanted[1]) {
    gradients.key = at::stack({gradients.key, gradients.value});
    gradients.value = Tensor();
  }
  if (wanted[3] && has(call.attn_mask)) {
    gradients.attn_mask =
        of_scores.sum_to_size_symint(call.attn_mask->sym_sizes()).to(call.attn_mask->scalar_type());
  }
  if (wanted[4] && has(call.sink)) {
    gradients.sink =
        -(p.of_sink * of_row).sum(at::IntArrayRef({0, 2})).to(call.sink->scalar_type());
  }
  return gradients;
}

}  // namespace fused_norm::ops::decomposed
