#include "core/attention/hopper_launch.cuh"

namespace fused_norm {

cudaError_t launch_attention_forward_hopper(const AttentionParams& params,
                                            const DeviceProperties& device, void* workspace,
                                            cudaStream_t stream) {
  const HopperForwardPlan plan = hopper_forward_plan(params);
  auto* ticket = plan.in_order ? static_cast<uint32_t*>(workspace) : nullptr;
  const bool packed = params.query_offsets != nullptr;
  if (params.heads == 0 || (packed ? params.total_queries : params.queries * params.batch) == 0)
    return cudaSuccess;
  switch (plan.dim) {
    case 64:
      return hopper::launch_forward<64>(params, plan, device, ticket, stream);
    case 96:
      return hopper::launch_forward<96>(params, plan, device, ticket, stream);
    case 128:
      return hopper::launch_forward<128>(params, plan, device, ticket, stream);
    case 192:
      return hopper::launch_forward<192>(params, plan, device, ticket, stream);
    default:
      return hopper::launch_forward<256>(params, plan, device, ticket, stream);
  }
}

}  // namespace fused_norm
