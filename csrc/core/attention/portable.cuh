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

}  // namespace fused_norm::portable
