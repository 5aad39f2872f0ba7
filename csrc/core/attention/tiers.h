// What the backward pass keeps in scratch memory, and how the tiers are called. Host and device.
#pragma once

#include <cuda_runtime_api.h>

#include "core/attention/attention.h"
#include "core/attention/plan.h"

namespace fused_norm {

// What each tier's backward pass is given beside the call: of each query two statistics, in the
// type of the log-sum-exp. First all queries' delta = rowsum(dout * out) - dlse; then,
// query_statistics() further, their exponents: the log-sum-exp as an exponent of 2, +inf where
// nothing is seen, so that probabilities are zero.
struct AttentionGradient {
  AttentionBackwardParams params;
  void* statistics;
  QueryParts of_statistics;
  // Words of scratch memory that the kernel of the statistics zeroes, for Hopper's kernels.
  uint32_t* zeros;
  int64_t zero_words;
  // How a mask's gradient is shared, and where the sums of its parts are: one behind the other.
  MaskShare share;
  float* mask_sums;
};

// What every tier needs: delta; and in the end the sink's gradient from it and, if a mask's
// gradient has parts, their sum (plain.cu).
cudaError_t attention_delta_gradient(const AttentionGradient& gradient, cudaStream_t stream);
cudaError_t attention_finish_gradients(const AttentionGradient& gradient, cudaStream_t stream);

cudaError_t attention_forward_plain(const AttentionParams& params, cudaStream_t stream);
cudaError_t attention_backward_plain(const AttentionGradient& gradient, cudaStream_t stream);

cudaError_t attention_forward_portable(const AttentionParams& params, cudaStream_t stream);
cudaError_t attention_backward_portable(const AttentionGradient& gradient, cudaStream_t stream);

// Where attention_is_one_tile() or one_tile_takes_backward(): all gradients.
cudaError_t attention_forward_one_tile(const AttentionParams& params, cudaStream_t stream);
cudaError_t attention_backward_one_tile(const AttentionGradient& gradient, cudaStream_t stream);

// By the columns of a tile; instantiated in hopper_*.cu. The forward pass of calls that
// hopper_takes_forward(), and dquery, dkey and dvalue of those that hopper_takes_backward().
// `scratch`: hopper_scratch(), with its zeros set.
template <int kDim>
struct HopperLaunch {
  static cudaError_t forward(const AttentionParams& params, const KeyParts& parts,
                             const DeviceProperties& device, void* scratch, cudaStream_t stream);
  static cudaError_t backward(const AttentionGradient& gradient, const DeviceProperties& device,
                              void* scratch, cudaStream_t stream);
};

// Joins what the parts of a head's keys gave (key_parts.cu).
cudaError_t attention_join_parts(const AttentionParams& params, const KeyParts& parts,
                                 cudaStream_t stream);

// The mask's gradient, where hopper_makes_mask_gradient().
cudaError_t hopper_mask_gradient(const AttentionGradient& gradient, const DeviceProperties& device,
                                 void* scratch, cudaStream_t stream);

// dquery from the sums of the kernel of all gradients, if that made some.
cudaError_t hopper_query_gradient(const AttentionGradient& gradient, const DeviceProperties& device,
                                  void* scratch, cudaStream_t stream);

}  // namespace fused_norm
