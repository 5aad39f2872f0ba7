// Which kernels a call of attention takes. Pure host functions of the call and the chip.
#pragma once

#include "core/attention/attention.h"
#include "core/common/sizes.h"

namespace fused_norm {

// The plain tier's bound on head dimensions; the portable tier's.
constexpr int kMaxHeadDim = 512, kMaxPortableHeadDim = 256;

// Whether the tensor-core tiers can read a tensor in place: 16 bytes at a time. Callers copy a
// tensor that is not so once; the plain tier reads any.
bool attention_is_aligned(const AttentionTensor& tensor, DType dtype);

// Whether a tier has kernels for the call, whatever the tensors' alignment.
bool attention_tier_takes(AttentionTier tier, const AttentionParams& params,
                          const DeviceProperties& device);

// Whether all that a score needs is its scale, which is positive, and the band of visible keys.
bool attention_scores_are_plain(const AttentionParams& params);

}  // namespace fused_norm
