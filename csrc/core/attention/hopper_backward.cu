#include "core/attention/hopper_backward_launch.cuh"

namespace fused_norm {

cudaError_t launch_attention_backward_hopper(const AttentionGradient& gradient,
                                             const DeviceProperties& device, void* workspace,
                                             cudaStream_t stream) {
  const HopperBackwardPlan plan = hopper_backward_plan(gradient.params.forward);
  auto* tickets = plan.in_order ? static_cast<uint32_t*>(workspace) : nullptr;
  switch (plan.dim) {
    case 64:
      return hopper::launch_backward<64>(gradient, plan, device, tickets, stream);
    case 96:
      return hopper::launch_backward<96>(gradient, plan, device, tickets, stream);
    case 128:
      return hopper::launch_backward<128>(gradient, plan, device, tickets, stream);
    case 192:
      return hopper::launch_backward<192>(gradient, plan, device, tickets, stream);
    default:
      return hopper::launch_backward<256>(gradient, plan, device, tickets, stream);
  }
}

}  // namespace fused_norm
