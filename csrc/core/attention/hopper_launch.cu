#include <type_traits>

#include "core/attention/hopper.h"

namespace fused_norm {
namespace {

// run(dim) for the columns of the call's tiles, as a constant.
template <typename Run>
cudaError_t with_dim(int dim, Run run) {
  switch (dim) {
    case 64:
      return run(std::integral_constant<int, 64>());
    case 96:
      return run(std::integral_constant<int, 96>());
    case 128:
      return run(std::integral_constant<int, 128>());
    case 192:
      return run(std::integral_constant<int, 192>());
    default:
      return run(std::integral_constant<int, 256>());
  }
}

// Tickets, where there are some, are zeros at first.
cudaError_t clear_tickets(void* workspace, size_t bytes, cudaStream_t stream) {
  return bytes == 0 ? cudaSuccess : cudaMemsetAsync(workspace, 0, bytes, stream);
}

}  // namespace

cudaError_t launch_attention_forward_hopper(const AttentionParams& params,
                                            const DeviceProperties& device, void* workspace,
                                            cudaStream_t stream) {
  const bool packed = params.query_offsets != nullptr;
  if (params.heads == 0 || (packed ? params.total_queries : params.queries * params.batch) == 0)
    return cudaSuccess;
  const cudaError_t error = clear_tickets(workspace, hopper_forward_workspace(params), stream);
  if (error != cudaSuccess) return error;
  return with_dim(hopper_forward_plan(params).dim, [&](auto dim) {
    return hopper::launch_forward<dim.value>(params, device, workspace, stream);
  });
}

cudaError_t launch_attention_backward_hopper(const AttentionGradient& gradient,
                                             const DeviceProperties& device, void* workspace,
                                             cudaStream_t stream) {
  const AttentionParams& params = gradient.params.forward;
  const cudaError_t error = clear_tickets(workspace, hopper_backward_workspace(params), stream);
  if (error != cudaSuccess) return error;
  return with_dim(hopper_backward_plan(params).dim, [&](auto dim) {
    return hopper::launch_backward<dim.value>(gradient, device, workspace, stream);
  });
}

}  // namespace fused_norm
