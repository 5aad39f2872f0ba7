#include "core/common/launch.cuh"
#include "core/norm/launchers.cuh"

namespace fused_norm {

bool norm_forward_adds(int32_t cols, DType x_dtype, DType y_dtype, const DeviceProperties& device) {
  return (x_dtype == y_dtype || x_dtype == DType::kFloat32) &&
         plan_norm_forward(1, cols, x_dtype, y_dtype, false, device).tier == Tier::kRegisters;
}

namespace {

NormForwardPlan plan_of(const NormForwardParams& params, const DeviceProperties& device) {
  const DType values = params.gate.data ? DType::kFloat32 : params.x_dtype;  // GatedLoad::Input
  return plan_norm_forward(params.rows, params.cols, values, params.y_dtype, params.rms, device,
                           params.list.room > 0);
}

NormBackwardPlan plan_of(const NormBackwardParams& params, const DeviceProperties& device) {
  return plan_norm_backward(params.rows, params.cols, params.x_dtype, params.y_dtype,
                            params.from_output, params.rms, device, params.gate.form.groups,
                            params.list.room > 0);
}

}  // namespace

bool norm_gates(int32_t cols, int32_t groups, DType x_dtype, bool backward,
                const DeviceProperties& device) {
  if (x_dtype == DType::kFloat64) return false;
  const NormPlan plan = backward
                            ? NormPlan(plan_norm_backward(groups, cols, x_dtype, x_dtype, false,
                                                          true, device, groups))
                            : plan_norm_forward(1, cols, DType::kFloat32, x_dtype, true, device);
  const bool whole_packs = cols % plan.pack == 0;
  return plan.tier == Tier::kRegisters && (whole_packs || (!backward && groups == 1));
}

cudaError_t launch_norm_forward(const NormForwardParams& params, const DeviceProperties& device,
                                cudaStream_t stream) {
  // Where the output of fp32 rows is narrower, one kernel is for rows with an addend and without.
  const bool narrows = params.x_dtype == DType::kFloat32 && params.y_dtype != params.x_dtype;
  const bool adds = params.addend != nullptr || narrows;
  const NormForwardPlan plan = plan_of(params, device);
  if (params.gate.data) return norm_gated_forward(params, plan, stream);
  auto launch = [&] {
    if (plan.tier == Tier::kStreaming) return norm_stream_forward(params, plan, stream);
    if (adds) return norm_add_forward(params, plan, stream);
    if (plan.tiles.blocks > 0) return norm_flat_forward(params, plan, stream);
    return with_dtype<__half, __nv_bfloat16, float>(
        params.x_dtype, [&](auto x) { return NormOf<decltype(x)>::forward(params, plan, stream); });
  };
  if (params.list.room == 0) return launch();
  // Kernels whose threads have rows in registers keep xhat of columns that were listed before. Of
  // others it is gathered afterwards.
  const bool gathers = plan.tier == Tier::kStreaming || (!adds && plan.tiles.blocks > 0);
  cudaError_t error = gathers ? launch() : launch_list_columns(params, false, device, stream);
  if (error != cudaSuccess) return error;
  return gathers ? launch_list_columns(params, true, device, stream) : launch();
}

size_t norm_backward_workspace(const NormBackwardParams& params, const DeviceProperties& device) {
  const NormBackwardPlan plan = plan_of(params, device);
  if (plan.few_splits > 0) return 0;
  const size_t element = params.x_dtype == DType::kFloat64 ? 8 : 4;
  const size_t means = plan.tier == Tier::kStreaming ? 2 * static_cast<size_t>(params.rows) : 0;
  return element * (2 * static_cast<size_t>(plan.partials) * params.cols + means);
}

cudaError_t launch_norm_backward(const NormBackwardParams& params, const DeviceProperties& device,
                                 cudaStream_t stream) {
  const NormBackwardPlan plan = plan_of(params, device);
  if (params.gate.data) return norm_gated_backward(params, plan, stream);
  if (plan.tier == Tier::kStreaming) return norm_stream_backward(params, plan, stream);
  return with_dtype<__half, __nv_bfloat16, float>(
      params.x_dtype, [&](auto x) { return NormOf<decltype(x)>::backward(params, plan, stream); });
}

}  // namespace fused_norm
