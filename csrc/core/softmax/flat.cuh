// Short rows of one 16-bit dtype that are a little longer than a power of two of packs: they pass
// through shared memory in tiles, and each lane of a warp has some of a row's columns, neighbours
// in neighbouring lanes.
#pragma once

#include "core/common/overlap.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/common/tile_ring.cuh"
#include "core/softmax/backward.cuh"
#include "core/softmax/exp_sum.cuh"
#include "core/softmax/plan.h"
#include "core/softmax/policies.cuh"

namespace fused_norm {

// What passes through a ring of tiles: x, in whose place comes y.
template <typename X>
struct ForwardTiles {
  static constexpr int kWritten = 0;
  const Rows<X>& x;
  X* y;
  bool lie_flat;

  __device__ static constexpr int count() { return 1; }
  __device__ __forceinline__ bool flat() const { return lie_flat; }
  __device__ __forceinline__ TileRows<X> rows_of(int) const { return {x.data, x.layout}; }
  __device__ __forceinline__ X* written() const { return y; }
};

// y; and dy, in whose place comes dx.
template <typename X>
struct GradientTiles {
  enum { kOutputRows, kGradientRows };
  static constexpr int kWritten = kGradientRows;
  const GradientLoad<X>& load;
  X* dx;
  bool lie_flat;

  __device__ static constexpr int count() { return 2; }
  __device__ __forceinline__ bool flat() const { return lie_flat; }
  __device__ __forceinline__ TileRows<X> rows_of(int tensor) const {
    const Rows<X>& rows = tensor == kOutputRows ? load.y : load.dy;
    return {rows.data, rows.layout};
  }
  __device__ __forceinline__ X* written() const { return dx; }
};

// A warp's kRows rows of a tile, from `at` on.
template <int kUnits, int kRows, typename X>
struct WarpRows {
  using Columns = LaneColumns<kUnits, kUnits - 1>;

  __device__ __forceinline__ static void load(const X* at, const Columns& columns, float filler,
                                              float (&values)[kRows][kUnits]) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        values[k][i] = filler;
        if (columns.inside(i))
          values[k][i] =
              value_of<X>(reinterpret_cast<const Bits<X>*>(at)[k * columns.cols + i * kWarpSize]);
      }
    }
  }
  __device__ __forceinline__ static void store(X* at, const Columns& columns,
                                               const float (&values)[kRows][kUnits]) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      Bits<X>* const to = reinterpret_cast<Bits<X>*>(at) + k * columns.cols;
#pragma unroll
      for (int i = 0; i < kUnits; i += 2) {
        const bool two = i + 1 < kUnits;
        const uint32_t pair =
            detail::round_pair(values[k][i], two ? values[k][i + two] : 0.0f, X());
        if (columns.inside(i)) to[i * kWarpSize] = static_cast<uint16_t>(pair);
        if (two && columns.inside(i + 1))
          to[(i + 1) * kWarpSize] = static_cast<uint16_t>(pair >> 16);
      }
    }
  }
};

// Persistent blocks walk over tiles; calls run(r) for the first of each of a warp's rows of one.
template <int kRows, typename Tiles, typename Run>
__device__ __forceinline__ void for_tiles(Tiles& tiles, const FlatRows& flat, Run run) {
  meet_previous_kernel();
  tiles.start();
  __syncthreads();
  for (; tiles.any(); tiles.next()) {
    tiles.template wait<false>();
#pragma unroll 1
    for (int r = threadIdx.x / kWarpSize * kRows; r < flat.rows;
         r += kFlatThreads / kWarpSize * kRows)
      run(r);
  }
  tiles.finish();
}

template <bool kLog, int kClass, typename X>
__device__ __forceinline__ void softmax_tiles(const Rows<X>& x, X* y, bool lie_flat,
                                              const FlatRows& flat, CopyBarrier* filled) {
  constexpr int kUnits = kSoftmaxFlatUnits[kClass], kRows = softmax_flat_rows(kUnits);
  using Columns = LaneColumns<kUnits, kUnits - 1>;
  using Warp = WarpRows<kUnits, kRows, X>;
  extern __shared__ __align__(128) char memory[];
  const Columns columns{static_cast<int>(threadIdx.x) % kWarpSize, x.cols};
  const ForwardTiles<X> tensors{x, y, lie_flat};
  TileRing<X, ForwardTiles<X>, FlatRows> tiles(tensors, x.rows, x.cols, flat, filled, memory);
  for_tiles<kRows>(tiles, flat, [&](int r) {
    X* const at = tiles.part(0) + r * columns.cols + columns.lane;
    float values[kRows][kUnits], top[kRows], sum[kRows];
    Warp::load(at, columns, kLowest<float>, values);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      top[k] = values[k][0];
#pragma unroll
      for (int i = 1; i < kUnits; ++i) top[k] = larger_of(top[k], values[k][i]);
    }
    reduce_each(top, LargerOf());
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const float shift = shift_of(top[k]);
      float exponentials[kUnits];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        values[k][i] -= shift;
        exponentials[i] = exp_of(values[k][i]);
        if (!kLog) values[k][i] = exponentials[i];
      }
      sum[k] = tree_sum<kUnits>(exponentials);
    }
    reduce_each(sum, SumOf());
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const Finish<kLog, float> finish({top[k], sum[k]}, top[k], false);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) values[k][i] = finish(values[k][i], values[k][i]);
    }
    Warp::store(at, columns, values);
  });
}

template <bool kLog, int kClass, typename X>
__device__ __forceinline__ void softmax_tiles(const GradientLoad<X>& load, X* dx, bool lie_flat,
                                              const FlatRows& flat, CopyBarrier* filled) {
  using Tiles = GradientTiles<X>;
  constexpr int kUnits = kSoftmaxFlatUnits[kClass], kRows = softmax_flat_rows(kUnits);
  using Columns = LaneColumns<kUnits, kUnits - 1>;
  using Warp = WarpRows<kUnits, kRows, X>;
  extern __shared__ __align__(128) char memory[];
  const Columns columns{static_cast<int>(threadIdx.x) % kWarpSize, load.y.cols};
  const Tiles tensors{load, dx, lie_flat};
  TileRing<X, Tiles, FlatRows> tiles(tensors, load.y.rows, columns.cols, flat, filled, memory);
  for_tiles<kRows>(tiles, flat, [&](int r) {
    const int at = r * columns.cols + columns.lane;
    X* const dy_at = tiles.part(Tiles::kGradientRows) + at;
    float y[kRows][kUnits], dy[kRows][kUnits], sum[kRows];
    Warp::load(tiles.part(Tiles::kOutputRows) + at, columns, 0.0f, y);
    Warp::load(dy_at, columns, 0.0f, dy);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      // Two chains.
      float of_row[2] = {};
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
        of_row[i % 2] = kLog ? of_row[i % 2] + dy[k][i] : fmaf(dy[k][i], y[k][i], of_row[i % 2]);
      sum[k] = of_row[0] + of_row[1];
    }
    reduce_each(sum, SumOf());
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
        dy[k][i] = gradient_of<kLog>(dy[k][i], y[k][i], sum[k], load.scale);
    }
    Warp::store(dy_at, columns, dy);
  });
}

// All classes in one kernel a type, which branches once; in backward, two. From: what is read.
template <int kClass, int kEnd, bool kLog, typename From, typename X>
__device__ __forceinline__ void softmax_class(const From& from, X* to, bool lie_flat,
                                              const FlatRows& flat, CopyBarrier* filled) {
  if constexpr (kClass + 1 < kEnd) {
    if (flat.row_class != kClass)
      return softmax_class<kClass + 1, kEnd, kLog>(from, to, lie_flat, flat, filled);
  }
  softmax_tiles<kLog, kClass>(from, to, lie_flat, flat, filled);
}

template <typename X>
__global__ void __launch_bounds__(kFlatThreads, softmax_flat_blocks(false))
    softmax_forward_flat(const __grid_constant__ Rows<X> x, X* y, bool log, bool lie_flat,
                         const __grid_constant__ FlatRows flat) {
#if __CUDA_ARCH__ >= 900
  __shared__ CopyBarrier filled[kMaxFlatSlots];
  if (log) {
    softmax_class<0, kSoftmaxFlatClasses, true>(x, y, lie_flat, flat, filled);
  } else {
    softmax_class<0, kSoftmaxFlatClasses, false>(x, y, lie_flat, flat, filled);
  }
#endif
}

template <typename X, bool kLonger>
__global__ void __launch_bounds__(kFlatThreads, softmax_flat_blocks(kLonger))
    softmax_backward_flat(const __grid_constant__ GradientLoad<X> load, X* dx, bool log,
                          bool lie_flat, const __grid_constant__ FlatRows flat) {
#if __CUDA_ARCH__ >= 900
  __shared__ CopyBarrier filled[kMaxFlatSlots];
  constexpr int kFirst = kLonger ? kShorterSoftmaxClasses : 0;
  constexpr int kEnd = kLonger ? kSoftmaxFlatClasses : kShorterSoftmaxClasses;
  if (log) {
    softmax_class<kFirst, kEnd, true>(load, dx, lie_flat, flat, filled);
  } else {
    softmax_class<kFirst, kEnd, false>(load, dx, lie_flat, flat, filled);
  }
#endif
}

}  // namespace fused_norm
