// Which probabilities attention's dropout keeps: a function of (seed, offset, sequence, query head,
// query, key) alone, so that every tier, the backward pass and the CPU make the same mask.
//
// Philox4x32-10 (Salmon et al., 2011): a draw serves four keys in a row, j to j + 3 with j a
// multiple of 4. Plain C++, for host and device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FUSED_NORM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FUSED_NORM_HOST_DEVICE inline
#endif

namespace fused_norm {

// Of one query head of one sequence.
struct Dropout {
  uint64_t seed, offset;
  uint32_t row;        // batch index * heads + head
  uint32_t threshold;  // a probability is dropped where its draw is below

  FUSED_NORM_HOST_DEVICE Dropout(uint64_t seed, uint64_t offset, uint32_t row, float p)
      : seed(seed),
        offset(offset),
        row(row),
        threshold(p < 1 ? static_cast<uint32_t>(p * 4294967296.0f) : 4294967295u) {}

  // Four bits, of the key's multiple of 4 and the next three: 1 where the probability is kept.
  FUSED_NORM_HOST_DEVICE uint32_t kept(uint32_t query, uint32_t key) const {
    uint32_t c[4] = {key / 4, query, row, static_cast<uint32_t>(offset)};
    uint32_t k0 = static_cast<uint32_t>(seed);
    uint32_t k1 = static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * c[0];
      const uint64_t product1 = uint64_t{0xCD9E8D57u} * c[2];
      c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ k0;
      c[1] = static_cast<uint32_t>(product1);
      c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ k1;
      c[3] = static_cast<uint32_t>(product0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    uint32_t kept = 0;
    for (int i = 0; i < 4; ++i) kept |= (c[i] < threshold ? 0u : 1u) << i;
    return kept;
  }
};

}  // namespace fused_norm
