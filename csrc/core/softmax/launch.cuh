// From parameters to a kernel: the plan, made into an instantiation.
#pragma once

#include "core/common/launch.cuh"
#include "core/softmax/backward_ring.cuh"
#include "core/softmax/columns.cuh"
#include "core/softmax/forward_ring.cuh"
#include "core/softmax/launch.h"

namespace fused_norm {

// Of RowPlace::kFlat, for 16-bit types: flat.cu.
template <typename X>
cudaError_t softmax_flat_forward(const Rows<X>& x, X* y, bool log, const SoftmaxPlan& plan,
                                 cudaStream_t stream);
template <typename X>
cudaError_t softmax_flat_backward(const GradientLoad<X>& load, X* dx, bool log,
                                  const SoftmaxPlan& plan, cudaStream_t stream);

namespace detail {

// Launches kernels over rows.
struct RowLaunch {
  const SoftmaxPlan& plan;
  bool regular, log;
  cudaStream_t stream;

  template <typename Kernel, typename Load, typename Store, typename... Flags>
  cudaError_t run(Kernel kernel, const Load& load, const Store& store, Flags... flags) const {
    return launch(kernel, plan.blocks, dim3(plan.threads_per_row, plan.rows_per_block),
                  {plan.shared_bytes, plan.cluster_blocks, plan.overlap}, stream, load, store,
                  regular, log, flags...);
  }
};

template <typename Load>
cudaError_t launch_forward(const Load& load, const ForwardStore<Load>& store, const RowLaunch& to) {
  using X = typename Load::Input;
  const SoftmaxPlan& plan = to.plan;
  if (plan.tier == SoftmaxTier::kUncached || plan.place == RowPlace::kShared)
    return to.run(softmax_forward_stream<Load>, load, store, plan.slice,
                  plan.place == RowPlace::kShared);
  if constexpr (!std::is_same_v<X, double>) {
    if constexpr (!Load::kMasked) {
      if constexpr (sizeof(X) == 2) {
        if (plan.place == RowPlace::kFlat)
          return softmax_flat_forward(load.x, static_cast<X*>(store.data), to.log, plan, to.stream);
      }
      if (plan.place == RowPlace::kRing)
        return to.run(softmax_forward_ring<X>, load,
                      BoundaryStore<X, ResultTypes::kWider>{store.data, store.dtype, store.cols},
                      plan.slice, plan.pieces, plan.slots);
    }
    if (plan.tier == SoftmaxTier::kWarp)
      return plan.packs == 2 ? to.run(softmax_forward_warp<Load, 2>, load, store)
                             : to.run(softmax_forward_warp<Load, 4>, load, store);
    return plan.packs == 4 ? to.run(softmax_forward_block<Load, 4>, load, store)
                           : to.run(softmax_forward_block<Load, 8>, load, store);
  }
  return cudaErrorInvalidValue;
}

template <typename Y>
cudaError_t launch_backward(const GradientLoad<Y>& load, const BackwardStore<Y>& store,
                            const RowLaunch& to) {
  const SoftmaxPlan& plan = to.plan;
  if (plan.tier == SoftmaxTier::kUncached)
    return to.run(softmax_backward_stream<Y>, load, store, plan.slice);
  if constexpr (!std::is_same_v<Y, double>) {
    if constexpr (sizeof(Y) == 2) {
      if (plan.place == RowPlace::kFlat)
        return softmax_flat_backward(load, static_cast<Y*>(store.data), to.log, plan, to.stream);
    }
    if (plan.place == RowPlace::kRing)
      return to.run(softmax_backward_ring<Y>, load,
                    BoundaryStore<Y, ResultTypes::kNarrower>{store.data, store.dtype, store.cols},
                    plan.slice, plan.pieces, plan.slots);
    if (plan.tier == SoftmaxTier::kWarp)
      return plan.packs == 2 ? to.run(softmax_backward_warp<Y, 2>, load, store)
                             : to.run(softmax_backward_warp<Y, 4>, load, store);
    return plan.packs == 4 ? to.run(softmax_backward_block<Y, 4>, load, store)
                           : to.run(softmax_backward_block<Y, 8>, load, store);
  }
  return cudaErrorInvalidValue;
}

}  // namespace detail

template <typename X>
cudaError_t softmax_of(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream) {
  using A = Accumulator<X>;
  const Rows<X> x{static_cast<const X*>(params.x), params.x_layout, params.rows, params.cols};
  const RoundedStore<X, ResultTypes::kWider> store{params.y, params.y_dtype, params.rows,
                                                   params.cols};
  const bool regular =
      is_regular(params.x, params.x_layout, params.cols, plan.pack, params.x_dtype) &&
      is_regular(params.y, one_stride(params.cols), params.cols, plan.pack, params.y_dtype);
  const detail::RowLaunch to{plan, regular, params.log, stream};
  if (plan.pass == SoftmaxPass::kForward) return detail::launch_forward(PlainLoad<X>{x}, store, to);
  const MaskedLoad<X> load{x, static_cast<A>(params.scale), params.mask, params.causal,
                           make_divider(params.causal ? params.queries : 1)};
  return detail::launch_forward(load, store, to);
}

template <typename Y>
cudaError_t softmax_of(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream) {
  const Rows<Y> dy{static_cast<const Y*>(params.dy), params.dy_layout, params.rows, params.cols};
  const Rows<Y> y{static_cast<const Y*>(params.y), params.y_layout, params.rows, params.cols};
  const GradientLoad<Y> load{dy, y, static_cast<Accumulator<Y>>(params.scale)};
  const BackwardStore<Y> store{params.dx, params.x_dtype, params.rows, params.cols};
  const bool regular =
      is_regular(params.dy, params.dy_layout, params.cols, plan.pack, params.y_dtype) &&
      is_regular(params.y, params.y_layout, params.cols, plan.pack, params.y_dtype) &&
      is_regular(params.dx, one_stride(params.cols), params.cols, plan.pack, params.x_dtype);
  return detail::launch_backward(load, store, detail::RowLaunch{plan, regular, params.log, stream});
}

template <typename X>
cudaError_t softmax_of(const SoftmaxColumnsForwardParams& params, const SoftmaxColumnsPlan& plan,
                       cudaStream_t stream) {
  const int64_t inner_packs = params.inner / plan.pack;
  const ColumnsShape shape{params.outer * inner_packs, inner_packs, params.cols};
  auto run = [&](auto kernel) {
    return detail::launch(kernel, plan.blocks, dim3(plan.lanes, plan.splits), {plan.shared_bytes},
                          stream, static_cast<const X*>(params.x), params.y, params.y_dtype, shape,
                          params.log, plan.shared_bytes > 0);
  };
  if constexpr (!std::is_same_v<X, double>) {
    if (plan.pack > 1) return run(softmax_columns_forward<X, kPackElements<X>>);
  }
  return run(softmax_columns_forward<X, 1>);
}

template <typename Y>
cudaError_t softmax_of(const SoftmaxColumnsBackwardParams& params, const SoftmaxColumnsPlan& plan,
                       cudaStream_t stream) {
  const int64_t inner_packs = params.inner / plan.pack;
  const ColumnsShape shape{params.outer * inner_packs, inner_packs, params.cols};
  auto run = [&](auto kernel) {
    return detail::launch(kernel, plan.blocks, dim3(plan.lanes, plan.splits), {plan.shared_bytes},
                          stream, static_cast<const Y*>(params.dy), static_cast<const Y*>(params.y),
                          params.dx, params.x_dtype, shape, params.log, plan.shared_bytes > 0);
  };
  if constexpr (!std::is_same_v<Y, double>) {
    if (plan.pack > 1) return run(softmax_columns_backward<Y, kPackElements<Y>>);
  }
  return run(softmax_columns_backward<Y, 1>);
}

}  // namespace fused_norm
