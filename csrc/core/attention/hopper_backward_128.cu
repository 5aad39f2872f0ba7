#include "core/attention/hopper_backward_launch.cuh"

namespace fused_norm::hopper {

template <typename T, bool kGeneral>
using Queries = QueryForm<T, kGeneral, 128, 128, 1, 2, 2>;
template <typename T, bool kGeneral>
using Keys = KeyValueForm<T, kGeneral, 128, 64, 2, 3>;
FUSED_NORM_BACKWARD(128, Queries, Keys)

}  // namespace fused_norm::hopper
