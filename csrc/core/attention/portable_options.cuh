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

// softcap tanh(scale dot / softcap); `gradient`, where given, is multiplied by the derivative.
template <int kM, int kN>
__device__ __forceinline__ void cap(float (&scores)[kM][kN][4], float (*gradient)[kN][4],
                                    float scale, float softcap) {
  // tanh x = 1 - 2 / (1 + e^(2 x)), good to 2^-22 absolute.
  const float exponent = scale / softcap * 2 * kLog2E;
  mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
    const float t = 1 - __fdividef(2.f, 1 + mma::exp2_of(scores[m][n][e] * exponent));
    scores[m][n][e] = t * softcap;
    if (gradient != nullptr) gradient[m][n][e] *= 1 - t * t;
  });
}

__device__ __forceinline__ float mask_value(float added) { return added; }
__device__ __forceinline__ float mask_value(__nv_bfloat16 added) { return __bfloat162float(added); }
__device__ __forceinline__ float mask_value(__half added) { return __half2float(added); }
__device__ __forceinline__ float mask_value(bool shown) { return shown ? 0 : -INFINITY; }

// Adds the mask; where it is -inf the score is -inf, whatever it was.
template <typename M, bool kTransposed, int kM, int kN>
__device__ __forceinline__ void add_mask(float (&scores)[kM][kN][4], const char* data,
                                         int64_t row_stride, int64_t col_stride,
                                         const TilePlace<kTransposed>& place) {
  const int last_row = (kTransposed ? place.keys : place.queries) - 1;
  const int last_col = (kTransposed ? place.queries : place.keys) - 1;
  const bool consecutive = col_stride == 1 && place.col + kN * 8 - 7 <= last_col;
#pragma unroll
  for (int r = 0; r < 2 * kM; ++r) {
    const M* row = reinterpret_cast<const M*>(data) + min(place.row + r * 8, last_row) * row_stride;
    const auto add = [&](int n, int e, M value) {
      float& score = scores[r / 2][n][r % 2 * 2 + e];
      const float added = mask_value(value);
      score = added == -INFINITY ? added : score + added;
    };
    if (consecutive) {
      const M* first = row + place.col;
#pragma unroll
      for (int at = 0; at < 2 * kN; ++at) add(at / 2, at % 2, first[at / 2 * 8 + at % 2]);
    } else {
#pragma unroll
      for (int at = 0; at < 2 * kN; ++at) {
        const int col = min(place.col + at / 2 * 8 + at % 2, last_col);
        add(at / 2, at % 2, row[col * col_stride]);
      }
    }
  }
}

// All options but dropout: the accumulators of query . key become scores. A score beyond the
// sequence is arbitrary.
template <bool kTransposed, int kM, int kN>
__device__ __forceinline__ void apply_options(float (&scores)[kM][kN][4], float (*gradient)[kN][4],
                                              const ScoreRules<float>& rules,
                                              const TilePlace<kTransposed>& place) {
  if (rules.softcap > 0) {
    cap<kM, kN>(scores, gradient, rules.scale, rules.softcap);
  } else {
    mma::for_elements<kM, kN>(
        [&](int m, int n, int e, int, int) { scores[m][n][e] *= rules.scale; });
  }
  if (rules.alibi_slope != 0) {
    const int distance = kTransposed ? place.col - place.row : place.row - place.col;
    const float first = static_cast<float>(distance + rules.alibi_shift);
    mma::for_elements<kM, kN>([&](int m, int n, int e, int row, int col) {
      const float further = static_cast<float>(kTransposed ? col - row : row - col);
      scores[m][n][e] -= rules.alibi_slope * fabsf(first + further);
    });
  }
  if (rules.mask == nullptr) return;
  const auto add = [&](auto type) {
    add_mask<decltype(type), kTransposed>(
        scores, rules.mask, kTransposed ? rules.mask_key_stride : rules.mask_row_stride,
        kTransposed ? rules.mask_row_stride : rules.mask_key_stride, place);
  };
  if (rules.mask_is_boolean) {
    add(bool{});
  } else if (rules.mask_dtype == DType::kFloat32) {
    add(float{});
  } else if (rules.mask_dtype == DType::kBFloat16) {
    add(__nv_bfloat16{});
  } else {
    add(__half{});
  }
}

// Which elements of a tile dropout keeps. Lanes share draws, as a draw serves four keys: a word has
// a nibble of each draw that the lane made, one for each n.
template <bool kTransposed, int kM, int kN>
class KeptElements {
 public:
  __device__ __forceinline__ KeptElements(const ScoreRules<float>& rules,
                                          const TilePlace<kTransposed>& place) {
    static_assert(kN <= 8);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      // Transposed, four lanes share four keys: each draws for one of an element's two rows and two
      // columns. Else two lanes share them: each draws for one of the two rows.
      const int row = place.row + m * 16, turn = kTransposed ? lane / 4 % 4 : lane % 2;
      uint32_t nibbles = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int query = kTransposed ? place.col + n * 8 + turn % 2 : row + turn * 8;
        const int key = kTransposed ? row + turn / 2 * 8 : place.col + n * 8;
        nibbles |= rules.kept_nibble(query, key) << (n * 4);
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
  __device__ __forceinline__ void apply(float (&weights)[kM][kN][4], float scale) const {
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
      weights[m][n][e] = at(m, n, e) ? weights[m][n][e] * scale : 0;
    });
  }

 private:
  uint32_t at_[kM][kTransposed ? 4 : 2];
};

}  // namespace portable
}  // namespace fused_norm
