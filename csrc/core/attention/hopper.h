// Attention's kernels for Hopper (compute capability 9.0): which calls they take, and in what form.
// Where they were not compiled, hopper_takes_forward() is false.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/attention/attention.h"

namespace fused_norm {

// How a forward call runs. Everything that a row's bits depend on, dim to general, is a function of
// the call's options alone; the rest is the order of the work.
struct HopperForwardPlan {
  int dim;        // columns of a tile: both head dimensions, rounded up
  int queries;    // rows of a tile of queries
  int keys;       // rows of a tile of keys
  bool general;   // scores need more than a positive scale and a band
  bool in_order;  // tiles take unlike times: longest first, to the next block that is free
  int section;    // (batch, head) pairs whose keys and values share the second-level cache
};
HopperForwardPlan hopper_forward_plan(const AttentionParams& params);

// Dense and packed, 16 bit, head dimensions that are multiples of 8 up to 256, without dropout.
// Tensors begin at multiples of 16 bytes, and their strides are multiples of 8 elements.
bool hopper_takes_forward(const AttentionParams& params, const DeviceProperties& device);

size_t hopper_forward_workspace(const AttentionParams& params);
#ifdef FUSED_NORM_WITH_HOPPER
cudaError_t launch_attention_forward_hopper(const AttentionParams& params,
                                            const DeviceProperties& device, void* workspace,
                                            cudaStream_t stream);
#else
inline cudaError_t launch_attention_forward_hopper(const AttentionParams&, const DeviceProperties&,
                                                   void*, cudaStream_t) {
  return cudaErrorNotSupported;
}
#endif

}  // namespace fused_norm
