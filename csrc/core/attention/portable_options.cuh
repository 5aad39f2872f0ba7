// The options on a warp's tile of scores, each a pass of its own behind a uniform branch.
#pragma once

#include "core/attention/portable.cuh"

namespace fused_norm::portable {

__device__ __forceinline__ void add_to_score(float& score, float factor, float added) {
  score = added == -INFINITY ? -INFINITY : fmaf(score, factor, added);
}

// Tiles of the scores of one head, one after the other: queries are rows and keys columns, or,
// kOfKeys, the reverse. A thread's element (m, n, e) of a warp's accumulators is 16 m + 8 (e / 2)
// rows and 8 n + e % 2 columns from its first.
template <typename S>
struct ScoreTile {
  static constexpr int kM = S::kM, kN = S::kN;
  static constexpr bool kOfKeys = S::kOfKeys;
  static constexpr int kQueries = kOfKeys ? S::kOthers : S::kOwn;
  static constexpr int kKeys = kOfKeys ? S::kOwn : S::kOthers;
  using Scores = typename S::Scores;

  const Head<float> head;
  int query, key;  // the block's first
  int row, col;    // the thread's first

  __device__ __forceinline__ void move_to(int first_query, int first_key) {
    query = first_query, key = first_key;
    row = (kOfKeys ? key : query) + threadIdx.x / 32 * kM * 16 + threadIdx.x % 32 / 4;
    col = (kOfKeys ? query : key) + threadIdx.x % 4 * 2;
  }

  // Hides what lies outside the band and the sequence.
  __device__ __forceinline__ void hide_outside(Scores& scores) const {
    const Band& band = head.s.band;
    const int queries = head.s.queries, keys = head.s.keys;
    // Of rows beyond the last query nothing is kept.
    const int query_end = kOfKeys ? query + kQueries : min(query + kQueries, queries);
    if (key + kKeys <= keys && query_end <= queries &&
        band.sees_all(query, query_end, key, key + kKeys)) {
      return;
    }
    mma::for_elements<kM, kN>([&](int m, int n, int e, int further, int at) {
      // Bounds of a column's distance from this thread's first, by row.
      const int in_row = row + further;
      int low, high;
      if constexpr (kOfKeys) {
        low = in_row < keys ? in_row - band.highest : queries;
        high = min(in_row - band.lowest, queries - 1);
      } else {
        low = in_row + band.lowest;
        high = min(in_row + band.highest, keys - 1);
      }
      if (at < low - col || at > high - col) scores[m][n][e] = -INFINITY;
    });
  }

  // All options but dropout: the accumulators of query . key become scores. Returns what scores
  // have to be multiplied by to be exponents of 2, a positive number. `gradient`, where given, is
  // multiplied by the capped score's derivative. A score beyond the sequence is arbitrary.
  __device__ __forceinline__ float apply_options(Scores& scores, Scores* gradient) const {
    float factor = head.scale;
    if (head.softcap > 0) {
      const float unit = head.scale / head.softcap * kTanhUnit;
      mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) {
        const float t = tanh_fast(scores[m][n][e] * unit);
        scores[m][n][e] = t;
        if (gradient != nullptr) (*gradient)[m][n][e] *= 1 - t * t;
      });
      factor = head.softcap;
    }
    if (head.alibi_slope != 0) {
      const float first = (kOfKeys ? col - row : row - col) + head.s.keys - head.s.queries;
      mma::for_elements<kM, kN>([&](int m, int n, int e, int row, int col) {
        const float distance = first + static_cast<float>(kOfKeys ? col - row : row - col);
        scores[m][n][e] = fmaf(scores[m][n][e], factor, -head.alibi_slope * fabsf(distance));
      });
      factor = 1;
    }
    if (head.mask != nullptr) {
      add_mask(scores, factor);
      factor = 1;
    }
    if (factor >= kSmallestPlainScale) return factor * kLog2E;
    mma::for_elements<kM, kN>([&](int m, int n, int e, int, int) { scores[m][n][e] *= factor; });
    return kLog2E;
  }

  // Multiplies scores by `factor` and adds the mask; where it is -inf the score is -inf, whatever
  // it was.
  __device__ __forceinline__ void add_mask(Scores& scores, float factor) const {
    const AttentionMask& mask = head.params.mask;
    // The same for all lanes.
    const bool in_pairs = mask.key_stride == 1 && mask.row_stride % 2 == 0 &&
                          reinterpret_cast<uintptr_t>(head.mask) % (2 * head.mask_bytes()) == 0;
    const int last_row = (kOfKeys ? head.s.keys : head.s.queries) - 1;
    const int last_col = (kOfKeys ? head.s.queries : head.s.keys) - 1;
    const bool within = row - threadIdx.x % 32 / 4 + kM * 16 - 1 <= last_row &&
                        col - threadIdx.x % 4 * 2 + kN * 8 - 1 <= last_col;
    if (in_pairs && within && mask.boolean) {
      add_whole_mask<true>(scores, factor);
    } else if (in_pairs && within && mask.dtype != DType::kFloat32) {
      add_whole_mask<false>(scores, factor);
    } else {
      mma::for_elements<kM, kN>([&](int m, int n, int e, int further_row, int further_col) {
        const int at_row = min(row + further_row, last_row);
        const int at_col = min(col + further_col, last_col);
        add_to_score(scores[m][n][e], factor,
                     head.mask_at(kOfKeys ? at_col : at_row, kOfKeys ? at_row : at_col));
      });
    }
  }

  // The same for a tile that lies within the mask, of 16 bits or booleans with neighbouring keys
  // next to each other: every lane reads two, and where keys are rows the lanes then exchange them.
  template <bool kBoolean>
  __device__ __forceinline__ void add_whole_mask(Scores& scores, float factor) const {
    using Pair = std::conditional_t<kBoolean, uint16_t, uint32_t>;
    constexpr int kBytes = sizeof(Pair) / 2;
    const int lane = threadIdx.x % 32;
    // A lane's place among eight queries by eight keys.
    const int at_query = kOfKeys ? col - lane % 4 * 2 + lane / 4 : row;
    const int at_key = kOfKeys ? row - lane / 4 + lane % 4 * 2 : col;
    const int64_t pitch = head.params.mask.row_stride * kBytes;
    const char* from = head.mask + at_query * pitch + at_key * kBytes;
#pragma unroll
    for (int i = 0; i < (kOfKeys ? kN : 2 * kM); ++i) {
#pragma unroll
      for (int j = 0; j < (kOfKeys ? 2 * kM : kN); ++j) {
        uint32_t pair = __ldg(reinterpret_cast<const Pair*>(from + j * 8 * kBytes));
        if (kBoolean) pair = __byte_perm(pair, 0, 0x4140);
        if (kOfKeys) pair = mma::transpose(pair);
        float2 added;
        if constexpr (kBoolean) {
          added = {pair & 0xFFFF ? 0 : -INFINITY, pair >> 16 ? 0 : -INFINITY};
        } else {
          added = detail::to_floats(pair, typename S::T());
        }
        const int r = kOfKeys ? j : i, n = kOfKeys ? i : j;
        add_to_score(scores[r / 2][n][r % 2 * 2], factor, added.x);
        add_to_score(scores[r / 2][n][r % 2 * 2 + 1], factor, added.y);
      }
      from += 8 * pitch;
    }
  }

  // Asks for the next tile of the mask to come nearer: a thread a row, 128 bytes of it.
  __device__ __forceinline__ void prefetch_mask() const {
    const AttentionMask& mask = head.params.mask;
    const int next_query = (kOfKeys ? query + kQueries : query) + threadIdx.x;
    const int next_key = kOfKeys ? key : key + kKeys;
    if (head.mask == nullptr || mask.row_stride == 0 || mask.key_stride != 1) return;
    if (threadIdx.x >= kQueries || next_query >= head.s.queries || next_key >= head.s.keys) return;
    const char* at = head.mask + (next_query * mask.row_stride + next_key) * head.mask_bytes();
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
  }
};

// Which elements of a tile dropout keeps. Lanes share draws, as a draw serves four keys: a word has
// a nibble of each draw that the lane made, one for each n.
template <typename S>
struct KeptElements {
  const Head<float>& head;
  uint32_t at[S::kM][S::kOfKeys ? 4 : 2] = {};

  __device__ __forceinline__ KeptElements(const ScoreTile<S>& tile) : head(tile.head) {
    if (!head.drops()) return;
    static_assert(S::kN <= 8);
    const Dropout dropout = head.dropout();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
      // Of keys, four lanes share four of them: each draws for one of an element's two rows and two
      // columns. Else two lanes share them: each draws for one of the two rows.
      const int row = tile.row + m * 16, turn = S::kOfKeys ? lane / 4 % 4 : lane % 2;
      uint32_t nibbles = 0;
#pragma unroll 2  // registers
      for (int n = 0; n < S::kN; ++n) {
        const int query = S::kOfKeys ? tile.col + n * 8 + turn % 2 : row + turn * 8;
        const int key = S::kOfKeys ? row + turn / 2 * 8 : tile.col + n * 8;
        nibbles |= dropout.kept(query, key) << (n * 4);
      }
#pragma unroll
      for (int from = 0; from < (S::kOfKeys ? 4 : 2); ++from) {
        const int other = S::kOfKeys ? (lane & ~12) | from << 2 : (lane & ~1) | from;
        const uint32_t drawn = __shfl_sync(0xffffffffu, nibbles, other);
        at[m][from] = S::kOfKeys ? drawn >> (lane / 4 % 4) : drawn >> (lane % 2 * 2);
      }
    }
  }
  // Multiplies by 1 / (1 - p) or 0.
  __device__ __forceinline__ void apply(typename S::Scores& weights) const {
    if (!head.drops()) return;
    const float scale = static_cast<float>(head.params.dropout_scale);
    mma::for_elements<S::kM, S::kN>([&](int m, int n, int e, int, int) {
      const uint32_t kept = S::kOfKeys ? at[m][e] : at[m][e / 2] >> e % 2;
      weights[m][n][e] = kept >> (n * 4) & 1 ? weights[m][n][e] * scale : 0;
    });
  }
};

}  // namespace fused_norm::portable
