// Which probabilities attention's dropout keeps: a function of (seed, offset, sequence, query head,
// query, key) alone, so that every tier, the backward pass and the CPU make the same mask.
//
// Philox4x32 with 7 rounds, the fewest that pass tests of randomness (Salmon et al., 2011). A draw
// serves eight keys in a row, from a multiple of 8 on: 16 bits each. For host and device.
#pragma once

#include <cstdint>

#include "core/attention/params.h"

namespace fused_norm {

struct PhiloxWords {
  uint32_t word[4];
};

// One instruction. Of a 64-bit product in C++ the compiler makes two: the second adds 0 to the
// upper half.
FUSED_NORM_HOST_DEVICE uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}

FUSED_NORM_HOST_DEVICE PhiloxWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                          uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 7; ++round) {
    const uint64_t first = wide_product(c0, 0xD2511F53u), second = wide_product(c2, 0xCD9E8D57u);
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(first);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Bits come in two halves of a word, as pairs of 16-bit numbers do: the even ones, and the odd
// ones.
FUSED_NORM_HOST_DEVICE constexpr uint32_t bit_of(uint32_t i) { return i / 2 + i % 2 * 16; }

// What a call draws from for one head of one sequence, whose `row` is batch index * heads + head.
struct Dropout {
  uint64_t seed, offset;
  uint32_t row, threshold;

  // Of the eight keys that `key` is among, bit_of(i) is 1 where the probability of the i-th is
  // kept. The threshold is at least 1.
  FUSED_NORM_HOST_DEVICE uint32_t kept(uint32_t query, uint32_t key) const {
    const PhiloxWords drawn =
        philox(key / 8, query, row, static_cast<uint32_t>(offset), static_cast<uint32_t>(seed),
               static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32));
    uint32_t kept = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Both halves of a word at once: max(half, threshold - 1) - (threshold - 1), at most 1, is 1
    // where half >= threshold.
    const uint32_t below = threshold - 1, twice = below << 16 | below;
    const uint32_t less = ((0u - below) & 0xFFFF) * 0x00010001u;
    for (int i = 0; i < 4; ++i) {
      kept += __viaddmin_u16x2(__vmaxu2(drawn.word[i], twice), less, 0x00010001u) << i;
    }
#else
    for (int i = 0; i < 8; ++i) {
      const uint32_t half = drawn.word[i / 2] >> i % 2 * 16 & 0xFFFF;
      kept |= (half >= threshold ? 1u : 0u) << bit_of(i);
    }
#endif
    return kept;
  }
  static FUSED_NORM_HOST_DEVICE bool keeps(uint32_t kept, uint32_t key) {
    return kept >> bit_of(key % 8) & 1;
  }
};

// A probability is dropped where its 16 bits are below this: p is taken to a multiple of 2^-16.
constexpr uint32_t kDropoutDraws = 1 << 16;
inline uint32_t dropout_threshold(double p) {
  const double threshold = p * kDropoutDraws + 0.5;
  return threshold >= kDropoutDraws ? kDropoutDraws - 1 : static_cast<uint32_t>(threshold);
}
// What kept probabilities are multiplied by: their mean stays.
inline double dropout_scale(uint32_t threshold) {
  return static_cast<double>(kDropoutDraws) / (kDropoutDraws - threshold);
}

}  // namespace fused_norm
