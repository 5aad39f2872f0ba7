// A call as the CPU path takes it.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "cpu/attention.h"
#include "ops/attention.h"

namespace fused_norm::ops::on_cpu {
namespace {

using at::Tensor;
using c10::SymInt;

// (batch, heads, rows, columns) of either form.
Tensor as_dense(const Tensor& tensor, bool packed) {
  return packed ? tensor.transpose(0, 1).unsqueeze(0) : tensor;
}

// Offsets as kernels read them: within the tensor, in ascending order.
std::vector<int64_t> clamped_offsets(const Tensor& offsets, int64_t total) {
  const Tensor dense = offsets.contiguous();
  const int32_t* data = dense.const_data_ptr<int32_t>();
  std::vector<int64_t> result(data, data + dense.numel());
  int64_t last = 0;
  for (int64_t& offset : result) last = offset = std::clamp<int64_t>(offset, last, total);
  return result;
}

cpu::AttentionProblem cpu_problem(const AttentionCall& call, const QueryKeyValue& qkv) {
  const bool packed = call.is_packed();
  const auto dense = [&](const Tensor& tensor) {
    return as_dense(with_dense_rows(tensor), packed);
  };
  const auto limit = [](const std::optional<SymInt>& window) {
    constexpr int64_t kNoLimit = cpu::AttentionProblem::kNoLimit;
    return window.has_value() ? std::min(window->expect_int(), kNoLimit) : kNoLimit;
  };
  cpu::AttentionProblem problem{};
  problem.query = dense(qkv[0]);
  problem.key = dense(qkv[1]);
  problem.value = dense(qkv[2]);
  const int64_t heads = problem.query.size(1), queries = problem.query.size(2);
  int64_t batch = problem.query.size(0);
  if (packed) {
    batch = call.cu_seqlens_q->size(0) - 1;
    problem.query_offsets = clamped_offsets(*call.cu_seqlens_q, queries);
    problem.key_offsets = clamped_offsets(*call.cu_seqlens_k, problem.key.size(2));
  }
  if (has(call.attn_mask)) {
    problem.mask =
        of_four_dims(*call.attn_mask).expand({batch, heads, queries, problem.key.size(2)});
  }
  if (has(call.alibi_slopes)) problem.alibi_slopes = call.alibi_slopes->expand({batch, heads});
  if (has(call.sink)) problem.sink = call.sink->to(at::kDouble).contiguous();
  problem.scale = call.scale;
  problem.softcap = call.softcap;
  problem.window_left = limit(call.window_left);
  problem.window_right = limit(call.window_right);
  problem.top_left = call.top_left;
  problem.dropout_p = call.dropout_p;
  if (call.dropout_p > 0) {
    const Tensor rng = call.rng->contiguous();
    problem.seed = static_cast<uint64_t>(rng.const_data_ptr<int64_t>()[0]);
    problem.offset = static_cast<uint64_t>(rng.const_data_ptr<int64_t>()[1]);
  }
  return problem;
}

}  // namespace

void attention_forward(const AttentionCall& call, const QueryKeyValue& qkv, const Tensor& out,
                       const Tensor& lse) {
  cpu::attention_forward(cpu_problem(call, qkv), as_dense(out, call.is_packed()), lse);
}

void attention_backward(const AttentionBackwardCall& inputs, const QueryKeyValue& qkv,
                        NewGradients* made) {
  const AttentionCall& call = inputs.forward;
  const bool packed = call.is_packed();
  const auto dense = [&](const Tensor& tensor) {
    return tensor.defined() ? as_dense(with_dense_rows(tensor), packed) : tensor;
  };
  const cpu::AttentionProblem problem = cpu_problem(call, qkv);
  cpu::AttentionProblemGradients gradients{dense(made->qkv[0]), dense(made->qkv[1]),
                                           dense(made->qkv[2])};
  Tensor dmask;
  if (inputs.wanted[kMask] && has(call.attn_mask)) {
    dmask = at::zeros(of_four_dims(*call.attn_mask).sizes(), inputs.lse.options());
    gradients.mask = dmask.expand(problem.mask.sizes());
  }
  if (inputs.wanted[kSink] && has(call.sink)) {
    gradients.sink = at::empty(call.sink->sizes(), inputs.lse.options().dtype(at::kDouble));
  }
  cpu::attention_backward(problem, inputs.lse.contiguous(), dense(inputs.dout),
                          has(inputs.dlse) ? inputs.dlse->contiguous() : Tensor(), gradients);
  if (dmask.defined()) {
    made->returned[kMask] = dmask.to(call.attn_mask->scalar_type()).view(call.attn_mask->sizes());
  }
  if (gradients.sink.defined()) {
    made->returned[kSink] = gradients.sink.to(call.sink->scalar_type());
  }
}

}  // namespace fused_norm::ops::on_cpu
