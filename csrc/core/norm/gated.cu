#include "core/norm/gated.cuh"
#include "core/norm/launch.cuh"

namespace fused_norm {

cudaError_t norm_gated_forward(const NormForwardParams& params, const NormForwardPlan& plan,
                               cudaStream_t stream) {
  const Gate& gate = params.gate;
  return with_dtype<__half, __nv_bfloat16, float>(params.x_dtype, [&](auto x) {
    using X = decltype(x);
    const GatedLoad<X> load{input_load<X>(params.x, params.x_layout, params),
                            input_load<X>(gate.data, gate.layout, params), gate.form, params.rows,
                            params.cols};
    return norm_forward_from<X>(load, params, plan, stream);
  });
}

cudaError_t norm_gated_backward(const NormBackwardParams& params, const NormBackwardPlan& plan,
                                cudaStream_t stream) {
  const Gate& gate = params.gate;
  const BackwardWorkspace<float> workspace(params, plan);
  const ColumnLook<float> look = column_look_of<float>(params);
  const cudaError_t error = with_dtype<__half, __nv_bfloat16, float>(params.x_dtype, [&](auto x) {
    using X = decltype(x);
    const GatedInput<X> in{backward_input<X, X>(params, look.listed),
                           static_cast<const X*>(gate.data), gate.layout,
                           static_cast<X*>(gate.gradient), gate.form};
    const BackwardOutput<X, float> out{static_cast<X*>(params.dx), workspace.dweight};
    return launch_plan(plan.packs == 1 ? norm_backward_gated<X, 1> : norm_backward_gated<X, 2>,
                       plan, stream, in, out);
  });
  return error == cudaSuccess ? norm_second_stage(params, plan, workspace, look, stream) : error;
}

}  // namespace fused_norm
