// Branches at the top of kernels that hold the code of several forms: what is known at run time
// becomes known at compile time.
#pragma once

#include <type_traits>

namespace fused_norm {

// Calls run(flag), and returns what that does.
template <typename Run>
__device__ __forceinline__ auto with_flag(bool flag, Run run) {
  if (flag) return run(std::true_type());
  return run(std::false_type());
}
// The same for what is known already.
template <bool kFlag, typename Run>
__device__ __forceinline__ auto with_flag(std::bool_constant<kFlag> flag, Run run) {
  return run(flag);
}

// Calls run(number), which is one from kFirst to before kEnd.
template <int kFirst, int kEnd, typename Run>
__device__ __forceinline__ void with_number(int number, Run run) {
  if constexpr (kFirst + 1 < kEnd) {
    if (number != kFirst) return with_number<kFirst + 1, kEnd>(number, run);
  }
  run(std::integral_constant<int, kFirst>());
}

}  // namespace fused_norm
