#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isin.h>

#include <algorithm>
#include <cmath>

#include "cpu/norm.h"
#include "ops/column_watch.h"
#include "ops/norm.h"
#include "ops/rows.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "core/norm/norm.h"
#include "ops/device.h"
#endif

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymIntArrayRef;

// A call that was checked, of tensors with data; undefined what is not given or not needed.
struct Call {
  const Tensor &dy, &saved, &rstd;
  Tensor mean, side, columns, dresidual;
  NormColumns norm;
  const NormRows& shape;
  at::IntArrayRef normalized_shape;
  bool rms, from_output;
  std::array<bool, 3> wanted;

  ScalarType stats_dtype() const { return accumulate_dtype(norm.x_dtype); }
};

void check_given(const Call& call, const Tensor& tensor, const char* name, ScalarType dtype,
                 at::IntArrayRef sizes) {
  const at::Device device = call.dy.device();
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.sizes() == sizes &&
                  tensor.device() == device && tensor.is_contiguous(),
              name, " must be contiguous, of shape ", sizes, " and dtype ", dtype, " on ", device,
              ", but has shape ", tensor.sizes(), ", strides ", tensor.strides(), " and dtype ",
              tensor.scalar_type(), " on ", tensor.device());
}

void check_list(const Call& call) {
  const Tensor &side = call.side, &columns = call.columns;
  TORCH_CHECK(columns.defined() == side.defined() && (!columns.defined() || call.from_output),
              "side and columns come together, and only with from_output: side is ",
              side.defined() ? "given" : "None", ", columns is ",
              columns.defined() ? "given" : "None", ", from_output is ",
              call.from_output ? "True" : "False");
  if (!columns.defined()) return;
  check_given(call, columns, "columns", at::kInt, columns.numel());
  const int64_t room = columns.numel() - 1;
  TORCH_CHECK(room >= 0 && room <= call.shape.cols, "columns must be at least 1 and at most ",
              call.shape.cols + 1, ", but are ", columns.numel());
  check_given(call, side, "side", call.stats_dtype(), {call.shape.rows, room});
}

// What the CPU path needs to know of the columns that are not recoverable.
cpu::ListedColumns recover_on_cpu(const NormColumns& norm, const Tensor& weight, const Tensor& bias,
                                  const Tensor& columns, const Tensor& side) {
  const Tensor lost = cpu::lost_columns(weight, bias, norm.weight_offset, norm.cols, norm.x_dtype,
                                        norm.y_dtype, /*precise=*/false);
  int64_t count = 0;
  if (columns.defined() && columns.numel() > 1)
    count = std::min<int64_t>(*columns.const_data_ptr<int32_t>(), columns.numel() - 1);
  const Tensor listed =
      count > 0 ? columns.slice(0, 1, 1 + count).to(at::kLong) : at::empty({0}, at::kLong);
  for (int64_t i = 0; i < listed.numel(); ++i) {
    const int64_t col = listed.const_data_ptr<int64_t>()[i];
    TORCH_CHECK(col >= 0 && col < norm.cols, "columns must be those of normalized_shape, 0 to ",
                norm.cols - 1, ", but holds ", col);
  }
  if (lost.numel() == 0 && count == 0) return {};
  const Tensor missing = lost.index({at::isin(lost, listed).logical_not_()});
  if (missing.numel() > 0) raise_overflow({overflow_of(norm, missing.numel())});
  return {listed, count > 0 ? side : at::empty({side.defined() ? side.size(0) : 0, 0}), missing};
}

TensorTriple backward_on_cpu(const Call& call) {
  const NormColumns& norm = call.norm;
  const auto rows = [&](const Tensor& t) {
    return t.defined() ? t.reshape({call.shape.rows, call.shape.cols}) : t;
  };
  const auto flat = [](const Tensor& t) { return t.defined() ? t.reshape({-1}) : t; };
  const Tensor weight = flat(norm.weight), bias = flat(norm.bias);
  cpu::ListedColumns list;
  if (call.from_output) list = recover_on_cpu(norm, weight, bias, call.columns, call.side);
  auto [dx, dweight, dbias] =
      cpu::norm_backward(rows(call.dy), rows(call.saved), flat(call.mean), call.rstd.view({-1}),
                         weight, bias, norm.weight_offset, call.rms, call.from_output, list,
                         norm.x_dtype, call.wanted, rows(call.dresidual));
  if (list.missing.defined() && dbias.defined()) dbias.index_fill_(0, list.missing, NAN);
  const auto shaped = [](const Tensor& t, at::IntArrayRef sizes) {
    return t.defined() ? t.view(sizes) : t;
  };
  return {shaped(dx, call.dy.sizes()), shaped(dweight, call.normalized_shape),
          shaped(dbias, call.normalized_shape)};
}

#ifdef FUSED_NORM_WITH_CUDA

void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

TensorTriple backward_on_cuda(const Call& call) {
  const auto& [dy, saved, rstd, mean, side, columns, dresidual, norm, shape, normalized_shape, rms,
               from_output, wanted] = call;
  const c10::cuda::CUDAGuard guard(dy.device());
  const Rows dy_rows = as_rows(dy, shape.row_dims);
  const Rows saved_rows = as_rows(saved, shape.row_dims);
  const Tensor weight = aligned_param(norm.weight), bias = aligned_param(norm.bias);
  const Tensor dx = wanted[0] ? empty_tensor(dy.sizes(), norm.x_dtype) : Tensor();
  const Tensor dweight =
      wanted[1] ? empty_tensor(normalized_shape, norm.weight.scalar_type()) : Tensor();
  const Tensor dbias =
      wanted[2] ? empty_tensor(normalized_shape, norm.bias.scalar_type()) : Tensor();

  NormBackwardParams params{};
  params.rows = shape.rows;
  params.cols = static_cast<int32_t>(shape.cols);
  params.x_dtype = to_dtype(norm.x_dtype);
  params.y_dtype = to_dtype(norm.y_dtype);
  params.rms = rms;
  params.from_output = from_output;
  params.weight_offset = norm.weight_offset;
  params.dy = dy_rows.tensor.const_data_ptr();
  params.dy_layout = dy_rows.layout;
  params.saved = saved_rows.tensor.const_data_ptr();
  params.saved_layout = saved_rows.layout;
  params.mean = mean.defined() ? mean.const_data_ptr() : nullptr;
  params.rstd = rstd.const_data_ptr();
  params.weight = to_param(weight);
  params.bias = to_param(bias);
  if (columns.defined() && columns.numel() > 1) {
    params.list = {static_cast<int32_t>(columns.numel() - 1), columns.mutable_data_ptr<int32_t>(),
                   side.mutable_data_ptr()};
  }
  if (dresidual.defined() && dx.defined()) params.dresidual = dresidual.const_data_ptr();
  params.dx = data_or_null(dx);
  params.dweight = data_or_null(dweight);
  params.dbias = data_or_null(dbias);
  const DeviceProperties& device = current_device_properties();
  const c10::DataPtr workspace =
      c10::cuda::CUDACachingAllocator::get()->allocate(norm_backward_workspace(params, device));
  params.workspace = workspace.get();
  params.watch = watch_backward(norm, from_output, params.list.room);
  check_launch(launch_norm_backward(params, device, at::cuda::getCurrentCUDAStream()));
  return {dx, dweight, dbias};
}

#endif  // FUSED_NORM_WITH_CUDA

}  // namespace

TensorTriple norm_backward(const Tensor& dy, const Tensor& saved, const OptionalTensor& mean,
                           const Tensor& rstd, const OptionalTensor& weight,
                           const OptionalTensor& bias, SymIntArrayRef sym_shape,
                           double weight_offset, bool rms, bool from_output, ScalarType input_dtype,
                           std::array<bool, 3> output_mask, const OptionalTensor& side,
                           const OptionalTensor& columns, const OptionalTensor& dresidual) {
  const at::AutoDispatchBelowADInplaceOrView guard_views;
  check_layout(dy, "dy");
  check_layout(saved, "saved");
  check_normalized(dy, "dy", sym_shape);
  check_like(saved, "saved", dy, "dy");
  const ScalarType y_dtype = dy.scalar_type();
  check_floating(y_dtype, "dy");
  check_norm_options(input_dtype, dtype_of(weight), dtype_of(bias), y_dtype, 0, weight_offset);
  const ScalarType saved_dtype = from_output ? y_dtype : input_dtype;
  TORCH_CHECK(saved.scalar_type() == saved_dtype, "saved must be ", saved_dtype, ", but is ",
              saved.scalar_type());
  check_params(weight, bias, rms, sym_shape, dy);
  output_mask[1] = output_mask[1] && has(weight);
  output_mask[2] = output_mask[2] && has(bias);
  const auto nothing = [&]() -> TensorTriple {
    const auto zeros = [](const Tensor& of) { return new_like(of, of.scalar_type()).zero_(); };
    return {output_mask[0] ? new_like(dy, input_dtype) : Tensor(),
            output_mask[1] ? zeros(*weight) : Tensor(), output_mask[2] ? zeros(*bias) : Tensor()};
  };
  if (dy.is_meta()) return nothing();

  const bool needs_mean = !rms && !from_output;
  const at::IntArrayRef normalized_shape = C10_AS_INTARRAYREF_SLOW(sym_shape);
  const NormRows shape = norm_rows(dy, normalized_shape);
  Call call{
      dy,
      saved,
      rstd,
      needs_mean ? or_undefined(mean) : Tensor(),
      or_undefined(side),
      or_undefined(columns),
      {},
      {or_undefined(weight), or_undefined(bias), weight_offset, shape.cols, input_dtype, y_dtype},
      shape,
      normalized_shape,
      rms,
      from_output,
      output_mask};
  check_given(call, rstd, "rstd", call.stats_dtype(), shape.stats_shape);
  TORCH_CHECK(!needs_mean || has(mean), "mean must be given, but is None");
  if (needs_mean) check_given(call, call.mean, "mean", call.stats_dtype(), shape.stats_shape);
  check_list(call);
  if (has(dresidual)) {
    check_layout(*dresidual, "dresidual");
    call.dresidual = dresidual->contiguous();
    check_given(call, call.dresidual, "dresidual", input_dtype, dy.sizes());
  }
  if (shape.empty()) return nothing();
  if (dy.is_cpu()) return backward_on_cpu(call);
#ifdef FUSED_NORM_WITH_CUDA
  return backward_on_cuda(call);
#else
  raise_cpu_only(dy);
#endif
}

}  // namespace fused_norm::ops
