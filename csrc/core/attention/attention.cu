// Launchers: each tier's kernels, and what lies outside every sequence of a packed tensor.
#include "core/attention/hopper_key_mask.cuh"
#include "core/attention/plan.h"
#include "core/attention/tiers.h"
#include "core/common/launch.cuh"

namespace fused_norm {
namespace {

constexpr int kThreads = 256;

// Zeros the rows of a packed tensor (rows, heads, cols) outside [offsets[0], offsets[sequences]),
// and sets their log-sum-exp (of type `lse_dtype`, null: none) to -inf. A warp a row of a head.
__global__ void __launch_bounds__(kThreads)
    attention_clear_outside(AttentionTensor tensor, int bytes_of_row, int element_bytes, int heads,
                            int rows, const int32_t* offsets, int sequences, void* lse,
                            DType lse_dtype) {
  const int begin = min(max(offsets[0], 0), rows);
  const int end = min(max(offsets[sequences], begin), rows);
  const int64_t outside = int64_t{begin} + rows - end;
  const int warps = gridDim.x * (kThreads / kWarpSize), lane = threadIdx.x % kWarpSize;
  for (int64_t at = blockIdx.x * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
       at < outside * heads; at += warps) {
    const int head = static_cast<int>(at / outside);
    int64_t row = at % outside;
    if (row >= begin) row += end - begin;
    char* data = static_cast<char*>(tensor.data) +
                 (head * tensor.head_stride + row * tensor.row_stride) * element_bytes;
    for (int i = lane * 2; i < bytes_of_row; i += kWarpSize * 2) {
      *reinterpret_cast<uint16_t*>(data + i) = 0;
    }
    if (lse == nullptr || lane != 0) continue;
    const int64_t of_lse = int64_t{head} * rows + row;
    if (lse_dtype == DType::kFloat64) {
      static_cast<double*>(lse)[of_lse] = -INFINITY;
    } else {
      static_cast<float*>(lse)[of_lse] = -INFINITY;
    }
  }
}

cudaError_t clear_outside(const AttentionParams& params, const AttentionTensor& tensor, int heads,
                          int cols, bool of_keys, void* lse, const DeviceProperties& device,
                          cudaStream_t stream) {
  const int32_t* offsets = of_keys ? params.key_offsets : params.query_offsets;
  if (offsets == nullptr || tensor.data == nullptr) return cudaSuccess;
  const int bytes = size_of(params.dtype);
  return detail::launch(attention_clear_outside, dim3(device.sm_count), dim3(kThreads), {}, stream,
                        tensor, cols * bytes, bytes, heads,
                        of_keys ? params.total_keys : params.total_queries, offsets, params.batch,
                        lse, params.dtype);
}

// Bytes of the log-sum-exp.
size_t lse_bytes(const AttentionParams& params) {
  return attention_rows(params) * (params.dtype == DType::kFloat64 ? 8 : 4);
}

// Bytes of delta and the exponents, and what aligns what lies behind them for copies in bulk.
size_t statistics_bytes(const AttentionParams& params) {
  return (2 * lse_bytes(params) + 127) / 128 * 128;
}

// Sets the bits of a mask of keys (KeyMask). A warp makes a word of each array.
__global__ void __launch_bounds__(kThreads)
    attention_key_mask_bits(hopper::KeyMask to, int heads, int keys, int rows) {
  const int index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = index / to.words, word = index % to.words;
  if (row >= rows) return;
  const int sequence = row / heads, head = row % heads;
  uint32_t seen = 0, changed = 0;
#pragma unroll
  for (int i = 0; i < kKeysOfBit; ++i) {
    const int key = (word * kKeysOfBit + i) * 32 + lane;
    const float value = key < keys ? hopper::key_mask_value(to.mask, sequence, head, key) : 0;
    const uint32_t see = __ballot_sync(~0u, key < keys && value != -INFINITY);
    const uint32_t change = __ballot_sync(~0u, value != 0);
    seen |= ((see & 0xFFFF ? 1 : 0) | (see >> 16 ? 2 : 0)) << 2 * i;
    changed |= ((change & 0xFFFF ? 1 : 0) | (change >> 16 ? 2 : 0)) << 2 * i;
  }
  if (lane != 0) return;
  uint32_t* of_row = to.seen(sequence, head, heads);
  of_row[word] = seen;
  of_row[to.words + word] = changed;
}

// Sets them for a call that has such a mask.
cudaError_t set_key_mask_bits(const AttentionParams& params, bool backward, void* scratch,
                              cudaStream_t stream) {
  const hopper::KeyMask mask = hopper::key_mask_of(params, backward, scratch);
  const int64_t rows = key_mask_rows(params), warps = kThreads / kWarpSize;
  if (mask.bits == nullptr || rows == 0) return cudaSuccess;
  const int heads = mask.mask.head_stride == 0 ? 1 : params.heads;
  return detail::launch(attention_key_mask_bits, dim3(ceil_div(rows * mask.words, warps)),
                        dim3(kThreads), {}, stream, mask, heads, params.keys,
                        static_cast<int>(rows));
}

// run(HopperLaunch) for the columns of the call's tiles, after the scratch memory's zeros were set.
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
  const size_t zeros = hopper_scratch(params, backward).zeros;
  cudaError_t error = zeros > 0 ? cudaMemsetAsync(scratch, 0, zeros, stream) : cudaSuccess;
  if (error == cudaSuccess) error = set_key_mask_bits(params, backward, scratch, stream);
  return error == cudaSuccess ? run(HopperLaunch<kDim>()) : error;
#else
  return cudaErrorNotSupported;
#endif
}

}  // namespace

size_t attention_forward_workspace(const AttentionParams& params, AttentionTier tier) {
  return tier == AttentionTier::kHopper ? hopper_scratch(params, /*backward=*/false).all : 0;
}

cudaError_t launch_attention_forward(const AttentionParams& params, const DeviceProperties& device,
                                     AttentionTier tier, void* workspace, cudaStream_t stream) {
  if (attention_rows(params) == 0) return cudaSuccess;
  cudaError_t error;
  if (tier == AttentionTier::kHopper) {
    error = with_hopper(params, /*backward=*/false, workspace, stream, [&](auto hopper) {
      return hopper.forward(params, device, workspace, stream);
    });
  } else if (tier == AttentionTier::kPortable) {
    error = with_dtype<__half, __nv_bfloat16>(params.dtype, [&](auto t) {
      return attention_forward_portable<decltype(t)>(params, stream);
    });
  } else {
    error = attention_forward_plain(params, stream);
  }
  // Last: Hopper's kernels write rows outside every sequence as those that see nothing but the
  // sink.
  if (error != cudaSuccess) return error;
  return clear_outside(params, params.out, params.heads, params.value_dim, /*of_keys=*/false,
                       params.lse, device, stream);
}

size_t attention_backward_workspace(const AttentionBackwardParams& params, AttentionTier tier) {
  return statistics_bytes(params.forward) +
         (tier == AttentionTier::kHopper ? hopper_scratch(params.forward, /*backward=*/true).all
                                         : 0);
}

cudaError_t launch_attention_backward(const AttentionBackwardParams& params,
                                      const DeviceProperties& device, AttentionTier tier,
                                      void* workspace, cudaStream_t stream) {
  const AttentionParams& forward = params.forward;
  char* exponents = static_cast<char*>(workspace) + lse_bytes(forward);
  char* scratch = static_cast<char*>(workspace) + statistics_bytes(forward);
  AttentionGradient gradient{params, workspace, exponents};
  const bool on_hopper = tier == AttentionTier::kHopper && hopper_takes_backward(forward, device);
  if (on_hopper) {
    const HopperScratch layout = hopper_scratch(forward, /*backward=*/true);
    gradient.statistics = reinterpret_cast<float*>(scratch + layout.statistics);
    gradient.of_statistics = layout.of_statistics;
  }
  const auto clear = [&](const AttentionTensor& tensor, int heads, int cols, bool of_keys) {
    return clear_outside(forward, tensor, heads, cols, of_keys, nullptr, device, stream);
  };
  cudaError_t error = clear(params.dquery, forward.heads, forward.head_dim, /*of_keys=*/false);
  if (error == cudaSuccess) error = clear(params.dkey, forward.kv_heads, forward.head_dim, true);
  if (error == cudaSuccess) error = clear(params.dvalue, forward.kv_heads, forward.value_dim, true);
  if (error == cudaSuccess) error = attention_delta_gradient(gradient, stream);
  if (error == cudaSuccess && params.dsink != nullptr) {
    error = attention_sink_gradient(gradient, stream);
  }
  if (error == cudaSuccess && on_hopper) {
    error = with_hopper(forward, /*backward=*/true, scratch, stream, [&](auto hopper) {
      return hopper.backward(gradient, device, scratch, stream);
    });
    // Left is the mask's gradient.
    AttentionBackwardParams& left = gradient.params;
    left.dquery.data = left.dkey.data = left.dvalue.data = nullptr;
  }
  if (error != cudaSuccess) return error;
  if (tier == AttentionTier::kPlain) return attention_backward_plain(gradient, stream);
  // The portable tier's kernels also serve what else a call on Hopper needs.
  return with_dtype<__half, __nv_bfloat16>(forward.dtype, [&](auto t) {
    return attention_backward_portable<decltype(t)>(gradient, stream);
  });
}

}  // namespace fused_norm
