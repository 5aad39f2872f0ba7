// Packs: the unit of memory access. A pack is N consecutive elements of a row, up to 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/common/types.h"

namespace fused_norm {

// kBytes (4, 8 or 16; 2 for a single element) as registers hold them.
template <int kBytes>
struct Words {
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  std::conditional_t<kBytes == 2, uint16_t, uint32_t> at[(kBytes + 3) / 4];
};

// N elements of type T, as words: 16-bit elements taken apart would fill a register each.
template <typename T, int N>
struct Pack {
  Words<sizeof(T) * N> words;
};

// A pack in shared memory: one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) AlignedPack {
  Pack<T, N> pack;
};

template <typename T>
constexpr DType kDTypeOf = std::is_same_v<T, __half>          ? DType::kFloat16
                           : std::is_same_v<T, __nv_bfloat16> ? DType::kBFloat16
                           : std::is_same_v<T, float>         ? DType::kFloat32
                                                              : DType::kFloat64;

template <typename A, typename B = A>
constexpr int kPackElements = pack_elements(kDTypeOf<A>, kDTypeOf<B>);

// The type of a row's arithmetic: fp32, or fp64 for fp64 data.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename To, typename From>
__device__ __forceinline__ To bit_copy(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

__device__ __forceinline__ float2 to_floats(uint32_t pair, __half) {
  return __half22float2(bit_copy<__half2>(pair));
}
// A bf16 is the upper half of an fp32: one instruction each.
__device__ __forceinline__ float2 to_floats(uint32_t pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ uint32_t round_pair(float a, float b, __half) {
  return bit_copy<uint32_t>(__floats2half2_rn(a, b));
}
__device__ __forceinline__ uint32_t round_pair(float a, float b, __nv_bfloat16) {
  return bit_copy<uint32_t>(__floats2bfloat162_rn(a, b));
}

template <typename T, int N>
__device__ __forceinline__ void unpack(const Pack<T, N>& pack, Accumulator<T> (&out)[N]) {
  if constexpr (sizeof(T) == 2 && N == 1) {
    out[0] = static_cast<float>(bit_copy<T>(pack.words));
  } else if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 pair = to_floats(pack.words.at[i], T());
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  } else {
    memcpy(out, &pack, sizeof(pack));
  }
}

// Element i alone.
template <typename T, int N>
__device__ __forceinline__ Accumulator<T> element_of(const Pack<T, N>& pack, int i) {
  Accumulator<T> out[N];
  unpack(pack, out);
  return out[i];
}

// Rounds to nearest even.
template <typename T, int N, typename A>
__device__ __forceinline__ void round_to(Pack<T, N>& pack, const A (&in)[N]) {
  if constexpr (sizeof(T) == 2 && N == 1) {
    pack.words = bit_copy<Words<2>>(T(in[0]));
  } else if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      pack.words.at[i] = round_pair(in[2 * i], in[2 * i + 1], T());
    }
  } else {
    static_assert(std::is_same_v<T, A>);
    memcpy(&pack, in, sizeof(pack));
  }
}

// The kBytes bytes that start `shift` (< kBytes) bytes into the concatenation of `low` and `high`.
template <int kBytes>
__device__ __forceinline__ Words<kBytes> shifted_bytes(const Words<kBytes>& low,
                                                       const Words<kBytes>& high, unsigned shift) {
  constexpr int kWords = kBytes / 4;
  uint32_t words[2 * kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = low.at[i];
    words[kWords + i] = high.at[i];
  }
  // Whole words by a binary choice (a register array has no run-time index), the rest by a funnel
  // shift.
#pragma unroll
  for (int step = kWords / 2; step > 0; step /= 2) {
    const bool take = (shift / 4) & step;
#pragma unroll
    for (int i = 0; i + step < 2 * kWords; ++i) words[i] = take ? words[i + step] : words[i];
  }
  Words<kBytes> out;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    out.at[i] = __funnelshift_r(words[i], words[i + 1], (shift % 4) * 8);
  }
  return out;
}

// What one access of kBytes moves.
template <int kBytes>
using Access = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

// One access of kBytes through the read-only path.
template <int kBytes>
__device__ __forceinline__ Words<kBytes> load_words(const void* address) {
  return bit_copy<Words<kBytes>>(__ldg(static_cast<const Access<kBytes>*>(address)));
}

// The same for what is read once, which leaves the first-level cache to the parameters.
template <int kBytes>
__device__ __forceinline__ Words<kBytes> load_streamed(const void* address) {
  Words<kBytes> words;
  if constexpr (kBytes == 16) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3])
                 : "l"(address));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words.at[0]), "=r"(words.at[1])
                 : "l"(address));
  } else if constexpr (kBytes == 2) {
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(words.at[0]) : "l"(address));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(words.at[0]) : "l"(address));
  }
  return words;
}

// Brings what lies there, and near it, to the second-level cache, if `wanted`: without a branch.
__device__ __forceinline__ void prefetch_to_l2(const void* address, bool wanted = true) {
  asm volatile(
      "{ .reg .pred wanted; setp.ne.s32 wanted, %1, 0; @wanted prefetch.global.L2 [%0]; }" ::"l"(
          address),
      "r"(int{wanted}));
}

// The first `count` of N elements, and zeros.
template <typename T, int N>
__device__ __noinline__ Words<sizeof(T) * N> load_elements(const T* from, int count) {
  T elements[N] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) elements[i] = __ldg(from + i);
  }
  return bit_copy<Words<sizeof(T) * N>>(elements);
}

// One access of kBytes to global memory, which the kernel does not read again. As assembly: the
// compiler takes apart stores of structs in some kernels, four accesses in place of one.
template <int kBytes>
__device__ __forceinline__ void store_words(void* address, const Words<kBytes>& words) {
  if constexpr (kBytes == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.at[0]),
                 "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3]));
  } else if constexpr (kBytes == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(words.at[0]),
                 "r"(words.at[1]));
  } else {
    *static_cast<Access<kBytes>*>(address) = words.at[0];
  }
}

// The same for what nobody reads soon.
template <int kBytes>
__device__ __forceinline__ void store_streamed(void* address, const Words<kBytes>& words) {
  __stcs(static_cast<Access<kBytes>*>(address), bit_copy<Access<kBytes>>(words));
}

__device__ __forceinline__ uint32_t shared_address(const void* data) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(data));
}

// Starts a copy of 4, 8 or 16 bytes to shared memory, which only this thread sees unless there is a
// barrier.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
               "n"(kBytes)
               : "memory");
}
// Ends a group of copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until no more than the thread's last `kGroups` groups of copies are under way.
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// The bits of an element, and how memory holds them.
template <typename T>
using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;

// The value of an element.
template <typename T>
__device__ __forceinline__ float value_of(uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  } else {
    return __uint_as_float(sizeof(T) == 2 ? bits << 16 : bits);
  }
}

template <typename T, int N>
__device__ __forceinline__ Bits<T> bits_of(const Pack<T, N>& pack, int i) {
  if constexpr (sizeof(T) == 4) return pack.words.at[i];
  const uint32_t word = pack.words.at[i / 2];
  return static_cast<Bits<T>>(i % 2 == 1 ? word >> 16 : word);
}

// Makes the compiler forget the elements that were unpacked, by an exclusive or with a zero that it
// cannot know: to unpack 16-bit elements once more is cheaper than to keep each in a register of
// its own, which it would do otherwise, up to spilling them. For kernels of two-dimensional blocks.
template <typename T, int N, int kPacks>
__device__ __forceinline__ void forget_elements(Pack<T, N> (&packs)[kPacks]) {
  if constexpr (sizeof(T) == 2) {
    const uint32_t zero = blockDim.z - 1;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) packs[p].words.at[i] ^= zero;
    }
  }
}

// N parameters of type T from column `col` on, a multiple of N, in the accumulator's precision.
// `data` is 16-byte aligned.
template <typename T, int N, typename A>
__device__ __forceinline__ void load_params_of(const void* data, int col, A (&out)[N]) {
  constexpr int kStep = sizeof(T) * N > 16 ? 16 / sizeof(T) : N;
  const char* const from = static_cast<const char*>(data) + static_cast<int64_t>(col) * sizeof(T);
#pragma unroll
  for (int first = 0; first < N; first += kStep) {
    Accumulator<T> part[kStep];
    unpack(Pack<T, kStep>{load_words<sizeof(T) * kStep>(from + first * sizeof(T))}, part);
#pragma unroll
    for (int i = 0; i < kStep; ++i) out[first + i] = static_cast<A>(part[i]);
  }
}

// Calls run(T()) with the type of parameters that come with rows of X: X, fp32, and with fp32 rows
// also 16 bit.
template <typename X, typename Run>
__device__ __forceinline__ void with_param_type(DType dtype, Run run) {
  if (dtype == DType::kFloat32) {
    run(float());
  } else if constexpr (!std::is_same_v<X, float>) {
    run(X());
  } else if (dtype == DType::kBFloat16) {
    run(__nv_bfloat16());
  } else {
    run(__half());
  }
}

}  // namespace fused_norm
