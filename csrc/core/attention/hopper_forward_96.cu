#include "core/attention/hopper_launch.cuh"

namespace fused_norm::hopper {
namespace {

template <typename T>
using Plain = ForwardForm<T, 96, /*kKeys=*/96, /*kGroups=*/3, /*kStages=*/2, /*kQueryStages=*/2,
                          /*kGeneral=*/false, /*kTurns=*/false>;
template <typename T>
using General = ForwardForm<T, 96, /*kKeys=*/112, /*kGroups=*/2, /*kStages=*/2, /*kQueryStages=*/1,
                            /*kGeneral=*/true, /*kTurns=*/false>;

}  // namespace

template <>
cudaError_t launch_forward<96>(const AttentionParams& params, const HopperForwardPlan& plan,
                               const DeviceProperties& device, uint32_t* ticket,
                               cudaStream_t stream) {
  return launch_forms<Plain, General>(params, plan, device, ticket, stream);
}

}  // namespace fused_norm::hopper
