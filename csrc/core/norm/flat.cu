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
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  // Rows that would be shifted in whole warps lie too much in the same banks.
  return plan.flat.slots > 0 && params.x_layout.inner == 0 &&
         params.x_layout.stride == params.cols && aligned(params.x) && aligned(params.y) &&
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

}  // namespace fused_norm
