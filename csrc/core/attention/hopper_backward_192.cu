#include "core/attention/hopper_backward_launch.cuh"

namespace fused_norm::hopper {

template <typename T, bool kGeneral>
using Queries = QueryForm<T, kGeneral, 192, 64, 1, 2, 2>;
template <typename T, bool kGeneral>
using Keys = KeyForm<T, kGeneral, 192, 64, 1, 2, 2>;
template <typename T, bool kGeneral>
using Values = ValueForm<T, kGeneral, 192, 96, 1, 2>;
FUSED_NORM_BACKWARD(192, Queries, Keys, Values)

}  // namespace fused_norm::hopper
