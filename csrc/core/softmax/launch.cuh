// From parameters to a kernel: the plan, made into an instantiation. Each dtype of x is one
// translation unit.
#pragma once

#include "core/common/launch.cuh"
#include "core/softmax/backward_ring.cuh"
#include "core/softmax/columns.cuh"
#include "core/softmax/forward_ring.cuh"
#include "core/softmax/plan.h"
#include "core/softmax/softmax.h"

namespace fused_norm {

// Runs a plan. One of each a dtype of x, in f16.cu, bf16.cu, f32.cu and f64.cu.
template <typename X>
cudaError_t softmax_of(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream);
template <typename X>
cudaError_t softmax_of(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream);
template <typename X>
cudaError_t softmax_of(const SoftmaxColumnsForwardParams& params, const SoftmaxColumnsPlan& plan,
                       cudaStream_t stream);
template <typename X>
cudaError_t softmax_of(const SoftmaxColumnsBackwardParams& params, const SoftmaxColumnsPlan& plan,
                       cudaStream_t stream);

// Of RowPlace::kFlat, for 16-bit types: flat.cu.
template <typename X>
cudaError_t softmax_flat_forward(const Rows<X>& x, X* y, bool log, const SoftmaxPlan& plan,
                                 cudaStream_t stream);
template <typename X>
cudaError_t softmax_flat_backward(const GradientLoad<X>& load, X* dx, bool log,
                                  const SoftmaxPlan& plan, cudaStream_t stream);

namespace detail {

template <typename Load, typename Store>
cudaError_t launch_forward(const Load& load, const Store& store, bool regular, bool log,
                           const SoftmaxPlan& plan, cudaStream_t stream) {
  const dim3 threads(plan.threads_per_row, plan.rows_per_block);
  auto run_with = [&](auto kernel, const auto& store, auto... flags) {
    return launch(kernel, plan.blocks, threads,
                  {plan.shared_bytes, plan.cluster_blocks, plan.overlap}, stream, load, store,
                  regular, log, flags...);
  };
  auto run = [&](auto kernel, auto... flags) { return run_with(kernel, store, flags...); };
  using X = typename Load::Input;
  if (plan.tier == SoftmaxTier::kUncached || plan.place == RowPlace::kShared) {
    return run(softmax_forward_stream<Load, Store>, plan.slice, plan.place == RowPlace::kShared);
  }
  if constexpr (!std::is_same_v<X, double>) {
    if constexpr (!Load::kMasked && std::is_same_v<X, typename Store::Output>) {
      if constexpr (sizeof(X) == 2) {
        if (plan.place == RowPlace::kFlat)
          return softmax_flat_forward(load.x, store.data, log, plan, stream);
      }
      if (plan.place == RowPlace::kRing) {
        const BoundaryStore<X> at_boundaries{store.data, store.cols};
        return run_with(softmax_forward_ring<X>, at_boundaries, plan.slice, plan.pieces,
                        plan.slots);
      }
    }
    if (plan.tier == SoftmaxTier::kWarp) {
      if constexpr (!Load::kMasked) {
        if (plan.packs == 1) return run(softmax_forward_warp<Load, Store, 1>);
      }
      return plan.packs <= 2 ? run(softmax_forward_warp<Load, Store, 2>)
                             : run(softmax_forward_warp<Load, Store, 4>);
    }
    return plan.packs == 4 ? run(softmax_forward_block<Load, Store, 4>)
                           : run(softmax_forward_block<Load, Store, 8>);
  }
  return cudaErrorInvalidValue;
}

template <typename Y, typename X>
cudaError_t launch_backward(const GradientLoad<Y>& load, const RoundedStore<X>& store, bool regular,
                            bool log, const SoftmaxPlan& plan, cudaStream_t stream) {
  const dim3 threads(plan.threads_per_row, plan.rows_per_block);
  auto run_with = [&](auto kernel, const auto& store, auto... flags) {
    return launch(kernel, plan.blocks, threads,
                  {plan.shared_bytes, plan.cluster_blocks, plan.overlap}, stream, load, store,
                  regular, log, flags...);
  };
  auto run = [&](auto kernel, auto... flags) { return run_with(kernel, store, flags...); };
  using Store = RoundedStore<X>;
  if (plan.tier == SoftmaxTier::kUncached)
    return run(softmax_backward_stream<Y, Store>, plan.slice);
  if constexpr (std::is_same_v<X, Y> && sizeof(X) == 2) {
    if (plan.place == RowPlace::kFlat)
      return softmax_flat_backward(load, store.data, log, plan, stream);
  }
  if constexpr (!std::is_same_v<Y, double>) {
    if (plan.place == RowPlace::kRing) {
      const AnyBoundaryStore<Y> at_boundaries{store.data, kDTypeOf<X>, store.cols};
      return run_with(softmax_backward_ring<Y>, at_boundaries, plan.slice, plan.pieces, plan.slots);
    }
    if (plan.tier == SoftmaxTier::kWarp) {
      switch (plan.packs) {
        case 1:
          return run(softmax_backward_warp<Y, Store, 1>);
        case 2:
          return run(softmax_backward_warp<Y, Store, 2>);
        default:
          return run(softmax_backward_warp<Y, Store, 4>);
      }
    }
    return plan.packs == 4 ? run(softmax_backward_block<Y, Store, 4>)
                           : run(softmax_backward_block<Y, Store, 8>);
  }
  return cudaErrorInvalidValue;
}

}  // namespace detail

template <typename X, typename Y>
cudaError_t softmax_as(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream) {
  using A = Accumulator<X>;
  const Rows<X> x{static_cast<const X*>(params.x), params.x_layout, params.rows, params.cols};
  const RoundedStore<Y> store{static_cast<Y*>(params.y), params.rows, params.cols};
  const bool regular =
      is_regular(params.x, params.x_layout, params.cols, plan.pack, params.x_dtype) &&
      is_regular(params.y, one_stride(params.cols), params.cols, plan.pack, params.y_dtype);
  if (plan.pass == SoftmaxPass::kForward) {
    return detail::launch_forward(PlainLoad<X>{x}, store, regular, params.log, plan, stream);
  }
  const MaskedLoad<X> load{x, static_cast<A>(params.scale), params.mask, params.causal,
                           make_divider(params.causal ? params.queries : 1)};
  return detail::launch_forward(load, store, regular, false, plan, stream);
}

template <typename X, typename Y>
cudaError_t softmax_as(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                       cudaStream_t stream) {
  const Rows<Y> dy{static_cast<const Y*>(params.dy), params.dy_layout, params.rows, params.cols};
  const Rows<Y> y{static_cast<const Y*>(params.y), params.y_layout, params.rows, params.cols};
  const GradientLoad<Y> load{dy, y, static_cast<Accumulator<Y>>(params.scale)};
  const RoundedStore<X> store{static_cast<X*>(params.dx), params.rows, params.cols};
  const bool regular =
      is_regular(params.dy, params.dy_layout, params.cols, plan.pack, params.y_dtype) &&
      is_regular(params.y, params.y_layout, params.cols, plan.pack, params.y_dtype) &&
      is_regular(params.dx, one_stride(params.cols), params.cols, plan.pack, params.x_dtype);
  return detail::launch_backward(load, store, regular, params.log, plan, stream);
}

template <typename X, typename Y>
cudaError_t softmax_as(const SoftmaxColumnsForwardParams& params, const SoftmaxColumnsPlan& plan,
                       cudaStream_t stream) {
  constexpr int N = kPackElements<X, Y>;
  const int64_t inner_packs = params.inner / plan.pack;
  const ColumnsShape shape{params.outer * inner_packs, inner_packs, params.cols};
  auto run = [&](auto kernel) {
    return detail::launch(kernel, plan.blocks, dim3(plan.lanes, plan.splits), {plan.shared_bytes},
                          stream, static_cast<const X*>(params.x), static_cast<Y*>(params.y), shape,
                          params.log, plan.shared_bytes > 0);
  };
  if constexpr (!std::is_same_v<X, double>) {
    if (plan.pack == N) return run(softmax_columns_forward<X, Y, N>);
  }
  return run(softmax_columns_forward<X, Y, 1>);
}

template <typename X, typename Y>
cudaError_t softmax_as(const SoftmaxColumnsBackwardParams& params, const SoftmaxColumnsPlan& plan,
                       cudaStream_t stream) {
  constexpr int N = kPackElements<X, Y>;
  const int64_t inner_packs = params.inner / plan.pack;
  const ColumnsShape shape{params.outer * inner_packs, inner_packs, params.cols};
  auto run = [&](auto kernel) {
    return detail::launch(kernel, plan.blocks, dim3(plan.lanes, plan.splits), {plan.shared_bytes},
                          stream, static_cast<const Y*>(params.dy), static_cast<const Y*>(params.y),
                          static_cast<X*>(params.dx), shape, params.log, plan.shared_bytes > 0);
  };
  if constexpr (!std::is_same_v<X, double>) {
    if (plan.pack == N) return run(softmax_columns_backward<X, Y, N>);
  }
  return run(softmax_columns_backward<X, Y, 1>);
}

// softmax_of<X>, for outputs of X or one of Others.
template <typename X, typename... Others, typename Params, typename Plan>
cudaError_t dispatch_softmax(const Params& params, const Plan& plan, cudaStream_t stream) {
  return with_dtype<X, Others...>(
      params.y_dtype, [&](auto y) { return softmax_as<X, decltype(y)>(params, plan, stream); });
}

}  // namespace fused_norm
