// A place in a ring of slots in shared memory, each with a CopyBarrier (bulk_copy.cuh).
#pragma once

#include <cstdint>

namespace fused_norm {

// A slot, and the parity of the phase that its barrier is in.
struct RingSlot {
  int number = 0;
  uint32_t parity = 0;

  // To the next of `count` slots.
  __device__ __forceinline__ void next(int count) {
    if (++number == count) {
      number = 0;
      parity ^= 1;
    }
  }
};

}  // namespace fused_norm
