#include "core/norm/launch.cuh"
#include "core/norm/norm.h"

namespace fused_norm {

bool norm_forward_adds(int32_t cols, DType x_dtype, DType y_dtype, const DeviceProperties& device) {
  return (x_dtype == y_dtype || x_dtype == DType::kFloat32) &&
         plan_norm_forward(1, cols, x_dtype, y_dtype, false, device).tier == Tier::kRegisters;
}

cudaError_t launch_norm_forward(const NormForwardParams& params, const DeviceProperties& device,
                                cudaStream_t stream) {
  const bool adds = params.addend != nullptr;
  const NormForwardPlan plan = plan_norm_forward(params.rows, params.cols, params.x_dtype,
                                                 params.y_dtype, params.rms, device);
  const cudaError_t error =
      adds                            ? norm_add_forward(params, plan, stream)
      : plan.tier == Tier::kStreaming ? norm_stream_forward(params, plan, stream)
      : plan.tiles.slots > 0
          ? norm_flat_forward(params, plan, stream)
          : with_dtype<__half, __nv_bfloat16, float>(params.x_dtype, [&](auto x) {
              return norm_forward_of<decltype(x)>(params, plan, stream);
            });
  if (error != cudaSuccess || params.list.room == 0) return error;
  NormForwardParams normalized = params;
  if (adds) {
    normalized.x = params.sum;
    normalized.x_layout = one_stride(params.cols);
  }
  return launch_list_columns(normalized, device, stream);
}

namespace {

NormBackwardPlan plan_of(const NormBackwardParams& params, const DeviceProperties& device) {
  NormBackwardPlan plan =
      plan_norm_backward(params.rows, params.cols, params.x_dtype, params.y_dtype,
                         params.from_output, params.rms, device);
  if (params.list.room > 0) plan.few_splits = 0;
  return plan;
}

}  // namespace

size_t norm_backward_workspace(const NormBackwardParams& params, const DeviceProperties& device) {
  const NormBackwardPlan plan = plan_of(params, device);
  if (plan.few_splits > 0) return 0;
  const size_t element = params.x_dtype == DType::kFloat64 ? 8 : 4;
  const size_t means = plan.tier == Tier::kStreaming ? 2 * static_cast<size_t>(params.rows) : 0;
  return kTotalsBytes + element * (2 * static_cast<size_t>(plan.partials) * params.cols + means);
}

cudaError_t launch_norm_backward(const NormBackwardParams& params, const DeviceProperties& device,
                                 cudaStream_t stream) {
  const NormBackwardPlan plan = plan_of(params, device);
  if (plan.tier == Tier::kStreaming) return norm_stream_backward(params, plan, stream);
  return with_dtype<__half, __nv_bfloat16, float>(
      params.x_dtype, [&](auto x) { return norm_backward_of<decltype(x)>(params, plan, stream); });
}

}  // namespace fused_norm
