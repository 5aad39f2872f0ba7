#include "core/norm/backward_flat.cuh"
#include "core/norm/forward_flat.cuh"
#include "core/norm/launch.cuh"

namespace fused_norm {

cudaError_t norm_flat_forward(const NormForwardParams& params, const NormForwardPlan& plan,
                              cudaStream_t stream) {
  const bool lie_flat = lies_flat(params.x, params.x_layout, params.cols) &&
                        lies_flat(params.y, one_stride(params.cols), params.cols);
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto x) {
    using X = decltype(x);
    const FlatForward<X> of{input_load<X>(params.x, params.x_layout, params),
                            affine_store<X>(params), statistics_out<InputLoad<X>, X>(params),
                            plan.tiles, lie_flat};
    return launch(norm_forward_flat<X>, plan.tiles.blocks, kFlatThreads,
                  {plan.tiles.shared_bytes, 1, plan.overlaps}, stream, of, params.rms);
  });
}

template <typename X>
cudaError_t norm_flat_backward(const BackwardInput<X, X, float>& in,
                               const BackwardOutput<X, float>& out, const NormBackwardPlan& plan,
                               cudaStream_t stream) {
  const RowLayout contiguous = one_stride(in.cols);
  const bool lie_flat =
      lies_flat(in.saved, in.saved_layout, in.cols) && lies_flat(in.dy, in.dy_layout, in.cols) &&
      lies_flat(out.dx, contiguous, in.cols) && lies_flat(out.dresidual, contiguous, in.cols);
  FlatRows flat = plan.flat;
  if (out.dresidual) flat.slots = flat.slots * kFlatTensors / (kFlatTensors + 1);
  auto run = [&](auto kernel) {
    return launch(kernel, plan.blocks, kFlatThreads, {plan.shared_bytes, 1, plan.overlaps}, stream,
                  in, out, lie_flat, flat);
  };
  return flat.row_class < kShorterFlatClasses ? run(norm_backward_flat<X, false>)
                                              : run(norm_backward_flat<X, true>);
}
template cudaError_t norm_flat_backward(const BackwardInput<__half, __half, float>&,
                                        const BackwardOutput<__half, float>&,
                                        const NormBackwardPlan&, cudaStream_t);
template cudaError_t norm_flat_backward(const BackwardInput<__nv_bfloat16, __nv_bfloat16, float>&,
                                        const BackwardOutput<__nv_bfloat16, float>&,
                                        const NormBackwardPlan&, cudaStream_t);

}  // namespace fused_norm
