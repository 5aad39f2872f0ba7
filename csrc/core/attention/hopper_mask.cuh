// Masks in Hopper's kernels: three warps copy a tile of the mask into shared memory, from where the
// multiplying warpgroups add it to their scores.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/attention/hopper_ptx.cuh"
#include "core/attention/hopper_rows.cuh"

namespace fused_norm::hopper {

constexpr int kMaskWarps = 3, kMaskThreads = 32 * kMaskWarps;  // behind the producer's first warp
// Named barriers: of the copying threads and the consumers; of the consumers.
constexpr int kMaskIsRead = 8, kOfConsumers = 3;

__host__ __device__ constexpr int mask_pitch(int keys, int bytes) { return keys * bytes + 16; }

// Before the copying threads fill a tile: until the one before is read.
template <int kConsumers>
__device__ __forceinline__ void wait_for_readers(bool& has_copied) {
  __syncwarp();  // copies diverge
  if (has_copied) named_sync(kMaskIsRead, kConsumers + kMaskThreads);
  has_copied = true;
}

// A tile of kRows queries by kKeys keys of a mask of at most kMaxBytes an element: as it is in the
// tensor but for 16 bytes more a row, so that rows lie in different banks.
template <int kRows, int kKeys, int kMaxBytes>
struct MaskTile {
  static constexpr int kBytes = kRows * mask_pitch(kKeys, kMaxBytes);

  // Starts a copy to `to`, by the copying threads. Rows beyond the sequence are its last one, keys
  // beyond it zeros.
  static __device__ __forceinline__ void start_copy(const AttentionMask& mask, char* to,
                                                    int sequence, int head, int query, int queries,
                                                    int key, int keys) {
    const auto copy_as = [&](auto element) {
      copy_elements<decltype(element)>(mask, to,
                                       sequence * mask.batch_stride + head * mask.head_stride,
                                       query, queries, key, keys);
    };
    if (mask.boolean) {
      copy_as(uint8_t());
    } else if (kMaxBytes == 4 && mask.dtype == DType::kFloat32) {
      copy_as(uint32_t());
    } else {
      copy_as(uint16_t());
    }
    detail::commit_copies();
  }
  static __device__ __forceinline__ void end_copy(CopyBarrier& full) {
    detail::wait_for_copies<0>();
    __syncwarp();  // copies diverge
    arrive(full);
  }

  // Scores times `factor`, plus the mask; -inf where that is, whatever the score. `row`, `column`:
  // a thread's first place among the scores, whose rows are queries, or keys where kTransposed.
  template <typename T, bool kTransposed, int kCount>
  static __device__ __forceinline__ void add(const AttentionMask& mask, const char* tile, int row,
                                             int column, float factor, float (&scores)[kCount]) {
    const auto add_as = [&](auto element, auto value) {
      add_elements<decltype(element), kTransposed>(mask.row_stride != 0, shared_address(tile), row,
                                                   column, factor, scores, value);
    };
    if (mask.boolean) {
      add_as(uint8_t(), [](uint32_t bits) { return bits ? 0.f : -INFINITY; });
    } else if (kMaxBytes == 4 && mask.dtype == DType::kFloat32) {
      if constexpr (kMaxBytes == 4)
        add_as(uint32_t(), [](uint32_t bits) { return __uint_as_float(bits); });
    } else {
      add_as(uint16_t(), [](uint32_t bits) { return value_of<T>(bits); });
    }
  }

 private:
  template <typename Bits>
  static __device__ __forceinline__ void copy_elements(const AttentionMask& mask, char* tile,
                                                       int64_t corner, int query, int queries,
                                                       int key, int keys) {
    // A thread has 16 bytes of every kStep-th row.
    constexpr int kSize = sizeof(Bits), kParts = kKeys * kSize / 16, kStep = kMaskThreads / kParts;
    const int thread = threadIdx.x - 32, first = thread % kParts * (16 / kSize);
    const int left = (keys - key - first) * kSize;  // bytes of a row
    const Bits* from =
        static_cast<const Bits*>(mask.data) + corner + (key + first) * mask.key_stride;
    const auto each_row = [&](auto copy_part) {
      const int rows = thread < kStep * kParts ? (mask.row_stride == 0 ? 1 : kRows) : 0;
#pragma unroll 1  // registers are few
      for (int row = thread / kParts; row < rows; row += kStep) {
        copy_part(tile + row * mask_pitch(kKeys, kSize) + first * kSize,
                  from + min(query + row, queries - 1) * mask.row_stride);
      }
    };
    const bool is_dense = mask.key_stride == 1;
    const uintptr_t offsets = reinterpret_cast<uintptr_t>(from) | mask.row_stride * kSize;
    if (left <= 0) {
      each_row(
          [](char* to, const Bits*) { *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0); });
    } else if (is_dense && left >= 16 && offsets % 16 == 0) {
      each_row([](char* to, const Bits* source) { copy_async<16>(shared_address(to), source); });
    } else if (is_dense && (left >= 16 || left % 4 == 0) && offsets % 4 == 0) {
      each_row([&](char* to, const Bits* source) {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
          const bool is_inside = i < left;
          copy_async<4>(shared_address(to + i), is_inside ? source + i / kSize : source, is_inside);
        }
      });
    } else if (is_dense && left >= 20) {
      each_row([](char* to, const Bits* source) {
        const auto at = reinterpret_cast<uintptr_t>(source);
        const auto* words = reinterpret_cast<const uint32_t*>(at & ~uintptr_t{3});
        uint32_t word[5];
#pragma unroll
        for (int i = 0; i < 5; ++i) word[i] = words[i];
        const auto shifted = [&](int i) {
          return __funnelshift_r(word[i], word[i + 1], at % 4 * 8);
        };
        *reinterpret_cast<uint4*>(to) = make_uint4(shifted(0), shifted(1), shifted(2), shifted(3));
      });
    } else {
      each_row([&](char* to, const Bits* source) {
#pragma unroll 1
        for (int i = 0; i < 16 / kSize; ++i) {
          reinterpret_cast<Bits*>(to)[i] = i * kSize < left ? source[i * mask.key_stride] : Bits{0};
        }
      });
    }
  }

  template <typename Bits, bool kTransposed, int kCount, typename Value>
  static __device__ __forceinline__ void add_elements(bool has_rows, uint32_t tile, int row,
                                                      int column, float factor,
                                                      float (&scores)[kCount], Value value) {
    constexpr int kSize = sizeof(Bits);
    const int pitch = mask_pitch(kKeys, kSize) * has_rows;
    const int row_bytes = kTransposed ? kSize : pitch, column_bytes = kTransposed ? pitch : kSize;
    const uint32_t first = tile + row * row_bytes + column * column_bytes;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      uint32_t bits[2];
      const uint32_t at = first + i / 2 % 2 * 8 * row_bytes + i / 4 * 8 * column_bytes;
      if constexpr (kTransposed) {
        load_shared<kSize>(bits[0], at);
        load_shared<kSize>(bits[1], at + pitch);
      } else {
        load_two_shared<kSize>(bits, at);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float added = value(bits[j]);
        scores[i + j] = added <= kHidingMask ? -INFINITY : fmaf(scores[i + j], factor, added);
      }
      // A few loads at a time: registers.
      asm volatile("" : "+f"(scores[i]), "+f"(scores[i + 1]));
      if (i % 8 == 6) __syncwarp();
    }
  }
};

// A NaN or Inf in a row that the mask hides from every query spoils the sums, as it survives its
// weight of 0. If a sum is one, the tile is done again without the rows that no query of the block
// sees.
template <int kKeys>
struct MaskVerdict {
  // By turns, as the producer's warps may be a verdict behind: it is there, and what it is.
  CopyBarrier full[2];
  int spoiled[2];
  bool seen[kKeys];

  // By one thread.
  __device__ __forceinline__ void init(int consumer_warps) {
    for (CopyBarrier& barrier : full) barrier.init(consumer_warps);
    spoiled[0] = spoiled[1] = 0;
  }
  // Whether a consumer's sums are spoiled; by all kThreads consumers.
  template <int kThreads, int kCount>
  __device__ __forceinline__ bool give(const float (&sums)[kCount], uint32_t& turn) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum = fmaf(sums[i], 0.f, sum);
    const uint32_t at = turn % 2;
    // All to whom it matters have read it: if it was true, the second time waited for them.
    if (threadIdx.x == 128) spoiled[at ^ 1] = 0;
    if (sum != 0) spoiled[at] = 1;
    named_sync(kOfConsumers, kThreads);
    const bool result = spoiled[at];
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(full[at]);
    ++turn;
    return result;
  }
  // By the producer's threads.
  __device__ __forceinline__ bool read(uint32_t& turn) {
    wait(full[turn % 2], turn / 2 % 2);
    const bool result = spoiled[turn % 2];
    ++turn;
    return result;
  }
  // Makes the rows of a tile zero for which no consumer's sees(i), of its element i of a row, is
  // true.
  template <typename Tile, int kThreads, typename Sees>
  __device__ __forceinline__ void clear_unseen(char* tile, Sees sees) {
    for (int i = threadIdx.x - 128; i < kKeys; i += kThreads) seen[i] = false;
    named_sync(kOfConsumers, kThreads);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if (sees(i)) seen[8 * (i / 4) + threadIdx.x % 4 * 2 + i % 2] = true;
    }
    named_sync(kOfConsumers, kThreads);
    clear_rows<Tile>(tile, [&](int key) { return !seen[key]; });
    named_sync(kOfConsumers, kThreads);
  }
};

}  // namespace fused_norm::hopper
