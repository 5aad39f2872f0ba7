// The options on a tile of scores in a warp's accumulators, each a pass of its own behind a uniform
// branch. A tile has queries as rows and keys as columns, or, kTransposed, the reverse.
#pragma once

#include "core/attention/kept_elements.cuh"
#include "core/attention/portable.cuh"

namespace fused_norm::portable {

// Where a thread's part of a warp's tile lies: its element (m, n, e) is 16 m + 8 (e / 2) rows and
// 8 n + e % 2 columns further.
template <bool kTransposed>
struct TilePlace {
  int row, col;
  int queries, keys;  // of the sequence

  __device__ __forceinline__ TilePlace(const Sequence& s, int query, int key, int warp_row)
      : row((kTransposed ? key : query) + warp_row + threadIdx.x % 32 / 4),
        col((kTransposed ? query : key) + threadIdx.x % 4 * 2),
        queries(s.queries),
        keys(s.keys) {}
};

// Hides what lies outside the band and the sequence.
template <bool kTransposed, int kM, int kN>
__device__ __forceinline__ void hide_outside(float (&scores)[kM][kN][4], const Band& band,
                                             const TilePlace<kTransposed>& place) {
  mma::for_elements<kM, kN>([&](int m, int n, int e, int further, int at) {
    // Bounds of a column's distance from this thread's first, by row.
    const int row = place.row + further;
    int low, high;
    if constexpr (kTransposed) {
      low = row < place.keys ? row - band.highest : place.queries;
      high = min(row - band.lowest, place.queries - 1);
    } else {
      low = row + band.lowest;
      high = min(row + band.highest, place.keys - 1);
    }
    if (at < low - place.col || at > high - place.col) scores[m][n][e] = -INFINITY;
  });
}

// Scores become tanh(scale dot / softcap); `gradient`, where given, is multiplied by its derivative
// by scale dot / softcap, which is the capped score's by scale dot.
template <int kM, int kN>
__device__ __forceinline__ void cap(float (&scores)[kM][kN][4], float (*gradient)[kN][4],
                                    float scale, float softcap) {
  const float factor = scale / softcap * kTanhUnit;
  mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
    const float t = tanh_fast(scores[m][n][e] * factor);
    scores[m][n][e] = t;
    if (gradient != nullptr) gradient[m][n][e] *= 1 - t * t;
  });
}

__device__ __forceinline__ void add_to_score(float& score, float factor, float added) {
  score = added <= kHidingMask ? -INFINITY : fmaf(score, factor, added);
}

// Adds a tile that lies within the mask, of 16 bits or booleans with neighbouring keys next to each
// other: every lane reads two, and where keys are rows the lanes then exchange them.
template <typename T, bool kBoolean, bool kTransposed, int kM, int kN>
__device__ __forceinline__ void add_whole_mask(float (&scores)[kM][kN][4], float factor,
                                               const ScoreRules<float>& rules,
                                               const TilePlace<kTransposed>& place) {
  using Pair = std::conditional_t<kBoolean, uint16_t, uint32_t>;
  constexpr int kBytes = sizeof(Pair) / 2;
  const int lane = threadIdx.x % 32;
  // A lane's place among eight queries by eight keys.
  const int query = kTransposed ? place.col - lane % 4 * 2 + lane / 4 : place.row;
  const int key = kTransposed ? place.row - lane / 4 + lane % 4 * 2 : place.col;
  const int64_t pitch = rules.params.mask.row_stride * kBytes;
  const char* from = rules.mask + query * pitch + key * kBytes;
#pragma unroll
  for (int i = 0; i < (kTransposed ? kN : 2 * kM); ++i) {
#pragma unroll
    for (int j = 0; j < (kTransposed ? 2 * kM : kN); ++j) {
      uint32_t pair = __ldg(reinterpret_cast<const Pair*>(from + j * 8 * kBytes));
      if (kBoolean) pair = __byte_perm(pair, 0, 0x4140);
      if (kTransposed) pair = mma::transpose(pair);
      float2 added;
      if constexpr (kBoolean) {
        added = {pair & 0xFFFF ? 0 : -INFINITY, pair >> 16 ? 0 : -INFINITY};
      } else {
        added = to_floats(pair, T());
      }
      const int r = kTransposed ? j : i, n = kTransposed ? i : j;
      add_to_score(scores[r / 2][n][r % 2 * 2], factor, added.x);
      add_to_score(scores[r / 2][n][r % 2 * 2 + 1], factor, added.y);
    }
    from += 8 * pitch;
  }
}

// Multiplies scores by `factor` and adds the mask; where it is -inf the score is -inf, whatever it
// was.
template <typename T, bool kTransposed, int kM, int kN>
__device__ __forceinline__ void add_mask(float (&scores)[kM][kN][4], float factor,
                                         const ScoreRules<float>& rules,
                                         const TilePlace<kTransposed>& place) {
  const AttentionMask& mask = rules.params.mask;
  const int last_row = (kTransposed ? place.keys : place.queries) - 1;
  const int last_col = (kTransposed ? place.queries : place.keys) - 1;
  // The same for all lanes, whose places are within eight of the warp's first.
  const bool in_pairs = mask.key_stride == 1 && mask.row_stride % 2 == 0 &&
                        reinterpret_cast<uintptr_t>(rules.mask) % (2 * rules.mask_bytes()) == 0;
  const bool within = place.row - threadIdx.x % 32 / 4 + kM * 16 - 1 <= last_row &&
                      place.col - threadIdx.x % 4 * 2 + kN * 8 - 1 <= last_col;
  if (in_pairs && within && mask.boolean) {
    add_whole_mask<T, true>(scores, factor, rules, place);
  } else if (in_pairs && within && mask.dtype != DType::kFloat32) {
    add_whole_mask<T, false>(scores, factor, rules, place);
  } else {
    mma::for_elements<kM, kN>([&](int m, int n, int e, int further_row, int further_col) {
      const int row = min(place.row + further_row, last_row);
      const int col = min(place.col + further_col, last_col);
      add_to_score(scores[m][n][e], factor,
                   rules.mask_at(kTransposed ? col : row, kTransposed ? row : col));
    });
  }
}

// Asks for the next tile of the mask to come nearer: a thread a row, 128 bytes from `key` on.
template <int kRows>
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
    cap(scores, gradient, rules.scale, rules.softcap);
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

// Dropout of a tile: what it keeps is multiplied by `scale`.
template <bool kTransposed, int kM, int kN>
class DroppedTile {
 public:
  __device__ __forceinline__ void draw(const ScoreRules<float>& rules,
                                       const TilePlace<kTransposed>& place) {
    drops_ = rules.drops();
    if (!drops_) return;
#pragma unroll
    for (int m = 0; m < kM; ++m) kept_[m].draw(rules.dropout(), place.row + m * 16, place.col);
  }
  __device__ __forceinline__ void apply(float (&weights)[kM][kN][4], float scale) const {
    if (!drops_) return;
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
      weights[m][n][e] = kept_[m].keeps(n * 4 + e) ? weights[m][n][e] * scale : 0;
    });
  }

 private:
  KeptElements<kTransposed, 4 * kN, 2> kept_[kM];
  bool drops_;
};

}  // namespace fused_norm::portable
