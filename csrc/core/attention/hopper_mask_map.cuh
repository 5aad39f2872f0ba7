// What a mask hides and what it changes, tile by tile, on Hopper: tiles that it hides are left out,
// and only tiles of which it changes a score are masked. A kernel before notes which these are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "core/attention/plan.h"
#include "core/common/types.h"

namespace fused_norm::hopper {

// with(read) for the mask's type; read(at) is what its element `at` adds to a score; -inf where it
// hides the key.
template <typename With>
__device__ __forceinline__ void with_mask_reader(const AttentionMask& mask, With with) {
  const auto added = [](float value) { return value <= kHidingMask ? -INFINITY : value; };
  const void* data = mask.data;
  if (mask.boolean) {
    with([=](int64_t at) { return static_cast<const uint8_t*>(data)[at] ? 0.f : -INFINITY; });
  } else if (mask.dtype == DType::kFloat32) {
    with([=](int64_t at) { return added(static_cast<const float*>(data)[at]); });
  } else if (mask.dtype == DType::kFloat16) {
    with([=](int64_t at) { return added(__half2float(static_cast<const __half*>(data)[at])); });
  } else {
    with([=](int64_t at) {
      return added(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]));
    });
  }
}

// What a mask of keys adds to the score of one.
__device__ __forceinline__ float key_mask_value(const AttentionMask& mask, int sequence, int head,
                                                int key) {
  const int64_t at = sequence * mask.batch_stride + head * mask.head_stride + key * mask.key_stride;
  float value;
  with_mask_reader(mask, [&](auto read) { value = read(at); });
  return value;
}

// A mask, if there is one, and its map: for every kQueriesOfBit queries by kKeysOfBit keys a bit
// says whether one of the scores is seen, and one of another array whether one is changed. Null
// bits: there is no map.
struct MappedMask : AttentionMask {
  uint32_t* bits;
  int32_t heads, blocks, words;  // of a sequence; of queries of a head; of a block's arrays

  // Where the arrays of a head's queries begin: for each block who is seen, then who is changed.
  __device__ __forceinline__ uint32_t begin(int sequence, int head) const {
    const int row = (batch_stride == 0 ? 0 : sequence) * heads + (head_stride == 0 ? 0 : head);
    return static_cast<uint32_t>(row) * blocks * 2 * words;
  }
  // Whether one of kKeys keys from `key` on is seen by one of `queries` from `query` on, of those
  // whose arrays begin there, and whether one of their scores is changed.
  struct Tile {
    bool seen, changed;
  };
  template <int kKeys>
  __device__ __forceinline__ Tile tile(uint32_t begin, int query, int queries, int key) const {
    static_assert(kKeys % kKeysOfBit == 0 && kKeys / kKeysOfBit < 32);
    const int bit = key / kKeysOfBit, first = min(query / kQueriesOfBit, blocks - 1);
    int more = min((query + queries - 1) / kQueriesOfBit, blocks - 1) - first;
    const uint32_t* at = bits + (begin + first * 2 * words + bit / 32);
    uint32_t seen = 0, changed = 0;
#pragma unroll 1  // registers are few
    do {
      seen |= __funnelshift_r(at[0], at[1], bit % 32);
      changed |= __funnelshift_r(at[words], at[words + 1], bit % 32);
      at += 2 * words;
    } while (--more >= 0);
    constexpr uint32_t kBits = (1u << kKeys / kKeysOfBit) - 1;
    return {(seen & kBits) != 0, (changed & kBits) != 0};
  }
  // How many of the tiles of kKeys keys in [first, end) one of these queries sees. By a warp.
  template <int kKeys>
  __device__ __forceinline__ int count_seen(uint32_t begin, int query, int queries, int first,
                                            int end) const {
    static_assert(kKeys == 8 * kKeysOfBit);  // a byte of the array
    const int block = min(query / kQueriesOfBit, blocks - 1);
    const int last = min((query + queries - 1) / kQueriesOfBit, blocks - 1);
    int count = 0;
#pragma unroll 1
    for (int word = first / 4 + threadIdx.x % 32; 4 * word < end; word += 32) {
      const uint32_t* at = bits + (begin + block * 2 * words + word);
      uint32_t seen = at[0];
      if (last > block) seen |= at[2 * words];
      if (4 * word < first) seen &= ~0u << 8 * (first - 4 * word);
      if (4 * word + 4 > end) seen &= ~0u >> 8 * (4 * word + 4 - end);
      count += __popc(__vcmpne4(seen, 0)) / 8;
    }
    return __reduce_add_sync(~0u, count);
  }
};

// A call's mask. Its map, if it has one, lies in the call's scratch memory.
inline MappedMask mapped_mask(const AttentionParams& params, bool backward, void* scratch) {
  if (!attention_maps_mask(params)) return {params.mask};
  const MaskMapSize size = mask_map_size(params);
  char* bits = static_cast<char*>(scratch) + hopper_scratch(params, backward).mask_map;
  return {params.mask, reinterpret_cast<uint32_t*>(bits), size.heads, size.blocks, size.words};
}

}  // namespace fused_norm::hopper
