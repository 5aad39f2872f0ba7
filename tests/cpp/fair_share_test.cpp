#include "core/common/fair_share.h"

#include <gtest/gtest.h>

#include "chips.h"
#include "core/norm/plan.h"
#include "core/softmax/plan.h"

namespace fused_norm {
namespace {

// Blocks with that much dynamic shared memory that fit a multiprocessor, with up to a kilobyte of
// static one and what the chip takes for itself.
int blocks_that_fit(int dynamic_bytes, const DeviceProperties& chip) {
  const int capacity = chip.shared_bytes_per_block + kKilobyte;
  const int most = capacity / (dynamic_bytes + kKilobyte);
  const int least = capacity / (dynamic_bytes + 2 * kKilobyte);
  EXPECT_EQ(least, most);
  return least;
}

TEST(FairShare, IsAllThatFits) {
  for (const DeviceProperties& chip : {kH200, kA100}) {
    for (int share = 5; share < 8; ++share) {
      for (int blocks : {(share - 1) * chip.sm_count + 1, share * chip.sm_count}) {
        EXPECT_EQ(blocks_that_fit(fair_shared_bytes(blocks, 9, chip), chip), share);
      }
    }
  }
}

TEST(FairShare, OfFewAndOfManyBlocksIsNotKept) {
  EXPECT_EQ(fair_shared_bytes(4 * 132, 9, kH200), 0);
  EXPECT_GT(fair_shared_bytes(4 * 132 + 1, 9, kH200), 0);
  EXPECT_GT(fair_shared_bytes(7 * 132, 9, kH200), 0);
  EXPECT_EQ(fair_shared_bytes(7 * 132 + 1, 9, kH200), 0);
  EXPECT_EQ(fair_shared_bytes(1 << 30, 9, kH200), 0);
}

TEST(FairShare, IsForKernelsThatOverlap) {
  constexpr DType kType = DType::kFloat16;
  auto forward = [](int64_t rows, int cols, const DeviceProperties& chip) {
    return plan_norm_forward(rows, cols, kType, kType, false, chip).shared_bytes;
  };
  EXPECT_GT(forward(3000, 768, kH200), 0);
  EXPECT_EQ(forward(3000, 768, kA100), 0);
  EXPECT_EQ(forward(100000, 768, kH200), 0);
  EXPECT_EQ(forward(1024, 4096, kH200), 0);  // eight blocks of nine
  auto softmax = [](int64_t rows, int cols, const DeviceProperties& chip) {
    return plan_softmax(SoftmaxTier::kAuto, SoftmaxPass::kForward, rows, cols, kType, kType, chip)
        .shared_bytes;
  };
  EXPECT_GT(softmax(6663, 384, kH200), 0);
  EXPECT_EQ(softmax(6663, 384, kA100), 0);
  EXPECT_EQ(softmax(100000, 384, kH200), 0);
}

}  // namespace
}  // namespace fused_norm
