#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isin.h>

#include <algorithm>

#include "ops/column_watch.h"
#include "ops/norm.h"
#include "ops/rows.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "ops/norm_params.h"
#endif

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymIntArrayRef;

void check_given(const Tensor& tensor, const char* name, ScalarType dtype, SymIntArrayRef sizes,
                 const Tensor& dy) {
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.sym_sizes() == sizes &&
                  tensor.device() == dy.device() && tensor.is_contiguous(),
              name, " must be contiguous, of shape ", sizes, " and dtype ", dtype, " on ",
              dy.device(), ", but has shape ", tensor.sizes(), ", strides ", tensor.strides(),
              " and dtype ", tensor.scalar_type(), " on ", tensor.device());
}

// Of tensors with data.
void check_saved(const NormBackwardCall& call, int64_t cols) {
  const Tensor& dy = call.dy;
  const ScalarType stats_dtype = accumulate_dtype(call.input_dtype);
  const auto stats = stats_shape(dy, call.normalized_shape);
  check_given(call.rstd, "rstd", stats_dtype, stats, dy);
  if (call.needs_mean()) {
    TORCH_CHECK(has(call.mean), "mean must be given, but is None");
    check_given(*call.mean, "mean", stats_dtype, stats, dy);
  }
  const bool lists = has(call.columns);
  TORCH_CHECK(lists == has(call.side) && (!lists || call.from_output),
              "side and columns come together, and only with from_output: side is ",
              has(call.side) ? "given" : "None", ", columns is ", lists ? "given" : "None",
              ", from_output is ", call.from_output ? "True" : "False");
  if (!lists) return;
  check_given(*call.columns, "columns", at::kInt, {call.columns->numel()}, dy);
  const int64_t room = call.columns->numel() - 1;
  TORCH_CHECK(room >= 0 && room <= cols, "columns must be at least 1 and at most ", cols + 1,
              ", but are ", room + 1);
  check_given(*call.side, "side", stats_dtype, {call.rstd.numel(), room}, dy);
}

// `dresidual` is contiguous, undefined when absent; `made` is written.
void backward_on_cpu(const NormBackwardCall& call, const NormColumns& norm, const Tensor& dresidual,
                     const Gradients<3>& made) {
  const Tensor mean = or_undefined(call.mean);
  cpu::NormBackward pass{call.dy,          call.saved, mean, call.rstd, norm, call.rms,
                         call.from_output, {},         {},   dresidual, made};
  if (!call.from_output) return cpu::norm_backward(pass);
  const int64_t count = has(call.columns)
                            ? std::clamp<int64_t>(*call.columns->const_data_ptr<int32_t>(), 0,
                                                  call.columns->numel() - 1)
                            : 0;
  const Tensor listed =
      count > 0 ? call.columns->slice(0, 1, 1 + count).to(at::kLong) : at::empty({0}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t col = listed.const_data_ptr<int64_t>()[i];
    TORCH_CHECK(col >= 0 && col < norm.cols, "columns must be those of normalized_shape, 0 to ",
                norm.cols - 1, ", but holds ", col);
  }
  const Tensor lost = cpu::lost_columns(norm, /*precise=*/false);
  if (lost.numel() > 0) {
    const Tensor unlisted = at::isin(lost, listed, /*assume_unique=*/false, /*invert=*/true);
    const int64_t missing = unlisted.sum().item<int64_t>();
    if (missing > 0) raise_overflow({overflow_of(norm, missing)});
  }
  if (count > 0) {
    pass.columns = listed;
    pass.side = call.side->narrow(1, 0, count);
  }
  cpu::norm_backward(pass);
}

#ifdef FUSED_NORM_WITH_CUDA

void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

void backward_on_cuda(const NormBackwardCall& call, const NormColumns& norm,
                      const Tensor& dresidual, const Gradients<3>& made) {
  const c10::cuda::CUDAGuard guard(call.dy.device());
  const int64_t row_dims = static_cast<int64_t>(call.normalized_shape.size());
  const Rows dy = as_rows(call.dy, row_dims), saved = as_rows(call.saved, row_dims);
  const Tensor weight = aligned_param(norm.weight), bias = aligned_param(norm.bias);
  auto params = norm_params<NormBackwardParams>(norm, call.rstd.numel(), call.rms, weight, bias);
  params.from_output = call.from_output;
  dy.set(&params.dy, &params.dy_layout);
  saved.set(&params.saved, &params.saved_layout);
  params.mean = call.needs_mean() ? call.mean->const_data_ptr() : nullptr;
  params.rstd = call.rstd.const_data_ptr();
  if (has(call.columns) && call.columns->numel() > 1) {
    params.list = {static_cast<int32_t>(call.columns->numel() - 1),
                   call.columns->mutable_data_ptr<int32_t>(), call.side->mutable_data_ptr()};
  }
  params.dx = data_or_null(made[0]);
  if (params.dx != nullptr && dresidual.defined()) params.dresidual = dresidual.const_data_ptr();
  params.dweight = data_or_null(made[1]);
  params.dbias = data_or_null(made[2]);
  const c10::DataPtr workspace = set_workspace(&params);
  params.watch = watch_backward(norm, call.from_output, params.list.room);
  launch(launch_norm_backward, params);
}

#endif  // FUSED_NORM_WITH_CUDA

}  // namespace

Gradients<3> norm_backward(const NormBackwardCall& call) {
  const at::AutoDispatchBelowADInplaceOrView guard_views;
  const Tensor &dy = call.dy, &saved = call.saved;
  check_layout(dy, "dy");
  check_layout(saved, "saved");
  check_normalized(dy, "dy", call.normalized_shape);
  check_like(saved, "saved", dy, "dy");
  const ScalarType y_dtype = dy.scalar_type();
  check_floating(y_dtype, "dy");
  check_norm_options(call.input_dtype, dtype_of(call.weight), dtype_of(call.bias), y_dtype, 0,
                     call.weight_offset);
  const ScalarType saved_dtype = call.from_output ? y_dtype : call.input_dtype;
  TORCH_CHECK(saved.scalar_type() == saved_dtype, "saved must be ", saved_dtype, ", but is ",
              saved.scalar_type());
  check_params(call.weight, call.bias, call.rms, call.normalized_shape, dy);

  NormColumns norm;
  Tensor dresidual;
  if (!dy.is_meta()) {
    norm = columns_of(call);
    check_saved(call, norm.cols);
    if (has(call.dresidual)) {
      check_layout(*call.dresidual, "dresidual");
      dresidual = call.dresidual->contiguous();
      check_given(dresidual, "dresidual", call.input_dtype, dy.sym_sizes(), dy);
    }
  }
  const auto& wanted = call.output_mask;
  const Gradients<3> made = {wanted[0] ? new_like(dy, call.input_dtype) : Tensor(),
                             wanted[1] && has(call.weight) ? new_like(*call.weight) : Tensor(),
                             wanted[2] && has(call.bias) ? new_like(*call.bias) : Tensor()};
  if (dy.is_meta() || dy.numel() == 0) {
    for (const Tensor& gradient : made) {
      if (gradient.defined()) gradient.zero_();
    }
  } else if (dy.is_cpu()) {
    backward_on_cpu(call, norm, dresidual, made);
#ifdef FUSED_NORM_WITH_CUDA
  } else {
    backward_on_cuda(call, norm, dresidual, made);
#endif
  }
  return made;
}

}  // namespace fused_norm::ops
