// Forward for short rows of one 16-bit dtype that are not whole packs: they pass through shared
// memory in tiles, and each lane of a warp has some of a row's columns (warp_rows.cuh).
#include "core/common/tile_ring.cuh"
#include "core/common/warp_rows.cuh"
#include "core/norm/forward.cuh"
#include "core/norm/launch.cuh"

namespace fused_norm {

template <typename X>
using FlatStatistics = StatisticsOf<InputLoad<X>, AffineStore<X>>;

// Parameters of a lane's columns; zero past the row's end.
template <typename X, int kUnits, int kSure>
__device__ __forceinline__ void load_columns(const ParamVector& params,
                                             const LaneColumns<kUnits, kSure>& columns,
                                             float (&out)[kUnits]) {
  with_param_type<X>(params.dtype, [&](auto type) {
    const auto* const own = static_cast<const decltype(type)*>(params.data) + columns.first;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      out[i] = 0;
      if (columns.inside(i)) out[i] = static_cast<float>(own[i * kWarpSize]);
    }
  });
}

// Value k of the lane's number.
template <int K>
__device__ __forceinline__ float of_lane(const float (&values)[K], int lane) {
  float value = values[0];
#pragma unroll
  for (int k = 1; k < K; ++k) value = lane == k ? values[k] : value;
  return value;
}

template <bool kRms, int kClass, typename X>
__device__ __forceinline__ void norm_tiles(const TileTensors<X, 1>& tensors, const FlatRows& flat,
                                           const AffineStore<X>& store,
                                           const FlatStatistics<X>& out) {
  constexpr int kUnits = kForwardTileUnits[kClass], kRows = forward_tile_rows(kUnits);
  const int lane = threadIdx.x % kWarpSize;
  const LaneColumns<kUnits, sure_units(kForwardTileUnits, kClass)> columns(tensors.cols);
  float weight[kUnits], bias[kRms ? 1 : kUnits] = {};
  auto load_params = [&] {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) weight[i] = 1;
    if (store.weight.data) {
      load_columns<X>(store.weight, columns, weight);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) weight[i] += store.weight_offset;
    }
    if constexpr (!kRms) {
      if (store.bias.data) load_columns<X>(store.bias, columns, bias);
    }
  };
  for_tiles<kRows>(tensors, flat, load_params, [&](const auto& tiles, int r) {
    X* const own = tiles.own(0, r);
    float x[kRows][kUnits], mean[kRows] = {}, rstd[kRows];
    load_rows(own, columns, 0.0f, x);
    if constexpr (!kRms) {
#pragma unroll
      for (int k = 0; k < kRows; ++k)
        mean[k] = chain_sum<kUnits>([&](int i, float sum) { return sum + x[k][i]; });
      reduce_each(mean, SumOf(),
                  [&](float sum) { return quotient(sum + 0.0f, out.cols, out.per_cols); });
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) x[k][i] = columns.inside(i) ? x[k][i] - mean[k] : 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k)
      rstd[k] = chain_sum<kUnits>([&](int i, float sum) { return fmaf(x[k][i], x[k][i], sum); });
    reduce_each(rstd, SumOf(), [&](float squares) { return out.rstd_of(squares).nearest(); });
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const float xhat = x[k][i] * rstd[k];
        x[k][i] = kRms ? xhat * weight[i] : fmaf(xhat, weight[i], bias[i]);
      }
    }
    store_rows(own, columns, x);
    const int64_t row = tiles.first_row() + r + lane;
    if (lane < kRows && row < tensors.rows)
      out.write(row, of_lane(mean, lane), of_lane(rstd, lane), kRms);
  });
}

// All forms in one kernel a type, which branches once.
template <typename X>
__global__ void __launch_bounds__(kFlatThreads, kForwardTileBlocks)
    norm_forward_flat(const __grid_constant__ TileTensors<X, 1> tensors,
                      const __grid_constant__ FlatRows flat,
                      const __grid_constant__ AffineStore<X> store,
                      const __grid_constant__ FlatStatistics<X> out, bool rms) {
  with_row_class<0, kForwardTileClasses>(flat, rms, [&](auto is_rms, auto row_class) {
    norm_tiles<decltype(is_rms)::value, decltype(row_class)::value>(tensors, flat, store, out);
  });
}

cudaError_t norm_flat_forward(const NormForwardParams& params, const NormForwardPlan& plan,
                              cudaStream_t stream) {
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto type) {
    using X = decltype(type);
    const TileTensors<X, 1> tensors{
        {{params.x, params.x_layout}}, params.y, params.rows, params.cols};
    return launch_tiles(norm_forward_flat<X>, tensors, plan.tiles, stream, affine_store<X>(params),
                        statistics_out<InputLoad<X>, X>(params), params.rms);
  });
}

}  // namespace fused_norm
