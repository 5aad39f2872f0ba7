// Which probabilities dropout keeps.
#include <gtest/gtest.h>

#include "core/attention/dropout.h"

namespace fused_norm {
namespace {

void expect_words(const PhiloxWords& drawn, const PhiloxWords& expected) {
  for (int i = 0; i < 4; ++i) EXPECT_EQ(drawn.word[i], expected.word[i]) << "word " << i;
}

// Known answers of Random123 (Salmon et al., 2011) for Philox4x32 with 7 rounds.
TEST(AttentionDropout, PhiloxGivesKnownAnswers) {
  expect_words(philox(0, 0, 0, 0, 0, 0), {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}});
  expect_words(philox(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0),
               {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}});
}

TEST(AttentionDropout, TakesHalvesOfAWordInTheOrderOfKeys) {
  constexpr uint64_t kSeed = 5, kOffset = uint64_t{3} << 32 | 4;
  const PhiloxWords drawn = philox(2, 7, 6, 4, 5, 3);
  for (int i = 0; i < 8; ++i) {
    const uint32_t half = i % 2 == 0 ? drawn.word[i / 2] & 0xFFFF : drawn.word[i / 2] >> 16;
    for (uint32_t key = 16; key < 24; ++key) {
      const Dropout keeps{kSeed, kOffset, 6, half}, drops{kSeed, kOffset, 6, half + 1};
      EXPECT_TRUE(Dropout::keeps(keeps.kept(7, key), i));
      EXPECT_FALSE(Dropout::keeps(drops.kept(7, key), i));
    }
  }
}

TEST(AttentionDropout, ComparesWithAnyThreshold) {
  for (uint32_t threshold : {1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFEu, 0xFFFFu}) {
    for (uint32_t query = 0; query < 5000; ++query) {
      const PhiloxWords drawn = philox(0, query, 1, 2, 3, 0);
      const uint32_t kept = Dropout{3, 2, 1, threshold}.kept(query, 0);
      EXPECT_EQ(kept & ~0x000F000Fu, 0u);
      for (uint32_t key = 0; key < 8; ++key) {
        const uint32_t half = drawn.word[key / 2] >> key % 2 * 16 & 0xFFFF;
        EXPECT_EQ(Dropout::keeps(kept, key), half >= threshold) << half << " and " << threshold;
      }
    }
  }
}

TEST(AttentionDropout, KeepsTheMean) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_scale(0), 1);
  EXPECT_EQ(dropout_threshold(0.25), kDropoutDraws / 4);
  EXPECT_EQ(dropout_scale(kDropoutDraws / 4), 4. / 3);
  EXPECT_EQ(dropout_threshold(0.9999999), kDropoutDraws - 1);  // never all
  for (double p : {1e-6, 0.1, 0.5, 0.99}) {
    const uint32_t threshold = dropout_threshold(p);
    EXPECT_NEAR(threshold, p * kDropoutDraws, 0.5);
    EXPECT_NEAR((1 - threshold / 65536.) * dropout_scale(threshold), 1, 1e-15);
  }
}

}  // namespace
}  // namespace fused_norm
