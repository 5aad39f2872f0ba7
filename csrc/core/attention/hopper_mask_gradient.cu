#include "core/attention/hopper_launch.cuh"

namespace fused_norm {

cudaError_t hopper_mask_gradient(const AttentionGradient& gradient, const DeviceProperties& device,
                                 void* scratch, cudaStream_t stream) {
  using namespace hopper;
  const AttentionParams& params = gradient.params.forward;
  return with_dtype<__half, __nv_bfloat16>(params.dtype, [&](auto zero) {
    const auto launch = [&](auto dim) {
      using Form = BackwardForm<decltype(zero), dim.value, Makes::kMask, true>;
      return launch_backward_form<Form>(gradient, device, nullptr, static_cast<char*>(scratch),
                                        stream);
    };
    return hopper_plan(params).dim == 64 ? launch(std::integral_constant<int, 64>())
                                         : launch(std::integral_constant<int, 128>());
  });
}

}  // namespace fused_norm
