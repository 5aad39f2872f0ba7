#include "core/common/launch.cuh"
#include "core/softmax/launch.h"
#include "core/softmax/softmax.h"

namespace fused_norm {
namespace {

template <typename Params>
cudaError_t run(SoftmaxPass pass, DType read, const Params& params, const DeviceProperties& device,
                cudaStream_t stream) {
  const SoftmaxPlan plan = plan_softmax(params.tier, pass, params.rows, params.cols, params.x_dtype,
                                        params.y_dtype, device);
  if (plan.tier == SoftmaxTier::kUncached) return softmax_streaming(params, plan, stream);
  if (plan.place == RowPlace::kFlat) return softmax_in_tiles(params, plan, stream);
  return with_dtype<__half, __nv_bfloat16, float>(
      read, [&](auto type) { return SoftmaxOf<decltype(type)>::run(params, plan, stream); });
}

}  // namespace

cudaError_t launch_softmax_forward(const SoftmaxForwardParams& params,
                                   const DeviceProperties& device, cudaStream_t stream) {
  const SoftmaxPass pass = forward_pass(params.scale, params.mask.data != nullptr, params.causal);
  return run(pass, params.x_dtype, params, device, stream);
}

cudaError_t launch_softmax_backward(const SoftmaxBackwardParams& params,
                                    const DeviceProperties& device, cudaStream_t stream) {
  return run(backward_pass(params.log), params.y_dtype, params, device, stream);
}

}  // namespace fused_norm
