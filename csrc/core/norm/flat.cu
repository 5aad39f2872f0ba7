// Forward for short rows of one 16-bit dtype that are not whole packs: they pass through shared
// memory in tiles, and each lane of a warp has some of a row's columns (warp_rows.cuh).
#include "core/common/branch.cuh"
#include "core/common/tile_ring.cuh"
#include "core/common/warp_rows.cuh"
#include "core/norm/forward.cuh"
#include "core/norm/launch.cuh"

namespace fused_norm {

// What the kernel reads and writes.
template <typename X>
struct FlatForward {
  TileTensors<X, 1> tensors;  // x, in whose place comes y
  AffineStore<X> store;
  StatisticsOf<InputLoad<X>, AffineStore<X>> out;
  FlatRows flat;
};

// The sum of a lane's values of a row: two chains.
template <int kUnits, typename Map>
__device__ __forceinline__ float chain_sum(const float (&x)[kUnits], Map map) {
  float chains[2] = {map(x[0], 0.0f), map(x[1], 0.0f)};
#pragma unroll
  for (int i = 2; i < kUnits; ++i) chains[i % 2] = map(x[i], chains[i % 2]);
  return chains[0] + chains[1];
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
__device__ __forceinline__ void norm_forward_tiles(const FlatForward<X>& of, CopyBarrier* filled) {
  constexpr int kUnits = kForwardTileUnits[kClass], kRows = forward_tile_rows(kUnits);
  extern __shared__ __align__(128) char memory[];
  const int cols = of.tensors.cols, lane = threadIdx.x % kWarpSize;
  const LaneColumns<kUnits, sure_units(kForwardTileUnits, kClass)> columns(cols);
  TileRing<X, 1> tiles(of.tensors, of.flat, filled, memory);
  float weight[kUnits], bias[kRms ? 1 : kUnits] = {};
  auto load_params = [&] {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) weight[i] = 1;
    if (of.store.weight.data) {
      load_columns<X>(of.store.weight, columns, weight);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) weight[i] += of.store.weight_offset;
    }
    if constexpr (!kRms) {
      if (of.store.bias.data) load_columns<X>(of.store.bias, columns, bias);
    }
  };
  for_tiles<kRows>(tiles, of.flat, load_params, [&](int r) {
    X* const own = tiles.part(0) + r * cols + columns.first;
    float x[kRows][kUnits], mean[kRows] = {}, rstd[kRows];
    load_rows(own, cols, columns, 0.0f, x);
    if constexpr (!kRms) {
#pragma unroll
      for (int k = 0; k < kRows; ++k)
        mean[k] = chain_sum(x[k], [](float value, float sum) { return sum + value; });
      reduce_each(mean, SumOf(),
                  [&](float sum) { return quotient(sum + 0.0f, of.out.cols, of.out.per_cols); });
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) x[k][i] = columns.inside(i) ? x[k][i] - mean[k] : 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k)
      rstd[k] = chain_sum(x[k], [](float value, float sum) { return fmaf(value, value, sum); });
    reduce_each(rstd, SumOf(), [&](float squares) { return of.out.rstd_of(squares).nearest(); });
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const float xhat = x[k][i] * rstd[k];
        x[k][i] = kRms ? xhat * weight[i] : fmaf(xhat, weight[i], bias[i]);
      }
    }
    store_rows(own, cols, columns, x);
    const int64_t row = tiles.first_row() + r + lane;
    if (lane < kRows && row < of.tensors.rows)
      of.out.write(row, of_lane(mean, lane), of_lane(rstd, lane), kRms);
  });
}

// All forms in one kernel a type, which branches once.
template <typename X>
__global__ void __launch_bounds__(kFlatThreads, kForwardTileBlocks)
    norm_forward_flat(const __grid_constant__ FlatForward<X> of, bool rms) {
#if __CUDA_ARCH__ >= 900
  __shared__ CopyBarrier filled[kFlatSlots];
  with_flag(rms, [&](auto is_rms) {
    with_number<0, kForwardTileClasses>(of.flat.row_class, [&](auto row_class) {
      norm_forward_tiles<decltype(is_rms)::value, decltype(row_class)::value>(of, filled);
    });
  });
#else
  __trap();  // no plan asks for it
#endif
}

cudaError_t norm_flat_forward(const NormForwardParams& params, const NormForwardPlan& plan,
                              cudaStream_t stream) {
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto type) {
    using X = decltype(type);
    const TileRows<X> x{static_cast<const X*>(params.x), params.x_layout};
    const FlatForward<X> of{tile_tensors(static_cast<X*>(params.y), params.rows, params.cols, x),
                            affine_store<X>(params), statistics_out<InputLoad<X>, X>(params),
                            plan.tiles};
    return launch(norm_forward_flat<X>, plan.tiles.blocks, kFlatThreads,
                  {plan.tiles.shared_bytes, 1, plan.overlaps}, stream, of, params.rms);
  });
}

}  // namespace fused_norm
