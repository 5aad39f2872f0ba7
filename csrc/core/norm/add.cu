#include "core/norm/launch.cuh"

namespace fused_norm {
namespace {

template <typename X, typename Y>
cudaError_t add_forward(const NormForwardParams& params, const NormForwardPlan& plan,
                        cudaStream_t stream) {
  const AddLoad<X, Y> load{input_load<X>(params.x, params.x_layout, params),
                           input_load<Y>(params.addend, params.addend_layout, params),
                           static_cast<X*>(params.sum), params.rows, params.cols};
  return norm_forward_from<Y>(load, params, plan, stream);
}

}  // namespace

cudaError_t norm_add_forward(const NormForwardParams& params, const NormForwardPlan& plan,
                             cudaStream_t stream) {
  return with_dtype<__half, __nv_bfloat16, float>(params.y_dtype, [&](auto y) {
    using Y = decltype(y);
    return params.x_dtype == DType::kFloat32 ? add_forward<float, Y>(params, plan, stream)
                                             : add_forward<Y, Y>(params, plan, stream);
  });
}

}  // namespace fused_norm
