// Device side of columns.h.
#pragma once

#include <cuda_runtime.h>

#include "core/common/row_access.cuh"
#include "core/common/row_group.cuh"
#include "core/norm/columns.h"
#include "core/norm/recoverable.h"

namespace fused_norm {

// What a backward call that works from the output was given by its forward call.
template <typename A>
struct ListedColumns {
  RecoverableLimits<A> recoverable, precise;
  int32_t room;  // 0: nothing is listed, and the pointers may be null
  const int32_t* columns;
  const A* side;

  // The place of a column in the list; -1: it is not there.
  __device__ int find(int col) const {
    int low = 0, end = room > 0 ? min(columns[0], room) : 0;
    while (low < end) {
      const int middle = (low + end) / 2;
      if (columns[1 + middle] < col) {
        low = middle + 1;
      } else {
        end = middle;
      }
    }
    return room > 0 && low < min(columns[0], room) && columns[1 + low] == col ? low : -1;
  }

  __device__ __forceinline__ A xhat(int64_t row, int place) const {
    return side[row * room + place];
  }
};

// One parameter as A: of dtypes known only at run time.
template <typename A>
__device__ __forceinline__ A load_param(const ParamVector& params, int col) {
  switch (params.dtype) {
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(params.data)[col]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(params.data)[col]);
    case DType::kFloat32:
      return static_cast<const float*>(params.data)[col];
    default:
      return static_cast<A>(static_cast<const double*>(params.data)[col]);
  }
}

// kCount parameters, at col, col + step, ... but no further than `last`: loads that are all under
// way before the first is waited for.
template <int kCount, typename A>
__device__ __forceinline__ void load_params_at(const ParamVector& params, int col, int step,
                                               int last, A (&out)[kCount]) {
  auto load = [&](auto type) {
    using T = decltype(type);
    T values[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      values[k] = static_cast<const T*>(params.data)[min(col + k * step, last)];
#pragma unroll
    for (int k = 0; k < kCount; ++k) out[k] = static_cast<A>(values[k]);
  };
  switch (params.dtype) {
    case DType::kFloat16:
      return load(__half());
    case DType::kBFloat16:
      return load(__nv_bfloat16());
    case DType::kFloat32:
      return load(float());
    default:
      return load(double());
  }
}

// The parameters of a norm, a column at a time.
template <typename A>
struct ColumnAffine {
  ParamVector weight, bias;
  A weight_offset;

  __device__ __forceinline__ A g(int col) const {
    return weight.data ? load_param<A>(weight, col) + weight_offset : A(1);
  }
  __device__ __forceinline__ A b(int col) const {
    return bias.data ? load_param<A>(bias, col) : A(0);
  }
  // Those of kCount columns, `step` apart, and no further than `last`.
  template <int kCount>
  __device__ __forceinline__ void load(int col, int step, int last, A (&gs)[kCount],
                                       A (&bs)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      gs[k] = A(1);
      bs[k] = A(0);
    }
    if (bias.data) load_params_at(bias, col, step, last, bs);
    if (!weight.data) return;
    load_params_at(weight, col, step, last, gs);
#pragma unroll
    for (int k = 0; k < kCount; ++k) gs[k] += weight_offset;
  }
};

// What one block needs for a look at all columns.
template <typename A>
struct ColumnLook {
  int cols;
  ColumnAffine<A> affine;
  ListedColumns<A> listed;
  bool from_output;  // the call needs every column to be recoverable or listed
  ColumnWatch watch;

  // Whether a column's gradients are NaN.
  __device__ __forceinline__ bool spoils(int col) const {
    return from_output && !meets(listed.recoverable, affine.g(col), affine.b(col)) &&
           listed.find(col) < 0;
  }
};

// By all threads of a block of at most 1024, in one dimension or more.
//
// A column is at risk for k updates when it might not be precise after them, were each update
// to move its g and bias twice as far as the last ones did, with a factor 2 to spare.
template <typename A>
__device__ __noinline__ void look_at_columns(const ColumnLook<A>& look) {
  enum { kLost, kOverflow, kMoved, kAtRisk, kCounts = kAtRisk + kHorizons };
  __shared__ int counts[kCounts];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread < kCounts) counts[thread] = 0;
  __syncthreads();

  int found[kCounts] = {};
  A* const history = static_cast<A*>(look.watch.history);
  const bool has_bias = look.affine.bias.data != nullptr;
  const RecoverableLimits<A>& precise = look.listed.precise;
  // Several columns at once, as their loads are far away.
  constexpr int kBatch = 4;
  const int threads = blockDim.x * blockDim.y;
  const int64_t pitch = look.cols;
  for (int first_col = thread; first_col < look.cols; first_col += kBatch * threads) {
    A gs[kBatch], bs[kBatch], before[kBatch][4] = {};
    const int last = look.cols - 1;
    if (history) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const A* const at = history + min(first_col + k * threads, last);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i < 2 || has_bias) before[k][i] = at[i * pitch];
        }
      }
    }
    look.affine.template load<kBatch>(first_col, threads, last, gs, bs);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int col = first_col + k * threads;
      if (col >= look.cols) break;
      const A g = gs[k], b = bs[k];
      const A(&at)[4] = before[k];
      const bool lost = !meets(precise, g, b);
      found[kLost] += lost;
      if (lost) found[kOverflow] += look.spoils(col);
      if (!history) continue;
      const bool first = isnan(at[0]) && isnan(at[1]);
      const A g_step = fabs(g - at[0]), b_step = has_bias ? fabs(b - at[2]) : A(0);
      A g_speed = first ? A(0) : at[1], b_speed = first || !has_bias ? A(0) : at[3];
      if (!first && (g_step > 0 || b_step > 0)) {
        ++found[kMoved];
        g_speed = fmax(g_step, g_speed / 2);
        b_speed = fmax(b_step, b_speed / 2);
      }
      history[col] = g;
      history[pitch + col] = g_speed;
      if (has_bias) {
        history[2 * pitch + col] = b;
        history[3 * pitch + col] = b_speed;
      }
#pragma unroll
      for (int h = 0; h < kHorizons; ++h) {
        const A reach = 2 * horizon(h);
        const A nearest = fabs(g) - reach * g_speed, bias = fabs(b) + reach * b_speed;
        found[kAtRisk + h] += lost || !meets(precise, nearest / 2, bias) || nearest <= 0;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kCounts; ++i) {
    const int sum = __reduce_add_sync(kFullMask, found[i]);
    if (thread % kWarpSize == 0 && sum > 0) atomicAdd(counts + i, sum);
  }
  __syncthreads();
  if (thread != 0) return;
  if (history) {
    uint64_t report = uint64_t{1} << 62 | uint64_t{counts[kMoved] > 0} << 61 |
                      uint64_t{look.watch.stamp} << 3 * kCountBits;
    for (int h = 0; h < kHorizons; ++h) {
      report |= uint64_t(min(counts[kAtRisk + h], (1 << kCountBits) - 1)) << h * kCountBits;
    }
    *static_cast<volatile uint32_t*>(&look.watch.report->lost) = counts[kLost];
    *static_cast<volatile uint64_t*>(&look.watch.report->report) = report;
  }
  if (counts[kOverflow] > 0) {
    *static_cast<volatile uint32_t*>(&look.watch.report->overflow) = counts[kOverflow];
    __threadfence_system();
    *static_cast<volatile uint32_t*>(look.watch.overflow_signal) = look.watch.signal;
  }
}

template <typename A>
__global__ void __launch_bounds__(1024) column_look(const __grid_constant__ ColumnLook<A> look) {
  look_at_columns(look);
}

}  // namespace fused_norm
