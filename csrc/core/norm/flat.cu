#include "core/norm/backward_flat.cuh"
#include "core/norm/forward_flat.cuh"
#include "core/norm/launch.cuh"

namespace fused_norm {

cudaError_t norm_flat_forward(const NormForwardParams& params, const ForwardWarps& warps,
                              bool overlaps, cudaStream_t stream) {
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto x) {
    using X = decltype(x);
    const FlatRows& flat = warps.flat;
    auto run = [&](auto kernel, int blocks, int threads, int shared_bytes) {
      return detail::launch(kernel, blocks, threads, {shared_bytes, cluster_of(flat), overlaps},
                            stream, input_load<X>(params.x, params.x_layout, params),
                            affine_store<X>(params), statistics_out<InputLoad<X>, X>(params),
                            params.rms, flat);
    };
    const bool in_tiles = flat.slots > 0 && lies_flat(params.x, params.x_layout, params.cols) &&
                          lies_flat(params.y, one_stride(params.cols), params.cols);
    auto run_shared_by = [&](auto sharing) {
      constexpr Sharing kSharing = decltype(sharing)::value;
      return in_tiles
                 ? run(norm_forward_flat<X, kSharing>, flat.blocks, kFlatThreads, flat.shared_bytes)
                 : run(norm_forward_rows<X, kSharing>, warps.blocks, warps.threads, 0);
    };
    if (cluster_of(flat) > 1)
      return run_shared_by(std::integral_constant<Sharing, Sharing::kCluster>());
    if (flat.row_class >= kShorterForwardClasses)
      return run_shared_by(std::integral_constant<Sharing, Sharing::kBlock>());
    return run_shared_by(std::integral_constant<Sharing, Sharing::kWarp>());
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
    return detail::launch(kernel, plan.blocks, kFlatThreads, {plan.shared_bytes, 1, plan.overlaps},
                          stream, in, out, lie_flat, flat);
  };
  if (flat.parts > 1) return run(norm_backward_flat<X, FlatKernel::kParts>);
  return flat.row_class < kShorterFlatClasses ? run(norm_backward_flat<X, FlatKernel::kShorter>)
                                              : run(norm_backward_flat<X, FlatKernel::kLonger>);
}
template cudaError_t norm_flat_backward(const BackwardInput<__half, __half, float>&,
                                        const BackwardOutput<__half, float>&,
                                        const NormBackwardPlan&, cudaStream_t);
template cudaError_t norm_flat_backward(const BackwardInput<__nv_bfloat16, __nv_bfloat16, float>&,
                                        const BackwardOutput<__nv_bfloat16, float>&,
                                        const NormBackwardPlan&, cudaStream_t);

}  // namespace fused_norm
