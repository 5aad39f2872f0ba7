#include "core/attention/hopper_launch.cuh"

namespace fused_norm::hopper {

template <>
cudaError_t launch_forward<256>(const AttentionParams& params, const HopperForwardPlan& plan,
                                const DeviceProperties& device, uint32_t* ticket,
                                cudaStream_t stream) {
  return launch_forms<256, /*kKeys=*/80, /*kGroups=*/2, /*kGeneralGroups=*/2, /*kStages=*/2,
                      /*kTurns=*/false>(params, plan, device, ticket, stream);
}

}  // namespace fused_norm::hopper
