// What the portable tier's kernels share: bf16 or fp16 on mma.sync (compute capability 8.0 on). A
// block has a tile of queries (or keys) and walks the tiles of the other side that it sees.
#pragma once

#include <cmath>
#include <type_traits>

#include "core/attention/mma.cuh"
#include "core/attention/plan.h"
#include "core/attention/tiles.cuh"

namespace fused_norm::portable {

using Kernel = PortableKernel;

// A kernel's constants. A warp has 16 kM rows of the block's own tile, of queries or kOfKeys of
// keys, against kOthers rows of the other side at a time, in kStages tiles of shared memory: with
// two, the next is copied while one is worked on.
template <typename T_, Kernel kKernel, bool kGeneral_, int kIndex>
struct Shape {
  using T = T_;
  static constexpr AttentionTiles kTiles = portable_tiles(kKernel, kGeneral_, kIndex);
  static constexpr int kDim = kTiles.dim, kM = kTiles.fragments, kOwn = kTiles.own();
  static constexpr int kOthers = kTiles.others, kN = kOthers / 8, kStages = kTiles.stages;
  static constexpr int kThreads = kTiles.threads(), kBlocks = kThreads == 128 ? 2 : 1;
  static constexpr bool kGeneral = kGeneral_, kOfKeys = kKernel == Kernel::kKeyGradient;
  static constexpr bool kRepeats = kGeneral && !kOfKeys;                   // run_tiles()
  static constexpr bool kBySoftcapped = kKernel == Kernel::kMaskGradient;  // differentiate()
  // Blocks of keys make both gradients, or every other one each: dkey and dvalue of 256 columns do
  // not fit in the registers of a warp's 16 rows.
  static constexpr int kParts = kOfKeys && kDim > 128 ? 2 : 1;
  static constexpr int kOwnBytes = kOwn * kDim * 2, kOtherBytes = kOthers * kDim * 2;
  static constexpr int kSharedBytes = portable_shared_bytes(kKernel, kTiles);

  using Scores = mma::Accumulators<kM, kN>;
  using Out = mma::Accumulators<kM, kDim / 8>;
};

// Starts to copy rows [row, row + kRows) of a head into a tile; zeros for rows outside `valid` and
// in columns from `cols` on.
template <typename S, int kRows>
__device__ __forceinline__ void copy_rows(uint32_t to, const typename S::T* data, int64_t stride,
                                          int row, Range valid, int cols) {
  using Tile = mma::Tile<S::kDim>;
  constexpr int kChunks = Tile::kChunks, kRowsAtOnce = S::kThreads / kChunks;
  static_assert(kRows % kRowsAtOnce == 0);
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const int begin = chunk * 8 < cols ? valid.begin - row : kRows, end = valid.end - row;
  const auto* from = data + (row + first) * stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const int at = first + i * kRowsAtOnce;
    copy_first<16>(Tile::at(to, at, chunk), from, at >= begin && at < end ? 16 : 0);
    from += kRowsAtOnce * stride;
    // Keeps the compiler from holding every row's address in registers of its own.
    asm volatile("" : "+l"(from));
  }
}

// Writes rows [row, end) of a block's accumulators, rounded, through shared memory that is free
// once all threads are here.
template <typename S>
__device__ __forceinline__ void store_tile(const AttentionTensor& tensor, const Sequence& s,
                                           int head, int begin, char* tile,
                                           const typename S::Out& acc, int row, int end, int cols) {
  using T = typename S::T;
  using Tile = mma::Tile<S::kDim>;
  if (tensor.data == nullptr) return;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * S::kM * 16 + lane / 4;
  __syncthreads();
  mma::for_elements<S::kM, S::kDim / 8>([&](int m, int n, int e, int further, int) {
    if (e % 2 == 1) return;
    *reinterpret_cast<uint32_t*>(tile + Tile::at(0, first + further, n) + lane % 4 * 4) =
        round_pair(acc[m][n][e], acc[m][n][e + 1], T());
  });
  __syncthreads();
  constexpr int kRowsAtOnce = S::kThreads / Tile::kChunks;
  const int chunk = threadIdx.x % Tile::kChunks;
  T* data = row_of<T>(tensor, s.batch, head, begin);
#pragma unroll
  for (int i = 0; i < S::kOwn / kRowsAtOnce; ++i) {
    const int at = threadIdx.x / Tile::kChunks + i * kRowsAtOnce;
    if (row + at >= end || chunk * 8 >= cols) continue;
    *reinterpret_cast<uint4*>(data + (row + at) * tensor.row_stride + chunk * 8) =
        *reinterpret_cast<const uint4*>(tile + Tile::at(0, at, chunk));
  }
}

// Sets the rows of a tile of others to zero that have no weight in any of the block's `weights`,
// whose columns they are. A rare path: it serves hidden keys that hold a NaN.
template <typename S>
__device__ __forceinline__ void clear_unseen_rows(char* tile, const typename S::Scores& weights) {
  constexpr int kRows = S::kOthers, kM = S::kM;
  __shared__ int seen[kRows];
  for (int row = threadIdx.x; row < kRows; row += S::kThreads) seen[row] = 0;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      bool any = false;
#pragma unroll
      for (int m = 0; m < kM; ++m) any |= !(weights[m][n][e] == 0) || !(weights[m][n][e + 2] == 0);
      if (any) atomicOr(&seen[n * 8 + threadIdx.x % 4 * 2 + e], 1);
    }
  }
  __syncthreads();
  constexpr int kChunks = mma::Tile<S::kDim>::kChunks;
  for (int at = threadIdx.x; at < kRows * kChunks; at += S::kThreads) {
    if (!seen[at / kChunks]) reinterpret_cast<uint4*>(tile)[at] = uint4{};
  }
  __syncthreads();
}

// Calls run(sequence, head, first row, part, clean) for a block's tiles. Where it returns that a
// thread met a NaN, once more with `clean`: a key that the mask hides may hold one, and 0 * NaN is
// NaN.
template <typename S, typename Run>
__device__ __forceinline__ void run_tiles(const AttentionParams& params, int tiles, int parts,
                                          Run run) {
  for_tiles<S::kOwn, S::kOfKeys>(
      params, tiles, parts, [&](const Sequence& s, int head, int row, int part) {
        bool clean = false, again;
        do {
          const bool has_nan = run(s, head, row, part, clean);
          again = __syncthreads_or(!clean && params.mask.data != nullptr && has_nan);
          clean = true;
        } while (S::kRepeats && again);
      });
}

// Calls launch(shape) with the shape of a call's kernel.
template <Kernel kKernel, typename Launch>
cudaError_t with_shape(const AttentionParams& params, Launch launch) {
  const int index = attention_tiles_index(params.head_dim, params.value_dim);
  const auto with = [&](auto zero, auto general) {
    using T = decltype(zero);
    constexpr bool kGeneral = decltype(general)::value;
    // Gradients of 256 columns have the same tiles with options and without: one kernel.
    constexpr bool kGeneralOfMost = kGeneral || kKernel != Kernel::kForward;
    return index == 0   ? launch(Shape<T, kKernel, kGeneral, 0>())
           : index == 1 ? launch(Shape<T, kKernel, kGeneral, 1>())
                        : launch(Shape<T, kKernel, kGeneralOfMost, 2>());
  };
  return with_dtype<__half, __nv_bfloat16>(params.dtype, [&](auto zero) {
    if constexpr (kKernel != Kernel::kMaskGradient) {
      if (attention_scores_are_plain(params)) return with(zero, std::false_type());
    }
    return with(zero, std::true_type());
  });
}

// A block for each tile of the shape's own side.
template <typename S, typename Params>
cudaError_t launch_shape(S, void (*kernel)(Params, int, int), const Params& args,
                         const AttentionParams& params, cudaStream_t stream) {
  return launch_tiles(kernel, args, tiles_of(S::kOfKeys ? params.keys : params.queries, S::kOwn),
                      S::kParts, S::kOfKeys ? params.kv_heads : params.heads, sequences_of(params),
                      S::kThreads, S::kSharedBytes, stream);
}

// The options on a tile of scores in a warp's accumulators, each a pass of its own behind a uniform
// branch. A tile has queries as rows and keys as columns, or, kTransposed, the reverse.

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
