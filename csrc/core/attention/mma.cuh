// The tensor-core instructions of compute capability 8.0, and tiles of 16-bit rows in shared
// memory that they read without bank conflicts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/attention/instructions.cuh"
#include "core/common/pack.cuh"

namespace fused_norm::mma {

// Loads four 8 x 8 matrices, of whose 32 rows each lane names one. Lane l gets of each matrix
// row l / 4, columns 2 (l % 4) and the next; transposed, column l / 4 and these rows.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// Two elements of an 8 x 8 matrix a lane, as load_matrices has them, become those of its transpose.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
  return pair;
}

// acc (16 x 8) += a (16 x 16) b (16 x 8). Lane l has rows l / 4 and l / 4 + 8 of acc, two elements
// each, in columns 2 (l % 4) and the next.
#define FUSED_NORM_MULTIPLY(T, type)                                                           \
  __device__ __forceinline__ void multiply(float(&acc)[4], const uint32_t(&a)[4], uint32_t b0, \
                                           uint32_t b1, T) {                                   \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                        \
                 ".f32 "                                                                       \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"             \
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));              \
  }
FUSED_NORM_MULTIPLY(__nv_bfloat16, "bf16")
FUSED_NORM_MULTIPLY(__half, "f16")
#undef FUSED_NORM_MULTIPLY

// Rows of kDim 16-bit elements in shared memory, 32, 64, 128 or 256. Chunk c of 16 bytes of row r
// lies at chunk c ^ (r % 8), so that eight rows' chunks of one column lie in different banks; of
// 32 elements, two rows of which pass all banks, at c ^ (r / 2 % 4).
template <int kDim>
struct Tile {
  static constexpr int kPitch = kDim * 2, kChunks = kDim / 8;

  __device__ __forceinline__ static uint32_t at(uint32_t base, int row, int chunk) {
    return base + row * kPitch + ((chunk ^ (kDim == 32 ? row / 2 % 4 : row % 8)) * 16);
  }
};

// What a lane names to load_matrices: row `row` (of 8 in a row from a multiple of 8) of a tile that
// begins at `base`, and the first or second chunk of 16 columns.
template <int kDim>
class LaneRow {
 public:
  __device__ __forceinline__ LaneRow(uint32_t base, int row, int half) {
    const uint32_t first = Tile<kDim>::at(base, row, half);
#pragma unroll
    for (int i = 0; i < 4; ++i) at_[i] = first ^ (i * 32);
  }
  // 16 columns from 16 `step`, `rows` rows further (a multiple of 8); both constants.
  __device__ __forceinline__ uint32_t at(int step, int rows) const {
    return at_[step % 4] + step / 4 * 128 + rows * Tile<kDim>::kPitch + further_;
  }
  // The same of another tile, a constant number of bytes further: it takes no registers.
  __device__ __forceinline__ LaneRow further(int bytes) const {
    LaneRow other = *this;
    other.further_ += bytes;
    return other;
  }

 private:
  uint32_t at_[4];
  int further_ = 0;
};

// For 16 x 16 of a left factor, whose rows are the tile's; or, transposed, of a right factor whose
// depth is the tile's rows.
template <int kDim>
__device__ __forceinline__ LaneRow<kDim> left_rows(uint32_t base, int first_row) {
  const int lane = threadIdx.x % 32;
  return LaneRow<kDim>(base, first_row + lane % 16, lane / 16);
}
// For 16 columns of a right factor that are rows of the tile; or, transposed, for 16 x 16 of a left
// factor whose rows are the tile's columns from `first` on, a multiple of 16.
template <int kDim>
__device__ __forceinline__ LaneRow<kDim> right_rows(uint32_t base, int first = 0) {
  const int lane = threadIdx.x % 32;
  return LaneRow<kDim>(base, lane % 8 + lane / 16 * 8, first / 8 + lane / 8 % 2);
}

// Accumulators of a warp: 16 kM rows, 8 kN columns.
template <int kM, int kN>
using Accumulators = float[kM][kN][4];

// Calls use(m, n, e, row, col) for a thread's elements, which lie `row` and `col` from its first.
template <int kM, int kN, typename Use>
__device__ __forceinline__ void for_elements(Use use) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) use(m, n, e, m * 16 + e / 2 * 8, n * 8 + e % 2);
    }
  }
}

template <int kM, int kN>
__device__ __forceinline__ void clear(Accumulators<kM, kN>& acc) {
  for_elements<kM, kN>([&](int m, int n, int e, int, int) { acc[m][n][e] = 0; });
}

template <int kM, int kN>
__device__ __forceinline__ bool has_nan(const Accumulators<kM, kN>& acc) {
  bool found = false;
  for_elements<kM, kN>(
      [&](int m, int n, int e, int, int) { found |= acc[m][n][e] != acc[m][n][e]; });
  return found;
}

// acc (16 kM x 8 kN) += a x b for 16 of the sum, of whose right factor load(b, n) gives columns 8 n
// to 8 n + 15.
template <typename T, int kM, int kN, typename Load>
__device__ __forceinline__ void add_products(Accumulators<kM, kN>& acc, const uint32_t (&a)[kM][4],
                                             Load load) {
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    uint32_t b[4];
    load(b, n);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      multiply(acc[m][n], a[m], b[0], b[1], T());
      multiply(acc[m][n + 1], a[m], b[2], b[3], T());
    }
  }
}

// acc = left x right^T, of rows of tiles.
template <typename T, int kDim, int kM, int kN>
__device__ __forceinline__ void multiply_rows(Accumulators<kM, kN>& acc, const LaneRow<kDim>& left,
                                              const LaneRow<kDim>& right) {
  clear(acc);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) load_matrices(a[m], left.at(k, m * 16));
    add_products<T>(acc, a, [&](uint32_t(&b)[4], int n) { load_matrices(b, right.at(k, n * 8)); });
  }
}

// acc += weights x rows: the weights are accumulators of a product, rounded; `rows` names rows of a
// tile by left_rows, one for each column of the weights.
template <typename T, int kDim, int kM, int kDepth, int kN>
__device__ __forceinline__ void multiply_weights(Accumulators<kM, kN>& acc,
                                                 const Accumulators<kM, kDepth>& weights,
                                                 const LaneRow<kDim>& rows) {
#pragma unroll
  for (int k = 0; k < kDepth; k += 2) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* w = weights[m][k + i / 2] + i % 2 * 2;
        a[m][i] = round_pair(w[0], w[1], T());
      }
    }
    add_products<T>(acc, a,
                    [&](uint32_t(&b)[4], int n) { load_transposed(b, rows.at(n / 2, k * 8)); });
  }
}

// acc += left x rows, over kDepth rows of both tiles: `left` names the factor's rows by right_rows,
// `rows` the other tile's by left_rows.
template <typename T, int kDepth, int kLeft, int kDim, int kN>
__device__ __forceinline__ void multiply_columns(Accumulators<1, kN>& acc,
                                                 const LaneRow<kLeft>& left,
                                                 const LaneRow<kDim>& rows) {
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t a[1][4];
    load_transposed(a[0], left.at(0, k));
    add_products<T>(acc, a, [&](uint32_t(&b)[4], int n) { load_transposed(b, rows.at(n / 2, k)); });
  }
}

}  // namespace fused_norm::mma
