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

FUSED_NORM_HOST_DEVICE uint32_t high_product(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}

FUSED_NORM_HOST_DEVICE PhiloxWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                          uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 7; ++round) {
    const uint32_t high0 = high_product(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = high_product(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// What a call draws from for one head of one sequence, whose `row` is batch index * heads + head.
struct Dropout {
  uint64_t seed, offset;
  uint32_t row, threshold;

  // A bit for each of the eight keys that `key` is among: 1 where the probability is kept.
  FUSED_NORM_HOST_DEVICE uint32_t kept(uint32_t query, uint32_t key) const {
    const PhiloxWords drawn =
        philox(key / 8, query, row, static_cast<uint32_t>(offset), static_cast<uint32_t>(seed),
               static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32));
    uint32_t kept = 0;
    for (int i = 0; i < 8; ++i) {
      kept |= ((drawn.word[i / 2] >> i % 2 * 16 & 0xFFFF) >= threshold ? 1u : 0u) << i;
    }
    return kept;
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
