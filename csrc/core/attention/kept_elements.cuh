// What dropout keeps of a tile of scores in a warp's accumulators (dropout.h).
#pragma once

#include "core/attention/dropout.h"
#include "core/common/types.h"

namespace fused_norm {

// Of a thread's kCount elements, of which element i is 8 (i / 2 % 2) rows and 8 (i / 4) + i % 2
// columns behind the first. Rows are queries and columns keys; kOfKeys: the reverse.
//
// A draw serves eight keys of a query: two each of four lanes, or one each of eight lanes
// (kOfKeys). So of every sixteen columns a lane makes one draw for all that share it, and they
// exchange. kUnroll: how many draws are made at once; more need more registers.
template <bool kOfKeys, int kCount, int kUnroll = 4>
class KeptElements {
  static_assert(kCount % 8 == 0);
  static constexpr int kDraws = kCount / 8, kWords = (kDraws + 3) / 4;

 public:
  // `row`, `column`: of the thread's first element.
  __device__ __forceinline__ void draw(const Dropout& dropout, int row, int column) {
    constexpr int kShare = kOfKeys ? 8 : 4, kApart = kOfKeys ? 4 : 1;  // lanes
    const int lane = threadIdx.x % kWarpSize, turn = lane / kApart % kShare;
    column += turn / (kShare / 2) * 8;
    (kOfKeys ? column : row) += kOfKeys ? turn % 2 : turn % 2 * 8;
    if (kOfKeys) row += turn / 2 % 2 * 8;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32_t drawn = 0;
#pragma unroll kUnroll
      for (int i = 4 * word; i < min(4 * word + 4, kDraws); ++i) {
        const int other = column + 16 * i;
        drawn |= dropout.kept(kOfKeys ? other : row, kOfKeys ? row : other) << i % 4 * 4;
      }
      words_[word] = 0;
#pragma unroll
      for (int from = 0; from < kShare; ++from) {
        const uint32_t of_lane = __shfl_sync(~0u, drawn, lane + (from - turn) * kApart);
        // Of each draw the lane's key, or its two.
        words_[word] |= kOfKeys ? (of_lane >> bit_of(lane / 4) & 0x1111) << bit_of(from)
                                : (of_lane >> lane % 4 & 0x11111111) << from;
      }
    }
  }
  // Has it drawn now. The compiler would draw when an element is looked at, as nothing orders the
  // two: so here is something that seldom happens, unless p is near 1, and needs the words.
  __device__ __forceinline__ void hold() const {
    uint32_t any = 0;
    for (uint32_t word : words_) any |= word;
    if (any == 0) asm volatile("nanosleep.u32 1;" ::: "memory");
  }
  __device__ __forceinline__ bool keeps(int i) const {
    return words_[i / 32] >> bit_of(i % 32) & 1;
  }
  // Multiplies elements by `scale`, or 0.
  __device__ __forceinline__ void apply(float (&elements)[kCount], float scale) {
    // Or the compiler keeps what it finds of each element until there is a second look.
    for (uint32_t& word : words_) asm volatile("" : "+r"(word));
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements[i] = (keeps(i) ? elements[i] : 0) * scale;
  }
  // Makes zeros of those that are dropped, of pairs of 16 bits.
  template <int kPairs>
  __device__ __forceinline__ void drop(uint32_t (&pairs)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = of_pair(pairs[i], i);
  }
  __device__ __forceinline__ uint32_t of_pair(uint32_t pair, int i) const {
    uint32_t mask;  // the highest bit of each half, in all its bits
    asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(mask) : "r"(words_[i / 16] << (15 - i % 16)));
    return pair & mask;
  }

 private:
  uint32_t words_[kWords];  // of 32 elements each: bit_of(i) is element i's
};

}  // namespace fused_norm
