#include "core/attention/hopper_backward_launch.cuh"

namespace fused_norm::hopper {

template <typename T, bool kGeneral>
using Queries = QueryForm<T, kGeneral, 64, 128, 2, 3, 3>;
template <typename T, bool kGeneral>
using Keys = KeyValueForm<T, kGeneral, 64, kGeneral ? 112 : 128, 2, 3>;
FUSED_NORM_BACKWARD(64, Queries, Keys)

}  // namespace fused_norm::hopper
