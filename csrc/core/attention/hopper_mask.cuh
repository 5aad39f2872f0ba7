// Masks in Hopper's kernels: warps of the producer's group copy a tile of the mask into shared
// memory, from where the multiplying warpgroups add it to their scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/attention/hopper_ptx.cuh"
#include "core/attention/hopper_scores.cuh"
#include "core/attention/mma.cuh"

namespace fused_norm::hopper {

constexpr int kOfConsumers = 3;  // a named barrier

__host__ __device__ constexpr int mask_pitch(int keys, int bytes) { return keys * bytes + 16; }

// kNarrow: numbers of 16 bits. kAny: of all kinds.
enum class MaskKind { kAny, kNarrow, kBoolean };

// A tile of kRows queries by kKeys keys of a mask of booleans, or of numbers of T or (where
// kMaxBytes is 4) fp32: as it is in the tensor but for 16 bytes more a row, so that rows lie in
// different banks. The last kCopyWarps of the first warpgroup copy it, to one of kSlots places.
template <typename T, int kRows, int kKeys, int kMaxBytes, int kSlots = 1, int kCopyWarps = 3>
struct MaskTile {
  static constexpr int kWarps = kCopyWarps, kThreads = 32 * kWarps;
  static constexpr int kSlotBytes = kRows * mask_pitch(kKeys, 2);
  static constexpr int kBytes = std::max(kSlots * kSlotBytes, kRows* mask_pitch(kKeys, kMaxBytes));

  static __device__ __forceinline__ uint32_t slots(const AttentionMask& mask) {
    return is_wide(mask) ? 1 : kSlots;
  }

  // Copies a tile to `to`, by the copying threads, each of which arrives at `full` when its part is
  // there. Queries and keys beyond the sequence keep what was there before, which may be anything:
  // no result may come from them.
  static __device__ __forceinline__ void copy(const AttentionMask& mask, char* to,
                                              CopyBarrier& full, int sequence, int head, int query,
                                              int queries, int key, int keys) {
    const int64_t corner = sequence * mask.batch_stride + head * mask.head_stride;
    const bool under_way =
        mask.boolean    ? copy_elements<uint8_t>(mask, to, corner, query, queries, key, keys)
        : is_wide(mask) ? copy_elements<uint32_t>(mask, to, corner, query, queries, key, keys)
                        : copy_elements<uint16_t>(mask, to, corner, query, queries, key, keys);
    __syncwarp();  // copies diverge
    under_way ? arrive_behind_copies(full) : arrive(full);
  }

  // Scores times `factor`, plus the mask. kHides: -inf where that hides the key, whatever the
  // score. A boolean mask has no factor. `row`, `column`: a thread's first place among the scores,
  // whose rows are queries, or keys where kTransposed.
  template <bool kTransposed, bool kHides, MaskKind kKind = MaskKind::kAny, int kCount>
  static __device__ __forceinline__ void add(const AttentionMask& mask, const char* tile, int row,
                                             int column, float factor, float (&scores)[kCount]) {
    const auto add_one = [&](float& score, float added) {
      score = kHides && added <= kHidingMask ? -INFINITY : fmaf(score, factor, added);
    };
    const auto add_as = [&](auto element, auto use) {
      each<decltype(element), kTransposed>(shared_address(tile), row, column, scores, use);
    };
    if (kKind == MaskKind::kBoolean || (kKind == MaskKind::kAny && mask.boolean)) {
      add_as(uint8_t(), [](float& score, uint32_t bits) { score = bits ? score : -INFINITY; });
    } else if (kKind == MaskKind::kAny && is_wide(mask)) {
      if constexpr (kMaxBytes == 4) {
        add_as(uint32_t(),
               [&](float& score, uint32_t bits) { add_one(score, __uint_as_float(bits)); });
      }
    } else if constexpr (kTransposed) {
      each_transposed(shared_address(tile), row, scores,
                      [&](float& score, uint32_t bits) { add_one(score, value_of<T>(bits)); });
    } else {
      add_as(uint16_t(), [&](float& score, uint32_t bits) { add_one(score, value_of<T>(bits)); });
    }
  }

 private:
  static __device__ __forceinline__ bool is_wide(const AttentionMask& mask) {
    return kMaxBytes == 4 && !mask.boolean && mask.dtype == DType::kFloat32;
  }

  // Calls use(score, bits of the mask's element) for all of a thread's scores.
  template <typename Bits, bool kTransposed, int kCount, typename Use>
  static __device__ __forceinline__ void each(uint32_t tile, int row, int column,
                                              float (&scores)[kCount], Use use) {
    constexpr int kSize = sizeof(Bits), kPitch = mask_pitch(kKeys, kSize);
    constexpr int kDown = kTransposed ? kSize : kPitch, kRight = kTransposed ? kPitch : kSize;
    const uint32_t first = tile + row * kDown + column * kRight;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      uint32_t bits[2];
      const uint32_t at = first + i / 2 % 2 * 8 * kDown + i / 4 * 8 * kRight;
      if constexpr (kTransposed) {
        load_shared<kSize>(bits[0], at);
        load_shared<kSize>(bits[1], at + kRight);
      } else {
        load_two_shared<kSize>(bits, at);
      }
      use(scores[i], bits[0]);
      use(scores[i + 1], bits[1]);
      keep_order(i, scores);
    }
  }
  // The same of 16 bits, transposed: four matrices of 8 x 8 at once, of whose rows each lane names
  // one.
  template <int kCount, typename Use>
  static __device__ __forceinline__ void each_transposed(uint32_t tile, int row,
                                                         float (&scores)[kCount], Use use) {
    constexpr int kPitch = mask_pitch(kKeys, 2);
    const int lane = threadIdx.x % 32, key = row - lane / 4 + lane / 8 % 2 * 8;
    const uint32_t first = tile + (lane / 16 * 8 + lane % 8) * kPitch + 2 * key;
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
      uint32_t twos[4];
      mma::load_transposed(twos, first + i / 4 * 8 * kPitch);
#pragma unroll
      for (int j = 0; j < 8; ++j) use(scores[i + j], j % 2 ? twos[j / 2] >> 16 : twos[j / 2]);
      keep_order(i + 6, scores);
    }
  }
  // Keeps the compiler from loading all that follows ahead, which takes registers.
  template <int kCount>
  static __device__ __forceinline__ void keep_order(int i, float (&scores)[kCount]) {
    asm volatile("" : "+f"(scores[i]), "+f"(scores[i + 1]));
    if (i % 8 == 6) __syncwarp();
  }

  // Returns whether the thread's copies are still under way.
  template <typename Bits>
  static __device__ __forceinline__ bool copy_elements(const AttentionMask& mask, char* tile,
                                                       int64_t corner, int query, int queries,
                                                       int key, int keys) {
    // A thread has 16 bytes of every kStep-th row.
    constexpr int kSize = sizeof(Bits), kParts = kKeys * kSize / 16, kStep = kThreads / kParts;
    int thread = threadIdx.x - (128 - kThreads);
    asm volatile("" : "+r"(thread));  // or what follows from it stays in registers
    const int first = thread % kParts * (16 / kSize);
    const int begin = thread / kParts, rows = min(kRows, queries - query);
    const int left = (keys - key - first) * kSize;  // bytes of a row
    if (begin >= kStep || left <= 0) return false;
    const Bits* from =
        static_cast<const Bits*>(mask.data) + corner + (key + first) * mask.key_stride;
    const auto each_row = [&](auto copy_part) {
      char* to = tile + begin * mask_pitch(kKeys, kSize) + first * kSize;
      const Bits* source = from + (query + begin) * mask.row_stride;
#pragma unroll 4
      for (int row = begin; row < rows; row += kStep) {
        copy_part(to, source);
        to += kStep * mask_pitch(kKeys, kSize);
        source += kStep * mask.row_stride;
      }
    };
    const uintptr_t offsets = reinterpret_cast<uintptr_t>(from) | mask.row_stride * kSize;
    const bool whole = left >= 16 || mask.row_stride >= key + first + 16 / kSize;
    if (mask.key_stride == 1 && offsets % 16 == 0 && whole) {
      each_row([&](char* to, const Bits* source) {
        copy_first<16>(shared_address(to), source, min(left, 16));
      });
      return true;
    }
    each_row([&](char* to, const Bits* source) {
      const int end = min(left, 16) / kSize;
#pragma unroll 1
      for (int i = 0; i < end; ++i) reinterpret_cast<Bits*>(to)[i] = source[i * mask.key_stride];
    });
    return false;
  }
};

// A NaN or Inf in a row that the mask hides from every query spoils the sums, as it survives its
// weight of 0. If a sum is one, the tile is done again without the rows that no query of the block
// sees: forward after the next tile, whose copies do not wait for the verdict.
template <int kKeys>
struct MaskVerdict {
  // Two, as the producer's warps may be one behind: a verdict is there, and the last turn, from
  // 1 on, whose sums were spoiled.
  CopyBarrier full[2];
  uint32_t spoiled[2];
  bool seen[kKeys];

  // By one thread.
  __device__ __forceinline__ void init(int consumer_warps) {
    for (CopyBarrier& barrier : full) barrier.init(consumer_warps);
    spoiled[0] = spoiled[1] = 0;
  }
  // Says whether the sums of a consumer's warp are spoiled. Of a thread's two rows only those count
  // that are the sequence's.
  template <int kCount>
  __device__ __forceinline__ void give(const float (&sums)[kCount], bool first, bool second,
                                       uint32_t& turn) {
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i / 2 % 2] = fmaf(sums[i], 0.f, sum[i / 2 % 2]);
    const uint32_t at = turn++ % 2;
    if ((first && sum[0] != 0) || (second && sum[1] != 0)) spoiled[at] = turn;
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(full[at]);
  }
  // What all kThreads consumers together have said.
  template <int kThreads>
  __device__ __forceinline__ bool given(uint32_t turn) const {
    meet_at(kOfConsumers, kThreads);
    return spoiled[(turn - 1) % 2] == turn;
  }
  // By a warp of the producer's. Only the lane that will arrive for the others reads it: no lane
  // may still do so when it is used again.
  __device__ __forceinline__ bool read(uint32_t& turn) {
    const uint32_t at = turn % 2;
    full[at].wait(turn++ / 2 % 2);
    return __shfl_sync(~0u, threadIdx.x % 32 == 0 ? spoiled[at] : 0, 0) == turn;
  }
  // Makes the rows of a tile zero that no consumer sees. sees(i): whether a thread sees that of
  // its element i.
  template <typename Tile, int kThreads, typename Sees>
  __device__ __forceinline__ void clear_unseen(char* tile, Sees sees) {
    for (int i = threadIdx.x - 128; i < kKeys; i += kThreads) seen[i] = false;
    meet_at(kOfConsumers, kThreads);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if (sees(i)) seen[8 * (i / 4) + threadIdx.x % 4 * 2 + i % 2] = true;
    }
    meet_at(kOfConsumers, kThreads);
    clear_rows<Tile>(tile, [&](int key) { return !seen[key]; });
    meet_at(kOfConsumers, kThreads);
  }
};

}  // namespace fused_norm::hopper
