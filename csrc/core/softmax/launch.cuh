// From parameters to a kernel of rows in registers or a ring: the plan, made into an instantiation.
// Each dtype of what is read is one translation unit.
#pragma once

#include "core/common/launch.cuh"
#include "core/softmax/backward_ring.cuh"
#include "core/softmax/forward_ring.cuh"
#include "core/softmax/launch.h"

namespace fused_norm {
// Rows of a warp whose results are 16 bit have a kernel of their own for the most packs a thread,
// as the others would lose by its registers, and it by theirs (docs/measurements.md).
template <typename Result>
constexpr bool kSeveralWarpKernels = sizeof(Result) == 2;

template <typename X, typename Y>
cudaError_t softmax_as(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream) {
  using Store = RoundedStore<Y>;
  const Rows<X> x{static_cast<const X*>(params.x), params.x_layout, params.rows, params.cols};
  const Store store{static_cast<Y*>(params.y), params.rows, params.cols};
  const bool regular = params.cols % plan.pack == 0 &&
                       start_on_packs(params.x, params.x_dtype, params.x_layout, plan.pack) &&
                       start_on_packs(params.y, params.y_dtype, {}, plan.pack);
  auto run = [&](auto kernel, const auto& load, auto... numbers) {
    return launch_plan(kernel, plan, stream, load, store, regular, params.log, numbers...);
  };
  auto run_load = [&](const auto& load) {
    using Load = std::decay_t<decltype(load)>;
    if (plan.tier == SoftmaxTier::kWarp) {
      if constexpr (kSeveralWarpKernels<Y>)
        return run(plan.packs == 4 ? softmax_forward_warp<Load, Store, 4>
                                   : softmax_forward_warp<Load, Store, 1, 2>,
                   load, plan.packs);
      else
        return run(softmax_forward_warp<Load, Store, 1, 2, 4>, load, plan.packs);
    }
    if constexpr (!Load::kMasked) {
      if (plan.packs == 8) return run(softmax_forward_block<Load, Store, 8>, load);
    }
    return run(softmax_forward_block<Load, Store, 4>, load);
  };
  if (plan.pass == SoftmaxPass::kMaskedForward)
    return run_load(MaskedLoad<X>{x, static_cast<float>(params.scale), score_mask_of(params)});
  if (plan.place == RowPlace::kRing)
    return run(softmax_forward_ring<X, Y>, PlainLoad<X>{x}, plan.slice, plan.pieces, plan.slots);
  return run_load(PlainLoad<X>{x});
}

template <typename Y, typename X>
cudaError_t softmax_as(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream) {
  using Store = RoundedStore<X>;
  const Rows<Y> dy{static_cast<const Y*>(params.dy), params.dy_layout, params.rows, params.cols};
  const Rows<Y> y{static_cast<const Y*>(params.y), params.y_layout, params.rows, params.cols};
  const GradientLoad<Y> load{dy, y, static_cast<float>(params.scale)};
  const Store store{static_cast<X*>(params.dx), params.rows, params.cols};
  const bool regular = params.cols % plan.pack == 0 &&
                       start_on_packs(params.dy, params.y_dtype, params.dy_layout, plan.pack) &&
                       start_on_packs(params.y, params.y_dtype, params.y_layout, plan.pack) &&
                       start_on_packs(params.dx, params.x_dtype, {}, plan.pack);
  auto run = [&](auto kernel, auto... numbers) {
    return launch_plan(kernel, plan, stream, load, store, regular, params.log, numbers...);
  };
  if (plan.place == RowPlace::kRing)
    return run(softmax_backward_ring<Y, X>, plan.slice, plan.pieces, plan.slots);
  if (plan.tier == SoftmaxTier::kWarp) {
    if constexpr (kSeveralWarpKernels<X>)
      return run(plan.packs == 4 ? softmax_backward_warp<Y, Store, 4>
                                 : softmax_backward_warp<Y, Store, 1, 2>,
                 plan.packs);
    else
      return run(softmax_backward_warp<Y, Store, 1, 2, 4>, plan.packs);
  }
  return run(plan.packs == 4 ? softmax_backward_block<Y, Store, 4>
                             : softmax_backward_block<Y, Store, 8>);
}

template <typename T>
cudaError_t SoftmaxOf<T>::run(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                              cudaStream_t stream) {
  return with_dtype<T, float>(
      params.y_dtype, [&](auto y) { return softmax_as<T, decltype(y)>(params, plan, stream); });
}

template <typename T>
cudaError_t SoftmaxOf<T>::run(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                              cudaStream_t stream) {
  auto run = [&](auto x) { return softmax_as<T, decltype(x)>(params, plan, stream); };
  if constexpr (std::is_same_v<T, float>)
    return with_dtype<float, __half, __nv_bfloat16>(params.x_dtype, run);
  return run(T());
}

}  // namespace fused_norm
