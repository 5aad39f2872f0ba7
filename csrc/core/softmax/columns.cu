#include "core/common/launch.cuh"
#include "core/softmax/columns.cuh"
#include "core/softmax/softmax.h"

namespace fused_norm {
namespace {

bool is_aligned(const void* data, int pack, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % (pack * size_of(dtype)) == 0;
}

template <typename X, typename Y, int N>
cudaError_t run(const SoftmaxColumnsForwardParams& params, const SoftmaxColumnsPlan& plan,
                const ColumnsShape& shape, cudaStream_t stream) {
  return detail::launch(softmax_columns_forward<X, Y, N>, plan.blocks,
                        dim3(plan.lanes, plan.splits), {plan.shared_bytes}, stream,
                        static_cast<const X*>(params.x), static_cast<Y*>(params.y), shape,
                        params.log, plan.shared_bytes > 0);
}

template <typename X, typename Y, int N>
cudaError_t run(const SoftmaxColumnsBackwardParams& params, const SoftmaxColumnsPlan& plan,
                const ColumnsShape& shape, cudaStream_t stream) {
  return detail::launch(softmax_columns_backward<X, Y, N>, plan.blocks,
                        dim3(plan.lanes, plan.splits), {plan.shared_bytes}, stream,
                        static_cast<const Y*>(params.dy), static_cast<const Y*>(params.y),
                        static_cast<X*>(params.dx), shape, params.log, plan.shared_bytes > 0);
}

// `aligned`: whether all tensors are aligned to a pack.
template <typename Params>
cudaError_t run_columns(bool backward, bool aligned, const Params& params,
                        const DeviceProperties& device, cudaStream_t stream) {
  const bool vectorized = params.x_dtype != DType::kFloat64 && aligned &&
                          params.inner % pack_elements(params.x_dtype, params.y_dtype) == 0;
  const SoftmaxColumnsPlan plan =
      plan_softmax_columns(backward, vectorized, params.outer, params.cols, params.inner,
                           params.x_dtype, params.y_dtype, device);
  const int64_t inner_packs = params.inner / plan.pack;
  const ColumnsShape shape{params.outer * inner_packs, inner_packs, params.cols};
  if (params.x_dtype == DType::kFloat64) return run<double, double, 1>(params, plan, shape, stream);
  return with_dtype<__half, __nv_bfloat16, float>(params.x_dtype, [&](auto x) {
    using X = decltype(x);
    return with_dtype<X, float>(params.y_dtype, [&](auto y) {
      using Y = decltype(y);
      return vectorized ? run<X, Y, kPackElements<X, Y>>(params, plan, shape, stream)
                        : run<X, Y, 1>(params, plan, shape, stream);
    });
  });
}

}  // namespace

cudaError_t launch_softmax_columns_forward(const SoftmaxColumnsForwardParams& params,
                                           const DeviceProperties& device, cudaStream_t stream) {
  const int pack = pack_elements(params.x_dtype, params.y_dtype);
  const bool aligned =
      is_aligned(params.x, pack, params.x_dtype) && is_aligned(params.y, pack, params.y_dtype);
  return run_columns(false, aligned, params, device, stream);
}

cudaError_t launch_softmax_columns_backward(const SoftmaxColumnsBackwardParams& params,
                                            const DeviceProperties& device, cudaStream_t stream) {
  const int pack = pack_elements(params.x_dtype, params.y_dtype);
  const bool aligned = is_aligned(params.dx, pack, params.x_dtype) &&
                       is_aligned(params.dy, pack, params.y_dtype) &&
                       is_aligned(params.y, pack, params.y_dtype);
  return run_columns(true, aligned, params, device, stream);
}

}  // namespace fused_norm
