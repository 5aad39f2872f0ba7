// Attention on the CPU, by blocks of query rows: the scores of a block are in memory, those of a
// call never. Arguments are already checked; every tensor is a CPU tensor. Arithmetic is in fp32
// (fp64 for fp64). What a sequence gives depends on that sequence and the options alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace fused_norm::cpu {

// As AttentionParams (core/attention/attention.h), whose comment says what is computed.
struct AttentionProblem {
  // (batch, heads, rows, columns), columns contiguous; of packed sequences the batch is 1.
  at::Tensor query, key, value;
  // Where packed sequences start, and the last one's end, in ascending order; empty: dense.
  std::vector<int64_t> query_offsets, key_offsets;

  at::Tensor mask;          // expanded to (batch, heads, queries, keys), or undefined
  at::Tensor alibi_slopes;  // expanded to (sequences, heads), fp32, or undefined
  at::Tensor sink;          // (heads), or undefined

  double scale, softcap;
  int64_t window_left, window_right;  // kNoLimit: none
  bool top_left;
  double dropout_p;
  uint64_t seed, offset;  // of dropout

  static constexpr int64_t kNoLimit = std::numeric_limits<int32_t>::max();
};

// Writes all of out (batch, heads, queries, value columns) and of the contiguous lse (batch, heads,
// queries), fp32 or fp64.
void attention_forward(const AttentionProblem& problem, const at::Tensor& out,
                       const at::Tensor& lse);

// What is undefined is not asked for. dmask: zeros on entry, in lse's dtype and of the mask's own
// shape, expanded. dsink: (heads) in fp64.
struct AttentionProblemGradients {
  at::Tensor query, key, value, mask, sink;
};
void attention_backward(const AttentionProblem& problem, const at::Tensor& lse,
                        const at::Tensor& dout, const at::Tensor& dlse,
                        const AttentionProblemGradients& gradients);

}  // namespace fused_norm::cpu
