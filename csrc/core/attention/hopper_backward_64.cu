#include "core/attention/hopper_backward_launch.cuh"

namespace fused_norm::hopper {
namespace {

template <typename T, bool kGeneral>
using Queries = BackwardForm<T, kGeneral, 64, /*kOfKeys=*/false, /*kFirst=*/true, /*kSecond=*/false,
                             /*kOthers=*/128,
                             /*kGroups=*/2, /*kFirstStages=*/2, /*kSecondStages=*/2>;
template <typename T, bool kGeneral>
using Keys = BackwardForm<T, kGeneral, 64, /*kOfKeys=*/true, /*kFirst=*/true, /*kSecond=*/true,
                          /*kOthers=*/kGeneral ? 112 : 128, /*kGroups=*/2, /*kFirstStages=*/2,
                          /*kSecondStages=*/2>;

}  // namespace

template <>
cudaError_t launch_backward<64>(const AttentionGradient& gradient, const HopperBackwardPlan& plan,
                                const DeviceProperties& device, uint32_t* tickets,
                                cudaStream_t stream) {
  return launch_backward_forms<Queries, Keys>(gradient, plan, device, tickets, stream);
}

}  // namespace fused_norm::hopper
