// Which probabilities attention's dropout keeps: a function of (seed, offset, sequence, query head,
// query, key) alone, so that every tier, the backward pass and the CPU make the same mask.
//
// Philox4x32-10 (Salmon et al., 2011): a draw serves four keys in a row, j to j + 3 with j a
// multiple of 4. Plain C++, for host and device.
#pragma once

#include <cstdint>

#include "core/attention/params.h"

namespace fused_norm {

struct DropoutDraw {
  uint32_t of_key[4];
};

FUSED_NORM_HOST_DEVICE uint32_t high_product(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}

// `row` is batch index * heads + head.
FUSED_NORM_HOST_DEVICE DropoutDraw draw_dropout(uint64_t seed, uint64_t offset, uint32_t row,
                                                uint32_t query, uint32_t key) {
  uint32_t c0 = key / 4, c1 = query, c2 = row, c3 = static_cast<uint32_t>(offset);
  uint32_t k0 = static_cast<uint32_t>(seed);
  uint32_t k1 = static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32);
  for (int round = 0; round < 10; ++round) {
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

// A probability is dropped where its draw is below this.
FUSED_NORM_HOST_DEVICE uint32_t dropout_threshold(float p) {
  const double threshold = static_cast<double>(p) * 4294967296.0;
  return threshold >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(threshold);
}

}  // namespace fused_norm
