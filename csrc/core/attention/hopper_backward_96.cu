#include "core/attention/hopper_backward_launch.cuh"

namespace fused_norm::hopper {

template <typename T, bool kGeneral>
using Queries = QueryForm<T, kGeneral, 96, 128, 2, 2, 2>;
template <typename T, bool kGeneral>
using Keys = KeyValueForm<T, kGeneral, 96, 96, 2, 2>;
FUSED_NORM_BACKWARD(96, Queries, Keys)

}  // namespace fused_norm::hopper
