#include "core/attention/hopper_plan.h"

#include <algorithm>

#include "core/attention/plan.h"

namespace fused_norm {
namespace {

// Keys and values of so many bytes stay in the second-level cache (50 MB) while their queries pass.
constexpr int64_t kCachedBytes = 32 << 20;

// Columns of a tile for both head dimensions.
int dim_of(const AttentionParams& params) {
  return kHopperDims[hopper_dim_index(
      std::min(std::max(params.head_dim, params.value_dim), kHopperDims[4]))];
}

// Whether tiles take unlike times.
bool is_uneven(const AttentionParams& params) {
  return params.query_offsets != nullptr || params.window_left >= 0 || params.window_right >= 0;
}

// Heads of `rows` rows of two tensors that the cache holds.
int cached_heads(const AttentionParams& params, int64_t rows) {
  const int64_t bytes = 2 * rows * (params.head_dim + params.value_dim);
  return static_cast<int>(
      std::clamp<int64_t>(kCachedBytes / std::max<int64_t>(bytes, 1), 1, 1 << 20));
}

}  // namespace

HopperForwardPlan hopper_forward_plan(const AttentionParams& params) {
  HopperForwardPlan plan{};
  plan.dim = dim_of(params);
  plan.general = !attention_scores_are_plain(params);
  const HopperForwardTiles& tiles = kHopperForwardTiles[plan.general][hopper_dim_index(plan.dim)];
  plan.queries = 64 * tiles.groups;
  plan.keys = tiles.keys;
  plan.in_order = is_uneven(params);
  const int group = params.heads / params.kv_heads;
  plan.section = (plan.in_order ? cached_heads(params, params.keys) : 1) * group;
  // A head's mask that serves every sequence is read for all of them while it is cached.
  plan.batch_first = params.query_offsets == nullptr && params.batch > 1 &&
                     params.mask.data != nullptr && params.mask.batch_stride == 0 &&
                     params.mask.row_stride != 0;
  if (plan.batch_first) plan.section = std::max(plan.section, params.batch);
  return plan;
}

HopperBackwardPlan hopper_backward_plan(const AttentionParams& params) {
  HopperBackwardPlan plan{dim_of(params), !attention_scores_are_plain(params), is_uneven(params), 0,
                          1};
  const int group = params.heads / params.kv_heads;
  plan.query_section = (plan.in_order ? cached_heads(params, params.keys) : 1) * group;
  if (plan.in_order) plan.key_section = cached_heads(params, int64_t{params.queries} * group);
  return plan;
}

bool hopper_takes_forward(const AttentionParams& params, const DeviceProperties& device) {
#ifdef FUSED_NORM_WITH_HOPPER
  const auto fits = [](int columns) { return columns % 8 == 0 && columns >= 8 && columns <= 256; };
  return device.capability == 90 && size_of(params.dtype) == 2 && fits(params.head_dim) &&
         fits(params.value_dim) && params.dropout_p == 0;
#else
  (void)params, (void)device;
  return false;
#endif
}

bool hopper_takes_backward(const AttentionParams& params, const DeviceProperties& device) {
  const AttentionMask& mask = params.mask;
  return hopper_takes_forward(params, device) &&
         (mask.data == nullptr ||
          (dim_of(params) <= kMaxMaskedBackwardDim && (mask.boolean || size_of(mask.dtype) == 2)));
}

// A ticket for each kernel whose tiles are handed out as blocks come.
size_t hopper_forward_workspace(const AttentionParams& params) {
  return is_uneven(params) ? sizeof(uint32_t) : 0;
}
size_t hopper_backward_workspace(const AttentionParams& params) {
  return is_uneven(params) ? 3 * sizeof(uint32_t) : 0;
}

}  // namespace fused_norm
