// Launchers: each tier's kernels, and the map of a mask.
#include "core/attention/hopper_work.cuh"
#include "core/attention/plan.h"
#include "core/attention/tiers.h"
#include "core/common/launch.cuh"

namespace fused_norm {
namespace {

constexpr int kThreads = 256;

// Bytes of queries' statistics, padded so that bulk copies may begin behind them.
size_t statistics_bytes(const AttentionParams& params) {
  const size_t bytes = 2 * query_statistics(query_parts(params, kStatisticRows)) * sizeof(float);
  return (bytes * (params.dtype == DType::kFloat64 ? 2 : 1) + 127) / 128 * 128;
}

// Makes a mask's map (MappedMask). A block makes a word of both arrays of kQueriesOfBit queries,
// which its warps share.
__global__ void __launch_bounds__(kThreads)
    attention_mask_map(hopper::MappedMask map, int queries, int keys) {
  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ uint32_t words[2][kWarps];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int word = blockIdx.x % map.words, row = blockIdx.x / map.words;
  const int block = row % map.blocks, of_mask = row / map.blocks;
  const int sequence = of_mask / map.heads, head = of_mask % map.heads;
  const int end = map.row_stride == 0 ? 1 : min(queries, (block + 1) * kQueriesOfBit);
  const int first_key = word * kKeysOfBit * 32 + lane;
  const int64_t corner = sequence * map.batch_stride + head * map.head_stride;
  uint32_t sees = 0, changes = 0;  // bit i: of key first_key + 32 i
  with_mask_reader(map, [&](auto read) {
    for (int query = block * kQueriesOfBit + warp; query < end; query += kWarps) {
      const int64_t row_begin = corner + query * map.row_stride;
      float values[kKeysOfBit];  // all are under way at once: no branch between loads
#pragma unroll
      for (int i = 0; i < kKeysOfBit; ++i) {
        values[i] = read(row_begin + min(first_key + 32 * i, keys - 1) * map.key_stride);
      }
#pragma unroll
      for (int i = 0; i < kKeysOfBit; ++i) {
        sees |= (values[i] != -INFINITY) << i;
        changes |= (values[i] != 0) << i;
      }
    }
  });
  const int left = keys - first_key;  // beyond them nothing is seen
  const uint32_t inside = left <= 0 ? 0 : (2u << min((left - 1) / 32, kKeysOfBit - 1)) - 1;
  sees &= inside;
  changes &= inside;
  uint32_t seen = 0, changed = 0;
#pragma unroll
  for (int i = 0; i < kKeysOfBit; ++i) {
    const uint32_t see = __ballot_sync(~0u, sees >> i & 1);
    const uint32_t change = __ballot_sync(~0u, changes >> i & 1);
    seen |= ((see & 0xFFFF ? 1 : 0) | (see >> 16 ? 2 : 0)) << 2 * i;
    changed |= ((change & 0xFFFF ? 1 : 0) | (change >> 16 ? 2 : 0)) << 2 * i;
  }
  if (lane == 0) words[0][warp] = seen, words[1][warp] = changed;
  __syncthreads();
  if (threadIdx.x >= 2) return;
  uint32_t all = 0;
  for (int i = 0; i < kWarps; ++i) all |= words[threadIdx.x][i];
  map.bits[map.begin(sequence, head) + (2 * block + threadIdx.x) * map.words + word] = all;
}

// Makes the map of a call that has one.
cudaError_t make_mask_map(const AttentionParams& params, bool backward, void* scratch,
                          cudaStream_t stream) {
  if (!attention_maps_mask(params)) return cudaSuccess;
  const MaskMapSize size = mask_map_size(params);
  const int64_t blocks = size.arrays() / 2 * size.words;
  if (blocks == 0 || params.keys == 0) return cudaSuccess;
  return launch(attention_mask_map, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), {}, stream,
                hopper::mapped_mask(params, backward, scratch), params.queries, params.keys);
}

// run(HopperLaunch) for the columns of the call's tiles. Of forward passes, after the scratch
// memory's zeros were set; those of backward passes come with the statistics.
template <int kIndex = 0, typename Run>
cudaError_t with_hopper(const AttentionParams& params, bool backward, void* scratch,
                        cudaStream_t stream, Run run) {
#ifdef FUSED_NORM_WITH_HOPPER
  constexpr int kDim = kHopperDims[kIndex];
  if constexpr (kDim != 256) {
    if (hopper_plan(params).dim != kDim) {
      return with_hopper<kIndex + 1>(params, backward, scratch, stream, run);
    }
  }
  const size_t zeros = backward ? 0 : hopper_scratch(params, backward).zeros;
  cudaError_t error = zeros > 0 ? cudaMemsetAsync(scratch, 0, zeros, stream) : cudaSuccess;
  if (error == cudaSuccess) error = make_mask_map(params, backward, scratch, stream);
  return error == cudaSuccess ? run(HopperLaunch<kDim>()) : error;
#else
  return cudaErrorNotSupported;
#endif
}

}  // namespace

size_t attention_forward_workspace(const AttentionParams& call, AttentionTier tier) {
  const AttentionParams params = with_group_as_queries(call);
  if (tier != AttentionTier::kHopper || attention_is_one_tile(params)) return 0;
  return hopper_scratch(params, /*backward=*/false).all;
}

cudaError_t launch_attention_forward(const AttentionParams& call, const DeviceProperties& device,
                                     AttentionTier tier, void* workspace, cudaStream_t stream) {
  if (attention_rows(call) == 0) return cudaSuccess;
  const AttentionParams params = with_group_as_queries(call);
  if (tier == AttentionTier::kPlain) return attention_forward_plain(params, stream);
  if (attention_is_one_tile(params)) return attention_forward_one_tile(params, stream);
  if (tier == AttentionTier::kHopper && hopper_takes_forward(params, device)) {
    KeyParts parts = key_parts(params);
    char* const sums =
        static_cast<char*>(workspace) + hopper_scratch(params, /*backward=*/false).key_part_sums;
    parts.values = reinterpret_cast<float*>(sums);
    parts.lse = parts.values + parts.all_rows(params.batch) * params.value_dim;
    return with_hopper(params, /*backward=*/false, workspace, stream, [&](auto hopper) {
      const cudaError_t error = hopper.forward(params, parts, device, workspace, stream);
      return error == cudaSuccess ? attention_join_parts(params, parts, stream) : error;
    });
  }
  return attention_forward_portable(params, stream);
}

size_t attention_backward_workspace(const AttentionBackwardParams& params, AttentionTier tier) {
  const size_t sums = mask_sums_bytes(params, mask_share(params));
  if (tier != AttentionTier::kPlain && one_tile_takes_backward(params.forward)) return sums;
  return sums + statistics_bytes(params.forward) +
         (tier == AttentionTier::kHopper ? hopper_scratch(params.forward, /*backward=*/true).all
                                         : 0);
}

cudaError_t launch_attention_backward(const AttentionBackwardParams& params,
                                      const DeviceProperties& device, AttentionTier tier,
                                      void* workspace, cudaStream_t stream) {
  const AttentionParams& forward = params.forward;
  const MaskShare share = mask_share(params);
  char* const statistics = static_cast<char*>(workspace) + mask_sums_bytes(params, share);
  char* const scratch = statistics + statistics_bytes(forward);
  AttentionGradient gradient{params, statistics, query_parts(forward, kStatisticRows)};
  gradient.share = share;
  gradient.mask_sums = static_cast<float*>(workspace);
  if (tier != AttentionTier::kPlain && one_tile_takes_backward(forward)) {
    const cudaError_t error = attention_backward_one_tile(gradient, stream);
    return error == cudaSuccess ? attention_finish_gradients(gradient, stream) : error;
  }
  const bool on_hopper = tier == AttentionTier::kHopper && hopper_takes_backward(forward, device);
  if (on_hopper) {
    gradient.zeros = reinterpret_cast<uint32_t*>(scratch);
    gradient.zero_words = hopper_scratch(forward, /*backward=*/true).zeros / sizeof(uint32_t);
  }
  cudaError_t error = attention_delta_gradient(gradient, stream);
  if (error == cudaSuccess && on_hopper) {
    AttentionBackwardParams& left = gradient.params;
    const bool of_mask = hopper_makes_mask_gradient(left, device);
    error = with_hopper(forward, /*backward=*/true, scratch, stream, [&](auto hopper) {
      cudaError_t made = hopper.backward(gradient, device, scratch, stream);
      if (made == cudaSuccess) made = hopper_query_gradient(gradient, device, scratch, stream);
      if (made != cudaSuccess || !of_mask) return made;
      return hopper_mask_gradient(gradient, device, scratch, stream);
    });
    if (of_mask) left.dmask = nullptr;
    left.dquery.data = left.dkey.data = left.dvalue.data = nullptr;
  }
  if (error != cudaSuccess) return error;
  // The portable tier's kernels also serve what else a call on Hopper needs.
  error = tier == AttentionTier::kPlain ? attention_backward_plain(gradient, stream)
                                        : attention_backward_portable(gradient, stream);
  gradient.params.dmask = params.dmask;
  return error == cudaSuccess ? attention_finish_gradients(gradient, stream) : error;
}

}  // namespace fused_norm
