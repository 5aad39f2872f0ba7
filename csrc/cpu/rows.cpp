#include "cpu/rows.h"

#include <ATen/Dispatch.h>

#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace fused_norm::cpu {
namespace {

template <typename T, typename Acc>
FUSED_NORM_SIMD void convert(const T* from, Acc* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}

template <typename T, typename Acc>
FUSED_NORM_SIMD void round_to_16_bit(const Acc* from, T* to, int64_t n) {
  // A store to T itself calls its constructor, and gcc then gives up vectorising.
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i].x = T(static_cast<float>(from[i])).x;
}

#if defined(__x86_64__) && defined(__GNUC__)

// Compilers convert fp16 by integer arithmetic, at a fifth of the speed of these instructions,
// which nearly every x86-64 has.
bool has_f16c() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return has;
}

__attribute__((target("avx2,f16c"))) int64_t convert_eights(const at::Half* from, float* to,
                                                            int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  return i;
}

__attribute__((target("avx2,f16c"))) int64_t round_eights(const float* from, at::Half* to,
                                                          int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  return i;
}

#endif

}  // namespace

template <typename Acc>
void widen(at::ScalarType dtype, const void* from, Acc* to, int64_t n) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "fused_norm", [&] {
    const auto* values = static_cast<const scalar_t*>(from);
    int64_t done = 0;
#if defined(__x86_64__) && defined(__GNUC__)
    if constexpr (std::is_same_v<scalar_t, at::Half> && std::is_same_v<Acc, float>) {
      if (has_f16c()) done = convert_eights(values, to, n);
    }
#endif
    convert(values + done, to + done, n - done);
  });
}

template <typename Acc>
void narrow(at::ScalarType dtype, const Acc* from, void* to, int64_t n) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "fused_norm", [&] {
    if constexpr (std::is_floating_point_v<scalar_t>) {
      convert(from, static_cast<scalar_t*>(to), n);
    } else {
      auto* values = static_cast<scalar_t*>(to);
      int64_t done = 0;
#if defined(__x86_64__) && defined(__GNUC__)
      if constexpr (std::is_same_v<scalar_t, at::Half> && std::is_same_v<Acc, float>) {
        if (has_f16c()) done = round_eights(from, values, n);
      }
#endif
      round_to_16_bit(from + done, values + done, n - done);
    }
  });
}

template void widen<float>(at::ScalarType, const void*, float*, int64_t);
template void widen<double>(at::ScalarType, const void*, double*, int64_t);
template void narrow<float>(at::ScalarType, const float*, void*, int64_t);
template void narrow<double>(at::ScalarType, const double*, void*, int64_t);

}  // namespace fused_norm::cpu
