// Which columns' normalized input can be had back from the output (memory_efficient), as
// xhat = (y - bias) / g: those where g is a normal number of y's dtype and u |bias / g| <= 2^-6,
// with u the unit roundoff of y's dtype. docs/memory_efficient.md derives the error of such an
// xhat.
//
// An output of 32 or 64 bits gives it nearly as exactly as the input does while |bias / g| <= 2^12:
// such columns are precise. Those that are not are listed too where there is room.
#pragma once

#include <limits>

#include "core/common/types.h"

namespace fused_norm {

// A column meets the limits when |g| lies in [smallest, largest] and |bias| * ratio <= |g|. ratio
// is a power of two, so that the comparison is exact in any precision.
template <typename A>
struct RecoverableLimits {
  A smallest, largest, ratio;
};

template <typename A>
constexpr RecoverableLimits<A> recoverable_limits(DType y) {
  switch (y) {
    case DType::kFloat16:
      return {A(0x1p-14), A(65504), A(0x1p-5)};
    case DType::kBFloat16:
      return {A(0x1p-126), A(0x1.fep127), A(0x1p-2)};
    case DType::kFloat32:
      return {A(0x1p-126), A(0x1.fffffep127), A(0x1p-18)};
    default:
      return {std::numeric_limits<A>::min(), std::numeric_limits<A>::max(), A(0x1p-47)};
  }
}

// Of precise columns.
template <typename A>
constexpr RecoverableLimits<A> precise_limits(DType y) {
  RecoverableLimits<A> limits = recoverable_limits<A>(y);
  if (limits.ratio < A(0x1p-12)) limits.ratio = A(0x1p-12);
  return limits;
}

// False for NaN too.
template <typename A>
constexpr bool meets(const RecoverableLimits<A>& limits, A g, A bias) {
  const A size = g < 0 ? -g : g, shift = bias < 0 ? -bias : bias;
  return size >= limits.smallest && size <= limits.largest && shift * limits.ratio <= size;
}

}  // namespace fused_norm
