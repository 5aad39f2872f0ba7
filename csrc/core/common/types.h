// Types and numbers that plans, launchers and kernels share, and how plans count. Plain C++: plans
// compile without a CUDA toolkit.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

namespace fused_norm {

constexpr int kWarpSize = 32;

// Bytes: bulk copies start and end at multiples of it (bulk_copy.cuh).
constexpr int kGranule = 16;

// Bytes of a multiprocessor's shared memory that each block takes beside its own.
constexpr int kReservedPerBlock = 1024;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of a grid.
constexpr int clamp_grid(int64_t blocks) {
  return static_cast<int>(std::clamp<int64_t>(blocks, 1, INT_MAX));
}

enum class DType : uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

constexpr int size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Elements of a pack (pack.cuh): 16 bytes of the wider of two tensors.
constexpr int pack_elements(DType a, DType b) {
  return 16 / (size_of(a) > size_of(b) ? size_of(a) : size_of(b));
}

// Division by a fixed number, for dividends below 2^31 (Granlund and Montgomery, 1994):
// n / divisor == (high word of n * multiplier, + n) >> shift.
struct Divider {
  uint32_t divisor, multiplier, shift;
};

constexpr Divider make_divider(uint32_t divisor) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < divisor) ++shift;
  const uint64_t rest = (uint64_t{1} << shift) - divisor;
  return {divisor, static_cast<uint32_t>((uint64_t{1} << 32) * rest / divisor + 1), shift};
}

// Where row `r` of a tensor starts, in elements: (r / inner) * outer_stride + (r % inner) * stride.
// Two strides cover a slice of a packed QKV and a transposed batch without a copy. The common case
// of one stride is inner == 0.
struct RowLayout {
  int64_t stride;
  int64_t outer_stride;
  uint32_t inner;
  uint32_t multiplier, shift;  // of inner's Divider
};

constexpr RowLayout one_stride(int64_t stride) { return {stride, 0, 0, 0, 0}; }

// For less than 2^31 rows.
constexpr RowLayout two_strides(uint32_t inner, int64_t stride, int64_t outer_stride) {
  const Divider divider = make_divider(inner);
  return {stride, outer_stride, inner, divider.multiplier, divider.shift};
}

// Whether every row starts on a boundary of packs of so many elements.
inline bool start_on_packs(const void* data, DType dtype, const RowLayout& layout, int pack) {
  return reinterpret_cast<uintptr_t>(data) % (pack * size_of(dtype)) == 0 &&
         layout.stride % pack == 0 && layout.outer_stride % pack == 0;
}

// A vector of `cols` parameters in its own dtype; `data` is null when the norm has none.
struct ParamVector {
  const void* data;
  DType dtype;
};

// How a kernel is launched. Each plan says what a pack is, and its threads.
struct KernelPlan {
  int pack;             // elements
  int packs;            // a thread
  int threads_per_row;  // 1 to 32 lanes, or whole warps, of each block that shares the row
  int rows_per_block;
  int cluster_blocks;  // blocks that share a row
  int blocks;
  int shared_bytes;  // dynamic
  bool overlaps;     // programmatic dependent launch, from Hopper on
};

constexpr int kPortableClusterBlocks = 8, kMaxClusterBlocks = 16;

// What a plan needs to know of a chip.
struct DeviceProperties {
  int sm_count;
  int shared_bytes_per_block;  // the opt-in limit: 99, 163 or 227 KB on the chips of today
  // Of a portable thread-block cluster, the largest power of two: 8, 2 or 4 on slices of a chip, or
  // 1 before Hopper.
  int max_cluster_blocks;

  // How many multiprocessors clusters of 1, 2, 3, .. blocks can fill, one block each: a cluster
  // stays within one processing cluster of the chip, whose size need not be a multiple of the
  // cluster's (an H200 of 132: 132, 132, 117, 120, 110, 102, 105, 120 up to 8; chips of one model
  // can differ). 0: not even one, or not asked: 9 to 15.
  int filled_by_clusters[kMaxClusterBlocks];

  int capability = 0;  // the compute capability, 90 for 9.0

  int cluster_multiprocessors(int cluster_blocks) const {
    return filled_by_clusters[cluster_blocks - 1];
  }
};

}  // namespace fused_norm
