// Short rows of one 16-bit dtype that are a little longer than a power of two of packs: they pass
// through shared memory in tiles, and each lane of a warp has some of a row's columns, neighbours
// in neighbouring lanes.

#include "core/common/branch.cuh"
#include "core/common/launch.cuh"
#include "core/common/slice_statistics.cuh"
#include "core/common/tile_ring.cuh"
#include "core/common/warp_rows.cuh"
#include "core/softmax/backward.cuh"
#include "core/softmax/exp_sum.cuh"
#include "core/softmax/launch.h"
#include "core/softmax/plan.h"
#include "core/softmax/policies.cuh"

namespace fused_norm {

// A lane's columns: of each but the last of them there is one in every lane.
template <int kUnits>
using RowColumns = LaneColumns<kUnits, kUnits - 1>;

template <bool kLog, int kClass, typename X>
__device__ __forceinline__ void forward_tiles(const TileTensors<X, 1>& tensors,
                                              const FlatRows& flat, CopyBarrier* filled) {
  constexpr int kUnits = kSoftmaxFlatUnits[kClass], kRows = softmax_flat_rows(kUnits);
  extern __shared__ __align__(128) char memory[];
  const int cols = tensors.cols;
  const RowColumns<kUnits> columns(cols);
  TileRing<X, 1> tiles(tensors, flat, filled, memory);
  for_tiles<kRows>(
      tiles, flat, [] {},
      [&](int r) {
        X* const at = tiles.part(0) + r * cols + columns.first;
        float values[kRows][kUnits], top[kRows], sum[kRows];
        load_rows(at, cols, columns, kLowest<float>, values);
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
        reduce_each(sum, SumOf(), [](float of_row) { return Finish<kLog, float>::of_sum(of_row); });
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          const Finish<kLog, float> finish(sum[k]);
#pragma unroll
          for (int i = 0; i < kUnits; ++i) values[k][i] = finish(values[k][i], values[k][i]);
        }
        store_rows(at, cols, columns, values);
      });
}

template <bool kLog, int kClass, typename X>
__device__ __forceinline__ void backward_tiles(const TileTensors<X, 2>& tensors, float scale,
                                               const FlatRows& flat, CopyBarrier* filled) {
  constexpr int kUnits = kSoftmaxFlatUnits[kClass], kRows = softmax_flat_rows(kUnits);
  extern __shared__ __align__(128) char memory[];
  const int cols = tensors.cols;
  const RowColumns<kUnits> columns(cols);
  TileRing<X, 2> tiles(tensors, flat, filled, memory);
  for_tiles<kRows>(
      tiles, flat, [] {},
      [&](int r) {
        const int at = r * cols + columns.first;
        X* const dy_at = tiles.part(1) + at;
        float y[kRows][kUnits], dy[kRows][kUnits], sum[kRows];
        load_rows(tiles.part(0) + at, cols, columns, 0.0f, y);
        load_rows(dy_at, cols, columns, 0.0f, dy);
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          // Two chains.
          float of_row[2] = {};
#pragma unroll
          for (int i = 0; i < kUnits; ++i)
            of_row[i % 2] =
                kLog ? of_row[i % 2] + dy[k][i] : fmaf(dy[k][i], y[k][i], of_row[i % 2]);
          sum[k] = of_row[0] + of_row[1];
        }
        reduce_each(sum, SumOf());
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
#pragma unroll
          for (int i = 0; i < kUnits; ++i)
            dy[k][i] = gradient_of<kLog>(dy[k][i], y[k][i], sum[k], scale);
        }
        store_rows(dy_at, cols, columns, dy);
      });
}

// All forms in one kernel a type, which branches once; in backward, two.
template <typename X>
__global__ void __launch_bounds__(kFlatThreads, softmax_flat_blocks(false))
    softmax_forward_flat(const __grid_constant__ TileTensors<X, 1> x, bool log,
                         const __grid_constant__ FlatRows flat) {
#if __CUDA_ARCH__ >= 900
  __shared__ CopyBarrier filled[kFlatSlots];
  with_flag(log, [&](auto is_log) {
    with_number<0, kSoftmaxFlatClasses>(flat.row_class, [&](auto row_class) {
      forward_tiles<decltype(is_log)::value, decltype(row_class)::value>(x, flat, filled);
    });
  });
#else
  __trap();  // no plan asks for it
#endif
}

template <typename X, bool kLonger>
__global__ void __launch_bounds__(kFlatThreads, softmax_flat_blocks(kLonger))
    softmax_backward_flat(const __grid_constant__ TileTensors<X, 2> y_dy, float scale, bool log,
                          const __grid_constant__ FlatRows flat) {
#if __CUDA_ARCH__ >= 900
  __shared__ CopyBarrier filled[kFlatSlots];
  constexpr int kFirst = kLonger ? kShorterSoftmaxClasses : 0;
  constexpr int kEnd = kLonger ? kSoftmaxFlatClasses : kShorterSoftmaxClasses;
  with_flag(log, [&](auto is_log) {
    with_number<kFirst, kEnd>(flat.row_class, [&](auto row_class) {
      backward_tiles<decltype(is_log)::value, decltype(row_class)::value>(y_dy, scale, flat,
                                                                          filled);
    });
  });
#else
  __trap();  // no plan asks for it
#endif
}

cudaError_t softmax_in_tiles(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                             cudaStream_t stream) {
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto type) {
    using X = decltype(type);
    const TileRows<X> x{static_cast<const X*>(params.x), params.x_layout};
    return launch(softmax_forward_flat<X>, plan.blocks, kFlatThreads,
                  {plan.shared_bytes, 1, plan.overlaps}, stream,
                  tile_tensors(static_cast<X*>(params.y), params.rows, params.cols, x), params.log,
                  plan.flat);
  });
}

cudaError_t softmax_in_tiles(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                             cudaStream_t stream) {
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto type) {
    using X = decltype(type);
    const TileRows<X> y{static_cast<const X*>(params.y), params.y_layout};
    const TileRows<X> dy{static_cast<const X*>(params.dy), params.dy_layout};
    return launch(plan.flat.row_class < kShorterSoftmaxClasses ? softmax_backward_flat<X, false>
                                                               : softmax_backward_flat<X, true>,
                  plan.blocks, kFlatThreads, {plan.shared_bytes, 1, plan.overlaps}, stream,
                  tile_tensors(static_cast<X*>(params.dx), params.rows, params.cols, y, dy),
                  static_cast<float>(params.scale), params.log, plan.flat);
  });
}

}  // namespace fused_norm
