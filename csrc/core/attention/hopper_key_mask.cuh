// Masks of keys alone, as of padding, on Hopper: tiles whose keys are all hidden are left out, and
// only tiles of which a score changes are masked. A kernel before notes which tiles these are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "core/attention/plan.h"
#include "core/common/sizes.h"

namespace fused_norm::hopper {

// What a mask of keys adds to the score of one; -inf where it hides it.
__device__ __forceinline__ float key_mask_value(const AttentionMask& mask, int sequence, int head,
                                                int key) {
  const int64_t at = sequence * mask.batch_stride + head * mask.head_stride + key * mask.key_stride;
  if (mask.boolean) return static_cast<const bool*>(mask.data)[at] ? 0.f : -INFINITY;
  float value;
  if (mask.dtype == DType::kFloat32) {
    value = static_cast<const float*>(mask.data)[at];
  } else if (mask.dtype == DType::kFloat16) {
    value = __half2float(static_cast<const __half*>(mask.data)[at]);
  } else {
    value = __bfloat162float(static_cast<const __nv_bfloat16*>(mask.data)[at]);
  }
  return value <= kHidingMask ? -INFINITY : value;
}

// A mask of keys. For every kKeysOfBit of them a bit says whether one is seen, and one of another
// array whether one changes a score. Null bits: there is no mask.
struct KeyMask {
  AttentionMask mask;
  uint32_t* bits;
  int32_t words;  // of an array (key_mask_words)

  __device__ __forceinline__ uint32_t* seen(int sequence, int head, int heads) const {
    const int64_t row = mask.head_stride == 0 ? sequence : int64_t{sequence} * heads + head;
    return bits + row * 2 * words;
  }
  // Whether a bit of kKeys keys, from `first` on, is set.
  template <int kKeys>
  static __device__ __forceinline__ bool any(const uint32_t* array, int first) {
    static_assert(kKeys % kKeysOfBit == 0 && kKeys / kKeysOfBit < 32);
    const int bit = first / kKeysOfBit;
    return __funnelshift_r(array[bit / 32], array[bit / 32 + 1], bit % 32) &
           ((1u << kKeys / kKeysOfBit) - 1);
  }
};

// A call's mask of keys, whose bits lie in its scratch memory; none where there is no such mask.
inline KeyMask key_mask_of(const AttentionParams& params, bool backward, void* scratch) {
  if (!attention_masks_keys(params)) return {};
  char* bits = static_cast<char*>(scratch) + hopper_scratch(params, backward).key_bits;
  return {params.mask, reinterpret_cast<uint32_t*>(bits),
          static_cast<int32_t>(key_mask_words(params.keys))};
}

}  // namespace fused_norm::hopper
