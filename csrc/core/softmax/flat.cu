#include "core/softmax/flat.cuh"
#include "core/softmax/launch.cuh"

namespace fused_norm {

template <typename X>
cudaError_t softmax_flat_forward(const Rows<X>& x, X* y, bool log, const SoftmaxPlan& plan,
                                 cudaStream_t stream) {
  const bool lie_flat =
      lies_flat(x.data, x.layout, x.cols) && lies_flat(y, one_stride(x.cols), x.cols);
  return detail::launch(softmax_forward_flat<X>, plan.blocks, kFlatThreads,
                        {plan.shared_bytes, 1, plan.overlap}, stream, x, y, log, lie_flat,
                        plan.flat);
}

template <typename X>
cudaError_t softmax_flat_backward(const GradientLoad<X>& load, X* dx, bool log,
                                  const SoftmaxPlan& plan, cudaStream_t stream) {
  const int cols = load.y.cols;
  const bool lie_flat = lies_flat(load.y.data, load.y.layout, cols) &&
                        lies_flat(load.dy.data, load.dy.layout, cols) &&
                        lies_flat(dx, one_stride(cols), cols);
  return detail::launch(plan.flat.row_class < kShorterSoftmaxClasses
                            ? softmax_backward_flat<X, false>
                            : softmax_backward_flat<X, true>,
                        plan.blocks, kFlatThreads, {plan.shared_bytes, 1, plan.overlap}, stream,
                        load, dx, log, lie_flat, plan.flat);
}

template cudaError_t softmax_flat_forward(const Rows<__half>&, __half*, bool, const SoftmaxPlan&,
                                          cudaStream_t);
template cudaError_t softmax_flat_forward(const Rows<__nv_bfloat16>&, __nv_bfloat16*, bool,
                                          const SoftmaxPlan&, cudaStream_t);
template cudaError_t softmax_flat_backward(const GradientLoad<__half>&, __half*, bool,
                                           const SoftmaxPlan&, cudaStream_t);
template cudaError_t softmax_flat_backward(const GradientLoad<__nv_bfloat16>&, __nv_bfloat16*, bool,
                                           const SoftmaxPlan&, cudaStream_t);

}  // namespace fused_norm
