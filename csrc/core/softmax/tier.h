// Where a softmax keeps its row. Plain C++.
#pragma once

#include <cstdint>

#include "core/common/types.h"

namespace fused_norm {

enum class SoftmaxTier : uint8_t {
  kAuto,      // the plan chooses
  kWarp,      // in the registers of a warp, or of 1 to 16 lanes of one
  kBlock,     // in the registers or shared memory of a block, or of a thread-block cluster
  kUncached,  // nowhere: any length, read twice
};

// What is computed: softmax or log_softmax of rows as they are, softmax of scaled or masked ones,
// and the gradients.
enum class SoftmaxPass : uint8_t { kForward, kMaskedForward, kBackward, kLogBackward };
constexpr bool is_backward(SoftmaxPass pass) { return pass >= SoftmaxPass::kBackward; }

// Whether rows of this length can be run in `tier` on this chip. fp64 has kUncached alone.
bool softmax_tier_holds(SoftmaxTier tier, SoftmaxPass pass, int cols, DType x, DType y,
                        const DeviceProperties& device);

}  // namespace fused_norm
