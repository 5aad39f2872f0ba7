#include "core/norm/backward_flat.cuh"
#include "core/norm/forward_flat.cuh"
#include "core/norm/launch.cuh"

namespace fused_norm {
namespace {

// Whether there are all parameters, of the type of x, and the weight as it is.
bool is_typed(const NormForwardParams& params) {
  const auto store = affine_store<float>(params);
  return params.rms ? store.all_of<false>(params.x_dtype) : store.all_of<true>(params.x_dtype);
}

}  // namespace

bool takes_flat_rows(const NormForwardParams& params, const NormForwardPlan& plan) {
  // Rows that would be shifted in whole warps lie too much in the same banks.
  return plan.flat.slots > 0 && lies_flat(params.x, params.x_layout, params.cols) &&
         lies_flat(params.y, one_stride(params.cols), params.cols) &&
         (is_typed(params) || !whole_warps(plan.packs));
}

cudaError_t norm_flat_forward(const NormForwardParams& params, const NormForwardPlan& plan,
                              cudaStream_t stream) {
  return with_dtype<__half, __nv_bfloat16>(params.x_dtype, [&](auto x) {
    using X = decltype(x);
    const InputLoad<X> load = input_load<X>(params.x, params.x_layout, params);
    const FlatRows& flat = plan.flat;
    const bool dealt_out = is_typed(params) && plan.threads_per_row >= kMinDealtOutLanes;
    const RowsLie lie = dealt_out ? dealt_out_as<X>(params.cols) : RowsLie::kShifted;
    return detail::launch(
        norm_forward_flat<X>, flat.blocks, dim3(plan.threads_per_row, flat.rows_per_block),
        {flat.shared_bytes, 1, plan.overlaps}, stream, load, affine_store<X>(params),
        statistics_out<InputLoad<X>, X>(params), lie, params.rms, plan.packs, flat);
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
  return detail::launch(flat.row_class < kShorterFlatClasses ? norm_backward_flat<X, false>
                                                             : norm_backward_flat<X, true>,
                        plan.blocks, kFlatThreads, {plan.shared_bytes, 1, plan.overlaps}, stream,
                        in, out, lie_flat, flat);
}
template cudaError_t norm_flat_backward(const BackwardInput<__half, __half, float>&,
                                        const BackwardOutput<__half, float>&,
                                        const NormBackwardPlan&, cudaStream_t);
template cudaError_t norm_flat_backward(const BackwardInput<__nv_bfloat16, __nv_bfloat16, float>&,
                                        const BackwardOutput<__nv_bfloat16, float>&,
                                        const NormBackwardPlan&, cudaStream_t);

}  // namespace fused_norm
