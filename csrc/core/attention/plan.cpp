#include "core/attention/plan.h"

#include "core/attention/hopper_plan.h"

namespace fused_norm {

bool attention_is_aligned(const AttentionTensor& tensor, DType dtype) {
  const int pack = 16 / size_of(dtype);
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.batch_stride % pack == 0 &&
         tensor.head_stride % pack == 0 && tensor.row_stride % pack == 0;
}

bool attention_tier_takes(AttentionTier tier, const AttentionParams& params,
                          const DeviceProperties& device) {
  switch (tier) {
    case AttentionTier::kPlain:
      return true;
    case AttentionTier::kPortable:
      return size_of(params.dtype) == 2 && params.head_dim % 8 == 0 && params.value_dim % 8 == 0 &&
             params.head_dim <= kMaxPortableHeadDim && params.value_dim <= kMaxPortableHeadDim;
    case AttentionTier::kHopper:  // forward; of the backward pass what hopper_takes_backward()
      return hopper_takes_forward(params, device);
    default:
      return false;
  }
}

bool attention_scores_are_plain(const AttentionParams& params) {
  return params.scale >= kSmallestPlainScale && params.softcap == 0 &&
         params.mask.data == nullptr && params.alibi_slopes == nullptr && params.dropout_p == 0;
}

AttentionTier attention_tier(const AttentionParams& params, const DeviceProperties& device,
                             AttentionTier wanted) {
  const auto takes = [&](AttentionTier tier) {
    if (!attention_tier_takes(tier, params, device)) return false;
    if (tier == AttentionTier::kPlain) return true;
    for (const AttentionTensor& tensor : {params.query, params.key, params.value, params.out}) {
      if (!attention_is_aligned(tensor, params.dtype)) return false;
    }
    return true;
  };
  if (wanted != AttentionTier::kAuto) return takes(wanted) ? wanted : AttentionTier::kAuto;
  for (AttentionTier tier : {AttentionTier::kHopper, AttentionTier::kPortable}) {
    if (takes(tier)) return tier;
  }
  return AttentionTier::kPlain;
}

}  // namespace fused_norm
