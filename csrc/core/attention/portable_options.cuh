// The options on a tile of scores in a warp's accumulators, each a pass of its own behind a uniform
// branch. A tile has queries as rows and keys as columns, or, kTransposed, the reverse.
#pragma once

#include "core/attention/portable.cuh"

namespace fused_norm {
namespace portable {

// Where a thread's part of a warp's tile lies: its element (m, n, e) is 16 m + 8 (e / 2) rows and
// 8 n + e % 2 columns further.
template <bool kTransposed>
struct TilePlace {
  int row, col;
  int queries, keys;  // of the sequence

  __device__ __forceinline__ TilePlace(const Sequence& s, int query, int key)
      : row((kTransposed ? key : query) + threadIdx.x % 32 / 4),
        col((kTransposed ? query : key) + threadIdx.x % 4 * 2),
        queries(s.queries),
        keys(s.keys) {}
};

// Hides what lies outside the band and the sequence.
template <bool kTransposed, int kM, int kN>
__device__ __forceinline__ void hide_outside(float (&scores)[kM][kN][4], const Band& band,
                                             const TilePlace<kTransposed>& place) {
  // Bounds of a column's distance from this thread's first, by row.
#pragma unroll
  for (int r = 0; r < 2 * kM; ++r) {
    const int row = place.row + r * 8;
    int low, high;
    if constexpr (kTransposed) {
      low = row < place.keys ? row - band.highest : place.queries;
      high = min(row - band.lowest, place.queries - 1);
    } else {
      low = row + band.lowest;
      high = min(row + band.highest, place.keys - 1);
    }
    low -= place.col;
    high -= place.col;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = n * 8 + e;
        if (at < low || at > high) scores[r / 2][n][r % 2 * 2 + e] = -INFINITY;
      }
    }
  }
}

// Scores become tanh(scale dot / softcap); `gradient`, where given, is multiplied by its derivative
// by scale dot / softcap, which is the capped score's by scale dot.
template <int kM, int kN>
__device__ __forceinline__ void cap(float (&scores)[kM][kN][4], float (*gradient)[kN][4],
                                    float scale, float softcap) {
  const float factor = scale / softcap;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      tanh_fast(scores[m][n], factor);
      if (gradient == nullptr) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) gradient[m][n][e] *= 1 - scores[m][n][e] * scores[m][n][e];
    }
  }
}

__device__ __forceinline__ float mask_value(float added) { return added; }
__device__ __forceinline__ float mask_value(__nv_bfloat16 added) { return __bfloat162float(added); }
__device__ __forceinline__ float mask_value(__half added) { return __half2float(added); }
__device__ __forceinline__ float mask_value(bool shown) { return shown ? 0 : -INFINITY; }

// Two neighbours of a mask.
template <typename M>
struct alignas(2 * sizeof(M)) MaskPair {
  M first, second;
};

// Reads a thread's part of a row of the mask, 2 kN elements from column `col` on.
template <typename M, int kN>
__device__ __forceinline__ void read_mask(float (&added)[2 * kN], const char* data, int64_t at,
                                          int64_t col_stride, int col, int last_col,
                                          bool in_pairs) {
  const M* row = reinterpret_cast<const M*>(data) + at;
  if (in_pairs) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const auto pair = *reinterpret_cast<const MaskPair<M>*>(row + col + n * 8);
      added[2 * n] = mask_value(pair.first);
      added[2 * n + 1] = mask_value(pair.second);
    }
  } else {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        added[2 * n + e] = mask_value(row[min(col + n * 8 + e, last_col) * col_stride]);
      }
    }
  }
}

// Multiplies scores by `factor` and adds the mask; where it is -inf the score is -inf, whatever it
// was.
template <typename T, bool kTransposed, int kM, int kN>
__device__ __forceinline__ void add_mask(float (&scores)[kM][kN][4], float factor,
                                         const ScoreRules<float>& rules,
                                         const TilePlace<kTransposed>& place) {
  const AttentionMask& mask = rules.params.mask;
  const int64_t row_stride = kTransposed ? mask.key_stride : mask.row_stride;
  const int64_t col_stride = kTransposed ? mask.row_stride : mask.key_stride;
  const int last_row = (kTransposed ? place.keys : place.queries) - 1;
  const int last_col = (kTransposed ? place.queries : place.keys) - 1;
  // The same for all threads: a column is even, and the warp's last one is known.
  const bool in_pairs = col_stride == 1 && row_stride % 2 == 0 &&
                        reinterpret_cast<uintptr_t>(rules.mask) % (2 * rules.mask_bytes()) == 0 &&
                        place.col - place.col % 8 + kN * 8 - 1 <= last_col;
#pragma unroll
  for (int r = 0; r < 2 * kM; ++r) {
    const int64_t at = min(place.row + r * 8, last_row) * row_stride;
    float added[2 * kN];
    if (mask.boolean) {
      read_mask<bool, kN>(added, rules.mask, at, col_stride, place.col, last_col, in_pairs);
    } else if (mask.dtype == DType::kFloat32) {
      read_mask<float, kN>(added, rules.mask, at, col_stride, place.col, last_col, in_pairs);
    } else {
      read_mask<T, kN>(added, rules.mask, at, col_stride, place.col, last_col, in_pairs);
    }
#pragma unroll
    for (int i = 0; i < 2 * kN; ++i) {
      float& score = scores[r / 2][i / 2][r % 2 * 2 + i % 2];
      score = added[i] == -INFINITY ? -INFINITY : fmaf(score, factor, added[i]);
    }
  }
}

// Asks for the next tile of the mask to come nearer: a thread a row, 128 bytes from `key` on.
template <int kRows, int kThreads>
__device__ __forceinline__ void prefetch_mask(const ScoreRules<float>& rules, int query,
                                              int queries, int key, int keys) {
  if (rules.mask == nullptr || rules.params.mask.row_stride == 0 ||
      rules.params.mask.key_stride != 1)
    return;
  const int row = query + threadIdx.x;
  if (threadIdx.x >= kRows || row >= queries || key >= keys) return;
  const char* at = rules.mask + (row * rules.params.mask.row_stride + key) * rules.mask_bytes();
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
  asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
}

// All options but dropout: the accumulators of query . key become scores. Returns what scores have
// to be multiplied by to be exponents of 2, a positive number. A score beyond the sequence is
// arbitrary.
template <typename T, bool kTransposed, int kM, int kN>
__device__ __forceinline__ float apply_options(float (&scores)[kM][kN][4], float (*gradient)[kN][4],
                                               const ScoreRules<float>& rules,
                                               const TilePlace<kTransposed>& place) {
  float factor = rules.scale;
  if (rules.softcap > 0) {
    cap<kM, kN>(scores, gradient, rules.scale, rules.softcap);
    factor = rules.softcap;
  }
  if (rules.alibi_slope != 0) {
    const int distance = kTransposed ? place.col - place.row : place.row - place.col;
    const float first = static_cast<float>(distance + rules.alibi_shift);
    mma::for_elements<kM, kN>([&](int m, int n, int e, int row, int col) {
      const float further = static_cast<float>(kTransposed ? col - row : row - col);
      scores[m][n][e] = fmaf(scores[m][n][e], factor, -rules.alibi_slope * fabsf(first + further));
    });
    factor = 1;
  }
  if (rules.mask != nullptr) {
    add_mask<T, kTransposed>(scores, factor, rules, place);
    factor = 1;
  }
  if (factor >= kSmallestPlainScale) return factor * kLog2E;
  mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) { scores[m][n][e] *= factor; });
  return kLog2E;
}

// Which elements of a tile dropout keeps. Lanes share draws, as a draw serves four keys: a word has
// a nibble of each draw that the lane made, one for each n.
template <bool kTransposed, int kM, int kN>
class KeptElements {
 public:
  __device__ __forceinline__ void draw(const Dropout& dropout,
                                       const TilePlace<kTransposed>& place) {
    scale_ = dropout.scale;
    static_assert(kN <= 8);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      // Transposed, four lanes share four keys: each draws for one of an element's two rows and two
      // columns. Else two lanes share them: each draws for one of the two rows.
      const int row = place.row + m * 16, turn = kTransposed ? lane / 4 % 4 : lane % 2;
      uint32_t nibbles = 0;
#pragma unroll 2  // registers
      for (int n = 0; n < kN; ++n) {
        const int query = kTransposed ? place.col + n * 8 + turn % 2 : row + turn * 8;
        const int key = kTransposed ? row + turn / 2 * 8 : place.col + n * 8;
        nibbles |= dropout.kept(query, key) << (n * 4);
      }
#pragma unroll
      for (int from = 0; from < (kTransposed ? 4 : 2); ++from) {
        const int other = kTransposed ? (lane & ~12) | from << 2 : (lane & ~1) | from;
        const uint32_t drawn = __shfl_sync(0xffffffffu, nibbles, other);
        at_[m][from] = kTransposed ? drawn >> (lane / 4 % 4) : drawn >> (lane % 2 * 2);
      }
    }
  }
  __device__ __forceinline__ bool at(int m, int n, int e) const {
    return kTransposed ? at_[m][e] >> (n * 4) & 1 : at_[m][e / 2] >> (n * 4 + e % 2) & 1;
  }
  // Multiplies by 1 / (1 - p) or 0.
  __device__ __forceinline__ void apply(float (&weights)[kM][kN][4]) const {
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
      weights[m][n][e] = at(m, n, e) ? weights[m][n][e] * scale_ : 0;
    });
  }

 private:
  uint32_t at_[kM][kTransposed ? 4 : 2] = {};
  float scale_ = 1;
};

}  // namespace portable
}  // namespace fused_norm
