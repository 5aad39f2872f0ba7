#include "core/common/launch.cuh"
#include "core/softmax/flat.cuh"
#include "core/softmax/launch.h"

namespace fused_norm {
namespace {

template <typename T>
Rows<T> rows_of(const void* data, const RowLayout& layout, int64_t rows, int cols) {
  return {static_cast<const T*>(data), layout, rows, cols};
}

template <typename Kernel, typename From, typename To>
cudaError_t run(Kernel kernel, const SoftmaxPlan& plan, cudaStream_t stream, const From& from,
                To* to, bool log, bool lie_flat) {
  return detail::launch(kernel, plan.blocks, kFlatThreads, {plan.shared_bytes, 1, plan.overlaps},
                        stream, from, to, log, lie_flat, plan.flat);
}

}  // namespace

cudaError_t softmax_in_tiles(const SoftmaxForwardParams& params, const SoftmaxPlan& plan,
                             cudaStream_t stream) {
  const int cols = params.cols;
  const bool lie_flat =
      lies_flat(params.x, params.x_layout, cols) && lies_flat(params.y, one_stride(cols), cols);
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto type) {
    using X = decltype(type);
    return run(softmax_forward_flat<X>, plan, stream,
               rows_of<X>(params.x, params.x_layout, params.rows, cols), static_cast<X*>(params.y),
               params.log, lie_flat);
  });
}

cudaError_t softmax_in_tiles(const SoftmaxBackwardParams& params, const SoftmaxPlan& plan,
                             cudaStream_t stream) {
  const int cols = params.cols;
  const bool lie_flat = lies_flat(params.y, params.y_layout, cols) &&
                        lies_flat(params.dy, params.dy_layout, cols) &&
                        lies_flat(params.dx, one_stride(cols), cols);
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto type) {
    using X = decltype(type);
    const GradientLoad<X> load{rows_of<X>(params.dy, params.dy_layout, params.rows, cols),
                               rows_of<X>(params.y, params.y_layout, params.rows, cols),
                               static_cast<float>(params.scale)};
    return run(plan.flat.row_class < kShorterSoftmaxClasses ? softmax_backward_flat<X, false>
                                                            : softmax_backward_flat<X, true>,
               plan, stream, load, static_cast<X*>(params.dx), params.log, lie_flat);
  });
}

}  // namespace fused_norm
