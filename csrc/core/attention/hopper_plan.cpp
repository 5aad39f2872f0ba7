#include "core/attention/hopper_plan.h"

#include <algorithm>

#include "core/attention/plan.h"

namespace fused_norm {
namespace {

// Keys and values of so many bytes stay in the second-level cache (50 MB) while their queries pass.
constexpr int64_t kCachedBytes = 32 << 20;

}  // namespace

HopperForwardPlan hopper_forward_plan(const AttentionParams& params) {
  HopperForwardPlan plan{};
  plan.dim = 256;
  const int columns = std::max(params.head_dim, params.value_dim);
  for (int dim : {192, 128, 96, 64}) {
    if (columns <= dim) plan.dim = dim;
  }
  plan.general = !attention_scores_are_plain(params);
  // Tiles of the forms in hopper_forward_*.cu: as large as registers and shared memory allow. Three
  // warpgroups (192 queries) where two exponentiate too slowly for the tensor cores.
  plan.queries = plan.dim <= 96 && !plan.general ? 192 : 128;
  plan.keys = plan.dim == 64    ? 128
              : plan.dim == 96  ? (plan.general ? 112 : 96)
              : plan.dim == 128 ? (plan.general ? 112 : 128)
              : plan.dim == 192 ? (plan.general ? 80 : 112)
                                : (plan.general ? 64 : 80);

  const bool packed = params.query_offsets != nullptr;
  const bool band = params.window_left >= 0 || params.window_right >= 0;
  plan.in_order = packed || band;
  const int group = params.heads / params.kv_heads;
  const int64_t bytes_of_head = int64_t{2} * params.keys * (params.head_dim + params.value_dim);
  const int64_t heads = kCachedBytes / std::max<int64_t>(bytes_of_head, 1);
  plan.section =
      static_cast<int>(plan.in_order ? std::clamp<int64_t>(heads, 1, 1 << 20) * group : group);
  // A head's mask that serves every sequence is read for all of them while it is cached.
  plan.batch_first = !packed && params.batch > 1 && params.mask.data != nullptr &&
                     params.mask.batch_stride == 0 && params.mask.row_stride != 0;
  if (plan.batch_first) plan.section = std::max(plan.section, params.batch);
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

size_t hopper_forward_workspace(const AttentionParams& params) {
  return hopper_forward_plan(params).in_order ? sizeof(uint32_t) : 0;
}

}  // namespace fused_norm
