// Short rows of one 16-bit dtype that are a little longer than a power of two of packs: they pass
// through shared memory in tiles, and each lane of a warp has some of a row's columns, neighbours
// in neighbouring lanes.

#include "core/common/slice_statistics.cuh"
#include "core/common/tile_ring.cuh"
#include "core/common/warp_rows.cuh"
#include "core/softmax/backward.cuh"
#include "core/softmax/exp_sum.cuh"
#include "core/softmax/launch.h"
#include "core/softmax/plan.h"

namespace fused_norm {

// A lane's columns: of each but the last of them there is one in every lane.
template <int kUnits>
using RowColumns = LaneColumns<kUnits, kUnits - 1>;

template <bool kLog, int kClass, typename X>
__device__ __forceinline__ void softmax_tiles(const TileTensors<X, 1>& tensors,
                                              const FlatRows& flat) {
  constexpr int kUnits = kSoftmaxFlatUnits[kClass], kRows = softmax_flat_rows(kUnits);
  const RowColumns<kUnits> columns(tensors.cols);
  auto run = [&](const auto& tiles, int r) {
    X* const own = tiles.own(0, r);
    float values[kRows][kUnits], top[kRows], sum[kRows];
    load_rows(own, columns, kLowest<float>, values);
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
    store_rows(own, columns, values);
  };
  for_tiles<kRows>(
      tensors, flat, [] {}, run);
}

// Of dy, in whose place comes dx, and y.
template <bool kLog, int kClass, typename X>
__device__ __forceinline__ void gradient_tiles(const TileTensors<X, 2>& tensors,
                                               const FlatRows& flat, float scale) {
  constexpr int kUnits = kSoftmaxFlatUnits[kClass], kRows = softmax_flat_rows(kUnits);
  const RowColumns<kUnits> columns(tensors.cols);
  auto run = [&](const auto& tiles, int r) {
    X* const own = tiles.own(0, r);
    float y[kRows][kUnits], dy[kRows][kUnits], sum[kRows];
    load_rows(tiles.own(1, r), columns, 0.0f, y);
    load_rows(own, columns, 0.0f, dy);
#pragma unroll
    for (int k = 0; k < kRows; ++k)
      sum[k] = chain_sum<kUnits>([&](int i, float before) {
        return kLog ? before + dy[k][i] : fmaf(dy[k][i], y[k][i], before);
      });
    reduce_each(sum, SumOf());
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
        dy[k][i] = gradient_of<kLog>(dy[k][i], y[k][i], sum[k], scale);
    }
    store_rows(own, columns, dy);
  };
  for_tiles<kRows>(
      tensors, flat, [] {}, run);
}

// All forms in one kernel a type, which branches once; in backward, two.
template <typename X>
__global__ void __launch_bounds__(kFlatThreads, softmax_flat_blocks(false))
    softmax_forward_flat(const __grid_constant__ TileTensors<X, 1> tensors,
                         const __grid_constant__ FlatRows flat, bool log) {
  with_row_class<0, kSoftmaxFlatClasses>(flat, log, [&](auto is_log, auto row_class) {
    softmax_tiles<decltype(is_log)::value, decltype(row_class)::value>(tensors, flat);
  });
}

template <typename X, bool kLonger>
__global__ void __launch_bounds__(kFlatThreads, softmax_flat_blocks(kLonger))
    softmax_backward_flat(const __grid_constant__ TileTensors<X, 2> tensors,
                          const __grid_constant__ FlatRows flat, bool log, float scale) {
  constexpr int kFirst = kLonger ? kShorterSoftmaxClasses : 0;
  constexpr int kEnd = kLonger ? kSoftmaxFlatClasses : kShorterSoftmaxClasses;
  with_row_class<kFirst, kEnd>(flat, log, [&](auto is_log, auto row_class) {
    gradient_tiles<decltype(is_log)::value, decltype(row_class)::value>(tensors, flat, scale);
  });
}

cudaError_t softmax_in_tiles(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                             cudaStream_t stream) {
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto type) {
    using X = decltype(type);
    const TileTensors<X, 1> tensors{
        {{params.x, params.x_layout}}, params.y, params.rows, params.cols};
    return launch_tiles(softmax_forward_flat<X>, tensors, plan.flat, stream, params.log);
  });
}

cudaError_t softmax_in_tiles(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                             cudaStream_t stream) {
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto type) {
    using X = decltype(type);
    const TileTensors<X, 2> tensors{{{params.dy, params.dy_layout}, {params.y, params.y_layout}},
                                    params.dx,
                                    params.rows,
                                    params.cols};
    const bool longer = plan.flat.row_class >= kShorterSoftmaxClasses;
    return launch_tiles(longer ? softmax_backward_flat<X, true> : softmax_backward_flat<X, false>,
                        tensors, plan.flat, stream, params.log, static_cast<float>(params.scale));
  });
}

}  // namespace fused_norm
