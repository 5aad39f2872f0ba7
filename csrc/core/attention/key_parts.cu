// Joins the parts of keys of sequences of few queries (KeyParts).
#include "core/attention/instructions.cuh"
#include "core/attention/scores.cuh"
#include "core/attention/tiers.h"
#include "core/common/launch.cuh"
#include "core/common/overlap.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {
namespace {

constexpr int kThreads = 128;

// A block has a row of a head of its sequence at a time. A thread adds up four columns of every
// `slots`-th part; then the threads of slot 0 add up what the slots have.
__global__ void __launch_bounds__(kThreads)
    attention_join_parts_kernel(const __grid_constant__ AttentionParams params,
                                const __grid_constant__ KeyParts parts) {
  __shared__ float4 sums[kThreads];
  __shared__ float totals[kThreads];
  meet_previous_kernel();
  const int batch = blockIdx.x;
  const Sequence s = sequence_of(params, batch);
  const int count = parts.count(s.queries, s.keys);
  if (count == 1) return;
  const int packs = params.value_dim / 4, slots = kThreads / packs;
  const int pack = threadIdx.x % packs, slot = threadIdx.x / packs;
  for (int turn = blockIdx.y; turn < s.queries * params.heads; turn += gridDim.y) {
    const int head = turn % params.heads, row = turn / params.heads;
    const float sink = read_sink<float>(params, s, head, row);
    const int64_t first = parts.row(batch, head, s.key_begin, 0) + row;
    const float* const lse = parts.lse + first;
    const auto* const values =
        reinterpret_cast<const float4*>(parts.values + first * params.value_dim) + pack;
    float most = sink;
    for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize)
      most = fmaxf(most, lse[int64_t{i} * parts.rows]);
    most =
        RowGroup<true>::reduce_over(most, kWarpSize, [](float a, float b) { return fmaxf(a, b); });
    const float base = most == -INFINITY ? 0 : most;  // nothing is seen
    const auto weight_of = [&](float x) { return exp2_fast((x - base) * kLog2E); };
    float4 sum{};
    float total = 0;
#pragma unroll 4
    for (int i = slot < slots ? slot : count; i < count; i += slots) {
      const int64_t at = int64_t{i} * parts.rows;
      const float weight = weight_of(lse[at]);
      const float4 value = values[at * packs];
      total += weight;
      sum.x = fmaf(weight, value.x, sum.x), sum.y = fmaf(weight, value.y, sum.y);
      sum.z = fmaf(weight, value.z, sum.z), sum.w = fmaf(weight, value.w, sum.w);
    }
    sums[threadIdx.x] = sum;
    totals[threadIdx.x] = total;
    __syncthreads();
    if (slot == 0) {
      for (int i = 1; i < slots; ++i) {
        const float4 more = sums[i * packs + pack];
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        total += totals[i * packs + pack];
      }
      total += weight_of(sink);
      const float factor = total == 0 ? 0 : 1 / total;
      with_storage<float>(params.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* const out = row_of<T>(params.out, batch, head, s.query_begin + row) + 4 * pack;
        out[0] = static_cast<T>(sum.x * factor), out[1] = static_cast<T>(sum.y * factor);
        out[2] = static_cast<T>(sum.z * factor), out[3] = static_cast<T>(sum.w * factor);
      });
      if (pack == 0) {
        static_cast<float*>(params.lse)[first_lse(params, s, head) + row] = base + logf(total);
      }
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t attention_join_parts(const AttentionParams& params, const KeyParts& parts,
                                 cudaStream_t stream) {
  if (parts.few < 0) return cudaSuccess;
  // Of packed sequences most may have no parts.
  constexpr int64_t kMostBlocks = 512, kMostRows = 65535;
  const int64_t most = params.packed() ? ceil_div(kMostBlocks, params.batch) : kMostRows;
  const int64_t rows = std::min(int64_t{parts.rows} * params.heads, most);
  const dim3 blocks(static_cast<unsigned>(params.batch), static_cast<unsigned>(rows));
  return launch(attention_join_parts_kernel, blocks, kThreads, {0, 1, /*overlaps_previous=*/true},
                stream, params, parts);
}

}  // namespace fused_norm
