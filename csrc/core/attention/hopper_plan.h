// Which calls attention's kernels for Hopper (compute capability 9.0) take, and in what form. Where
// the kernels were not compiled, they take none.
#pragma once

#include <cstddef>

#include "core/attention/params.h"

namespace fused_norm {

// How a forward call runs. Everything that a row's bits depend on, dim to general, is a function of
// the call's options alone; the rest is the order of the work.
struct HopperForwardPlan {
  int dim;           // columns of a tile: both head dimensions, rounded up
  int queries;       // rows of a tile of queries
  int keys;          // rows of a tile of keys
  bool general;      // scores need more than a positive scale and a band
  bool in_order;     // tiles take unlike times: longest first, to the next block that is free
  int section;       // (batch, head) pairs whose keys and values share the second-level cache
  bool batch_first;  // pairs of a head follow each other, else those of a sequence
};
HopperForwardPlan hopper_forward_plan(const AttentionParams& params);

// Dense and packed, 16 bit, head dimensions that are multiples of 8 up to 256, without dropout;
// whatever the tensors' alignment (attention_is_aligned()).
bool hopper_takes_forward(const AttentionParams& params, const DeviceProperties& device);

size_t hopper_forward_workspace(const AttentionParams& params);

// The same of a backward call: a kernel for dquery, and one or two for dkey and dvalue.
struct HopperBackwardPlan {
  int dim;
  bool general;
  bool in_order;
  int query_section, key_section;  // (batch, head) pairs, of queries' heads or of keys'
};
HopperBackwardPlan hopper_backward_plan(const AttentionParams& params);

// What the forward pass takes, without masks.
bool hopper_takes_backward(const AttentionParams& params, const DeviceProperties& device);

size_t hopper_backward_workspace(const AttentionParams& params);

}  // namespace fused_norm
