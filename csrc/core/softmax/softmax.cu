#include "core/common/launch.cuh"
#include "core/softmax/launch.h"
#include "core/softmax/softmax.h"

namespace fused_norm {
namespace {

// `read`: the dtype of x in forward, of y in backward.
template <typename Params, typename Plan>
cudaError_t run(DType read, const Params& params, const Plan& plan, cudaStream_t stream) {
  return with_dtype<__half, __nv_bfloat16, float, double>(
      read, [&](auto type) { return softmax_of<decltype(type)>(params, plan, stream); });
}

// fp64 has no packs of columns.
bool is_aligned(const void* data, int pack, DType dtype) {
  return dtype != DType::kFloat64 &&
         reinterpret_cast<uintptr_t>(data) % (pack * size_of(dtype)) == 0;
}

}  // namespace

cudaError_t launch_softmax_forward(const SoftmaxForwardParams& params,
                                   const DeviceProperties& device, cudaStream_t stream) {
  const SoftmaxPass pass = forward_pass(params.scale, params.mask.data != nullptr, params.causal);
  return run(params.x_dtype, params,
             plan_softmax(params.tier, pass, params.rows, params.cols, params.x_dtype,
                          params.y_dtype, device),
             stream);
}

cudaError_t launch_softmax_backward(const SoftmaxBackwardParams& params,
                                    const DeviceProperties& device, cudaStream_t stream) {
  return run(params.y_dtype, params,
             plan_softmax(params.tier, backward_pass(params.log), params.rows, params.cols,
                          params.x_dtype, params.y_dtype, device),
             stream);
}

cudaError_t launch_softmax_columns_forward(const SoftmaxColumnsForwardParams& params,
                                           const DeviceProperties& device, cudaStream_t stream) {
  const int pack = pack_elements(params.x_dtype, params.x_dtype);
  const bool vectorized = params.inner % pack == 0 && is_aligned(params.x, pack, params.x_dtype) &&
                          is_aligned(params.y, pack, params.y_dtype);
  return run(params.x_dtype, params,
             plan_softmax_columns(false, vectorized, params.outer, params.cols, params.inner,
                                  params.x_dtype, params.y_dtype, device),
             stream);
}

cudaError_t launch_softmax_columns_backward(const SoftmaxColumnsBackwardParams& params,
                                            const DeviceProperties& device, cudaStream_t stream) {
  const int pack = pack_elements(params.y_dtype, params.y_dtype);
  const bool vectorized = params.inner % pack == 0 && is_aligned(params.dx, pack, params.x_dtype) &&
                          is_aligned(params.dy, pack, params.y_dtype) &&
                          is_aligned(params.y, pack, params.y_dtype);
  return run(params.y_dtype, params,
             plan_softmax_columns(true, vectorized, params.outer, params.cols, params.inner,
                                  params.x_dtype, params.y_dtype, device),
             stream);
}

}  // namespace fused_norm
