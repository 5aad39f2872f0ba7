#include "core/norm/launch.cuh"
#include "core/norm/norm.h"

namespace fused_norm {

cudaError_t launch_norm_forward(const NormForwardParams& params, const DeviceProperties& device,
                                cudaStream_t stream) {
  const NormPlan plan =
      plan_norm_forward(params.rows, params.cols, params.x_dtype, params.y_dtype, device);
  const cudaError_t error = with_dtype<__half, __nv_bfloat16, float, double>(
      params.x_dtype, [&](auto x) { return norm_forward_of<decltype(x)>(params, plan, stream); });
  if (error != cudaSuccess || params.list.room == 0) return error;
  return launch_list_columns(params, device, stream);
}

namespace {

NormBackwardPlan plan_of(const NormBackwardParams& params, const DeviceProperties& device) {
  return plan_norm_backward(params.rows, params.cols, params.x_dtype, params.y_dtype,
                            params.from_output, device);
}

}  // namespace

size_t norm_backward_workspace(const NormBackwardParams& params, const DeviceProperties& device) {
  const NormBackwardPlan plan = plan_of(params, device);
  const size_t element = params.x_dtype == DType::kFloat64 ? 8 : 4;
  const size_t means = plan.tier == Tier::kStreaming ? 2 * static_cast<size_t>(params.rows) : 0;
  return element * (2 * static_cast<size_t>(plan.partials) * params.cols + means);
}

cudaError_t launch_norm_backward(const NormBackwardParams& params, const DeviceProperties& device,
                                 cudaStream_t stream) {
  const NormBackwardPlan plan = plan_of(params, device);
  return with_dtype<__half, __nv_bfloat16, float, double>(
      params.x_dtype, [&](auto x) { return norm_backward_of<decltype(x)>(params, plan, stream); });
}

}  // namespace fused_norm
