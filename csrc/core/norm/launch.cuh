// From parameters to a kernel: the plan, made into an instantiation. Each dtype of x is one
// translation unit.
#pragma once

#include "core/norm/backward.cuh"
#include "core/norm/backward_streaming.cuh"
#include "core/norm/forward.cuh"
#include "core/norm/norm.h"
#include "core/norm/plan.h"

namespace fused_norm {

// Whether every row starts on a pack boundary and is a whole number of packs (common/pack.cuh).
inline bool is_regular(const void* data, const RowLayout& layout, int64_t cols, int pack,
                       DType dtype) {
  const int64_t bytes = int64_t{pack} * size_of(dtype);
  return reinterpret_cast<uintptr_t>(data) % bytes == 0 && cols % pack == 0 &&
         layout.stride % pack == 0 && layout.outer_stride % pack == 0;
}

// One of these a dtype of x, in f16.cu, bf16.cu, f32.cu and f64.cu.
template <typename X>
cudaError_t norm_forward_of(const NormForwardParams& params, const NormPlan& plan,
                            cudaStream_t stream);
template <typename X>
cudaError_t norm_backward_of(const NormBackwardParams& params, const NormBackwardPlan& plan,
                             cudaStream_t stream);

// Calls launch(T{}) with the type of `dtype`, which must be one of Ts.
template <typename... Ts, typename Launch>
cudaError_t with_dtype(DType dtype, Launch launch);

namespace detail {

// How a kernel is launched, beyond its grid.
struct LaunchOptions {
  int shared_bytes = 0;
  int cluster_blocks = 1;
  bool overlaps_previous =
      false;  // the kernel itself waits for the one before (programmatic dependent launch)
};

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 threads, const LaunchOptions& options,
                   cudaStream_t stream, const Args&... args) {
  // 48 KB need no leave; kernels also have up to 5 KB of static shared memory.
  if (options.shared_bytes > 43 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, options.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = options.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (options.cluster_blocks > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(options.cluster_blocks),
                                                    1, 1};
  }
  if (options.overlaps_previous) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, Params(args)...);
  return error == cudaSuccess ? cudaGetLastError() : error;
}

}  // namespace detail

template <typename... Ts, typename Launch>
cudaError_t with_dtype(DType dtype, Launch launch) {
  cudaError_t result = cudaErrorInvalidValue;
  ((dtype == kDTypeOf<Ts> ? (result = launch(Ts()), true) : false) || ...);
  return result;
}

template <typename X, typename Y>
cudaError_t norm_forward_as(const NormForwardParams& params, const NormPlan& plan,
                            cudaStream_t stream) {
  using A = Accumulator<X>;
  const InputLoad<X> load{static_cast<const X*>(params.x), params.x_layout, params.rows,
                          params.cols};
  const AffineStore<Y> store{static_cast<Y*>(params.y),
                             params.rows,
                             params.cols,
                             params.weight,
                             params.bias,
                             static_cast<Accumulator<Y>>(params.weight_offset)};
  const StatisticsOf<InputLoad<X>, AffineStore<Y>> out{
      static_cast<A*>(params.mean), static_cast<A*>(params.rstd), static_cast<A>(params.eps),
      static_cast<A>(params.cols), A(1) / params.cols};
  const dim3 threads(plan.threads_per_row, plan.rows_per_block);
  const bool regular =
      is_regular(params.x, params.x_layout, params.cols, plan.pack, params.x_dtype) &&
      is_regular(params.y, one_stride(params.cols), params.cols, plan.pack, params.y_dtype);
  auto run = [&](auto kernel, auto... flags) {
    return detail::launch(kernel, plan.blocks, threads, {0, plan.cluster_blocks, plan.overlaps},
                          stream, load, store, out, flags...);
  };
  auto run_packs = [&](auto rms) {
    constexpr bool kRms = decltype(rms)::value;
    using Load = InputLoad<X>;
    using Store = AffineStore<Y>;
    if (plan.tier == Tier::kStreaming) {
      return run(norm_forward_streaming<Load, Store, kRms>);
    }
    if constexpr (!std::is_same_v<X, double>) {
      switch (plan.packs) {
        case 1:
          return run(norm_forward_registers<Load, Store, kRms, 1>, regular);
        case 2:
          return run(norm_forward_registers<Load, Store, kRms, 2>, regular);
        case 3:
          return run(norm_forward_registers<Load, Store, kRms, 3>, regular);
        default:
          return run(norm_forward_registers<Load, Store, kRms, 4>, regular);
      }
    }
    return cudaErrorInvalidValue;
  };
  return params.rms ? run_packs(std::true_type()) : run_packs(std::false_type());
}

template <typename X, typename Y, bool kFromOutput>
cudaError_t norm_backward_as(const NormBackwardParams& params, const NormBackwardPlan& plan,
                             cudaStream_t stream) {
  using A = Accumulator<X>;
  using S = std::conditional_t<kFromOutput, Y, X>;
  const BackwardInput<Y, S, A> in{params.rows,
                                  params.cols,
                                  params.from_output,
                                  static_cast<const Y*>(params.dy),
                                  params.dy_layout,
                                  static_cast<const S*>(params.saved),
                                  params.saved_layout,
                                  static_cast<const A*>(params.mean),
                                  static_cast<const A*>(params.rstd),
                                  params.weight,
                                  params.bias,
                                  static_cast<A>(params.weight_offset)};
  A* const partials = static_cast<A*>(params.workspace);
  const int64_t partial_size = int64_t{plan.partials} * params.cols;
  const BackwardOutput<X, A> out{static_cast<X*>(params.dx), params.dweight ? partials : nullptr,
                                 params.dbias ? partials + partial_size : nullptr};

  cudaError_t error = cudaErrorInvalidValue;
  const dim3 threads(plan.threads_per_row, plan.rows_per_block);
  if (plan.tier == Tier::kStreaming) {
    A* const means = partials + 2 * partial_size;
    if (params.dx) {
      error = detail::launch(norm_backward_row_means<Y, S, A>, plan.blocks, threads, {}, stream, in,
                             means);
      if (error != cudaSuccess) return error;
    }
    const dim3 grid(plan.tiles, plan.partials);
    error = detail::launch(norm_backward_columns<X, Y, S, A>, grid, kTileThreads, {}, stream, in,
                           out, static_cast<const A*>(means), params.rms);
  } else if constexpr (!std::is_same_v<X, double>) {
    constexpr int N = 16 / std::max(sizeof(X), sizeof(Y));
    const bool regular =
        is_regular(params.dy, params.dy_layout, params.cols, plan.pack, params.y_dtype) &&
        is_regular(params.saved, params.saved_layout, params.cols, plan.pack, kDTypeOf<S>) &&
        is_regular(params.dx, one_stride(params.cols), params.cols, plan.pack, params.x_dtype);
    auto run = [&](auto kernel) {
      return detail::launch(kernel, plan.blocks, threads,
                            {plan.shared_bytes, plan.cluster_blocks, plan.overlaps}, stream, in,
                            out, regular);
    };
    auto run_packs = [&](auto rms) {
      constexpr bool kRms = decltype(rms)::value;
      switch (plan.packs) {
        case 1:
          return run(norm_backward_registers<X, Y, S, kRms, kFromOutput, 1>);
        case 2:
          return run(norm_backward_registers<X, Y, S, kRms, kFromOutput, 2>);
        default:
          if constexpr (N == 4) return run(norm_backward_registers<X, Y, S, kRms, kFromOutput, 4>);
          return cudaErrorInvalidValue;
      }
    };
    error = params.rms ? run_packs(std::true_type()) : run_packs(std::false_type());
  }
  if (error != cudaSuccess || (!params.dweight && !params.dbias)) return error;

  PartialSums<A> sums{};
  int count = 0;
  auto add = [&](void* gradient, const A* from, DType dtype) {
    if (!gradient) return;
    sums.partials[count] = from;
    sums.out[count] = gradient;
    sums.dtype[count++] = dtype;
  };
  add(params.dweight, out.dweight_partials, params.weight.dtype);
  add(params.dbias, out.dbias_partials, params.bias.dtype);
  const dim3 grid((params.cols + kWarpSize - 1) / kWarpSize, count);
  return detail::launch(sum_partials<A>, grid, kWarpSize * kSumWarps, {0, 1, plan.overlaps}, stream,
                        sums, plan.partials, static_cast<int>(params.cols));
}

// Defines norm_forward_of<X> and norm_backward_of<X> for outputs of X or one of Others.
template <typename X, typename... Others>
cudaError_t dispatch_forward(const NormForwardParams& params, const NormPlan& plan,
                             cudaStream_t stream) {
  return with_dtype<X, Others...>(params.y_dtype, [&](auto y) {
    return norm_forward_as<X, decltype(y)>(params, plan, stream);
  });
}

template <typename X, typename... Others>
cudaError_t dispatch_backward(const NormBackwardParams& params, const NormBackwardPlan& plan,
                              cudaStream_t stream) {
  return with_dtype<X, Others...>(params.y_dtype, [&](auto y) {
    using Y = decltype(y);
    if (params.from_output) return norm_backward_as<X, Y, true>(params, plan, stream);
    return norm_backward_as<X, Y, false>(params, plan, stream);
  });
}

}  // namespace fused_norm
