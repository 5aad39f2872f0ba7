// The norm operators: argument checks, allocation, and the choice between the CPU path and the
// kernels. Of meta tensors the operators check what they can, and give shapes and dtypes.
#include "ops/norm.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isin.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/norm/recoverable.h"
#include "ops/column_watch.h"
#include "ops/launch.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

// `x` is the dtype of what is normalized, whose name is `x_name`.
void check_param_dtype(ScalarType x, const char* x_name, std::optional<ScalarType> param,
                       const char* name) {
  if (!param.has_value()) return;
  check_floating(*param, name);
  TORCH_CHECK(*param == x || *param == at::kFloat || (x == at::kFloat && is_16_bit(*param)), name,
              " is ", *param, ", which does not go with ", x, " ", x_name,
              ": it must have the dtype of ", x_name, " or be float32 (float32 ", x_name,
              " also takes 16-bit parameters)");
}

// A norm's parameters, layout and shape, and a bias only without rms. `input` is what they go with.
void check_params(const OptionalTensor& weight, const OptionalTensor& bias, bool rms,
                  SymIntArrayRef normalized_shape, const Tensor& input) {
  check_param(weight, "weight", normalized_shape, input);
  check_param(bias, "bias", normalized_shape, input);
  TORCH_CHECK(!rms || !has(bias), "bias must be None with rms=True, but has shape ",
              bias->sym_sizes());
}

// The shape of a norm's statistics: the leading dimensions of `input`, and then ones.
c10::SymDimVector stats_shape(const Tensor& input, SymIntArrayRef normalized_shape) {
  const SymIntArrayRef sizes = input.sym_sizes();
  c10::SymDimVector shape(sizes.begin(), sizes.end() - normalized_shape.size());
  shape.resize(sizes.size(), 1);
  return shape;
}

// The parameters of a call that was checked, of tensors with data.
template <typename Call>
NormColumns columns_of(const Call& call) {
  const int64_t cols = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(call.normalized_shape));
  TORCH_CHECK(cols <= kMaxCols, "normalized_shape ", call.normalized_shape, " has ", cols,
              " elements; at most 2^30 are supported");
  const Tensor weight = or_undefined(call.weight), bias = or_undefined(call.bias);
  return {weight, bias, call.weight_offset, cols, call.x_dtype(), call.y_dtype()};
}

}  // namespace

void check_norm_options(ScalarType input, std::optional<ScalarType> weight,
                        std::optional<ScalarType> bias, ScalarType out, double eps,
                        double weight_offset, std::optional<ScalarType> residual,
                        std::optional<ScalarType> residual_dtype) {
  check_floating(input, "input");
  ScalarType x = input;
  const char* x_name = "input";
  if (residual.has_value()) {
    x = residual_dtype.value_or(*residual);
    x_name = "residual_out";
    const auto goes_with_input = [&](ScalarType dtype) {
      return dtype == input || (is_16_bit(input) && dtype == at::kFloat);
    };
    // residual_dtype is the residual's by default: a caller who gave none reads of the residual.
    TORCH_CHECK(goes_with_input(*residual), "residual is ", *residual, ", which does not go with ",
                input, " input: it must have the input's dtype, or be float32 for 16-bit input");
    TORCH_CHECK(goes_with_input(x), "residual_dtype is ", x, ", which does not go with ", input,
                " input: it must be the input's dtype, or float32 for 16-bit input");
    TORCH_CHECK(*residual == input || *residual == x, "residual is ", *residual,
                ", which does not go with ", input, " input and residual_dtype ", x,
                ": it must have the dtype of one of them");
  }
  check_param_dtype(x, x_name, weight, "weight");
  check_param_dtype(x, x_name, bias, "bias");
  TORCH_CHECK(
      out == x || (is_16_bit(x) && out == at::kFloat) || (x == at::kFloat && is_16_bit(out)),
      "out_dtype is ", out, ", which does not go with ", x, " ", x_name,
      ": it must be its dtype, float32 for 16 bit, or 16-bit for float32");
  TORCH_CHECK(std::isfinite(eps) && eps >= 0, "eps must be finite and not negative, but is ", eps);
  TORCH_CHECK(std::isfinite(weight_offset), "weight_offset must be finite, but is ", weight_offset);
  TORCH_CHECK(weight.has_value() || weight_offset == 0, "weight_offset is ", weight_offset,
              ", but there is no weight to add it to");
}

void check_norm(const NormCall& call) {
  const Tensor& input = call.input;
  check_layout(input, "input");
  if (has(call.residual)) check_layout(*call.residual, "residual");
  check_norm_options(input.scalar_type(), dtype_of(call.weight), dtype_of(call.bias),
                     call.y_dtype(), call.eps, call.weight_offset, dtype_of(call.residual),
                     call.residual_dtype);
  if (has(call.residual)) check_like(*call.residual, "residual", input, "input");
  check_normalized(input, "input", call.normalized_shape);
  check_params(call.weight, call.bias, call.rms, call.normalized_shape, input);
}

namespace {

struct Results {
  Tensor y, mean, rstd;
  Tensor side, columns;  // undefined without room
  Tensor residual_out;   // undefined without a residual

  explicit Results(const NormCall& call) {
    const ScalarType stats_dtype = at::toOpMathType(call.x_dtype());
    const auto stats = stats_shape(call.input, call.normalized_shape);
    y = new_like(call.input, call.y_dtype());
    if (has(call.residual)) residual_out = new_like(call.input, call.x_dtype());
    rstd = new_tensor(call.input, stats, stats_dtype);
    mean = call.rms ? new_tensor(call.input, {0}, stats_dtype) : new_like(rstd);
    if (!call.room.has_value()) return;
    side = new_tensor(call.input, {rstd.sym_numel(), *call.room}, stats_dtype);
    columns = new_tensor(call.input, {*call.room + 1}, at::kInt);
  }

  int64_t room() const { return columns.defined() ? columns.numel() - 1 : 0; }

  // The operator's, which has no mean with room.
  std::vector<Tensor> list() && {
    if (side.defined()) mean.reset();
    std::vector<Tensor> results;
    results.reserve(5);
    for (Tensor* result : {&y, &residual_out, &mean, &rstd, &side, &columns}) {
      if (result->defined()) results.push_back(std::move(*result));
    }
    return results;
  }
};

// input + residual, added and rounded as the kernels do it.
Tensor add_residual(const NormCall& call, const Results& out) {
  Tensor sum = out.residual_out;
  return at::add_out(sum, call.input, call.residual->to(sum.scalar_type()));
}

void forward_on_cpu(const NormCall& call, const NormColumns& norm, const Results& out) {
  const int64_t room = out.room();
  const Tensor x = has(call.residual) ? add_residual(call, out) : call.input;
  cpu::norm_forward(x, norm, call.eps, call.rms, out.y, out.mean, out.rstd);
  if (room == 0) return;
  const DType y = to_dtype(norm.y_dtype);
  Tensor lost = cpu::columns_beyond(precise_limits<double>(y), norm);
  if (lost.numel() > room) lost = cpu::columns_beyond(recoverable_limits<double>(y), norm);
  note_listing(norm, lost.numel(), room);
  const Tensor listed = lost.slice(0, 0, room);
  out.columns.zero_().slice(0, 1, 1 + listed.numel()).copy_(listed);
  out.columns.select(0, 0).fill_(lost.numel());
  Tensor xhat = out.side.zero_().slice(1, 0, listed.numel());
  xhat.copy_(x.reshape({out.rstd.numel(), norm.cols}).index_select(1, listed));
  if (!call.rms) xhat.sub_(out.mean.view({-1, 1}));
  xhat.mul_(out.rstd.view({-1, 1}));
}

#ifdef FUSED_NORM_WITH_CUDA

void forward_on_cuda(const NormCall& call, const NormColumns& norm, const Results& out) {
  const int64_t row_dims = static_cast<int64_t>(call.normalized_shape.size()), room = out.room();
  const c10::cuda::CUDAGuard guard(call.input.device());
  // A kernel adds where it can: its x is then the residual, and the input is its addend. Other
  // calls are few, and x is added up before.
  const bool adds = has(call.residual) && call.residual->scalar_type() == norm.x_dtype &&
                    call.input.scalar_type() == norm.y_dtype &&
                    norm_forward_adds(static_cast<int32_t>(norm.cols), to_dtype(norm.x_dtype),
                                      to_dtype(norm.y_dtype), current_device_properties());
  const int pack = pack_elements(to_dtype(norm.x_dtype), to_dtype(norm.y_dtype));
  const Rows x = as_rows(adds                 ? *call.residual
                         : has(call.residual) ? add_residual(call, out)
                                              : call.input,
                         row_dims, pack);
  const Tensor weight = aligned(norm.weight), bias = aligned(norm.bias);
  auto params = norm_params<NormForwardParams>(norm, out.rstd.numel(), call.rms, weight, bias);
  params.eps = call.eps;
  x.set(&params.x, &params.x_layout);
  std::optional<Rows> addend;
  if (adds) {
    addend = as_rows(call.input, row_dims, pack);
    addend->set(&params.addend, &params.addend_layout);
    params.sum = out.residual_out.mutable_data_ptr();
  }
  params.y = out.y.mutable_data_ptr();
  params.mean = call.rms ? nullptr : out.mean.mutable_data_ptr();
  params.rstd = out.rstd.mutable_data_ptr();
  if (room > 0) {
    params.list = {static_cast<int32_t>(room), out.columns.mutable_data_ptr<int32_t>(),
                   out.side.mutable_data_ptr()};
  }
  launch(launch_norm_forward, params);
}

#endif  // FUSED_NORM_WITH_CUDA

}  // namespace

std::vector<Tensor> norm_forward(const NormCall& call) {
  check_norm(call);
  if (call.input.is_meta()) return Results(call).list();
  check_overflow();
  const NormColumns norm = columns_of(call);
  if (call.room.has_value()) {
    const int64_t room = call.room->guard_int(__FILE__, __LINE__);
    const int64_t most = std::min(norm.cols, kMostRoom);
    TORCH_CHECK(room >= 0 && room <= most, "room is ", room, "; it must lie between 0 and ", most,
                ", for the ", norm.cols, " columns of normalized_shape ", call.normalized_shape,
                " and at most 2^24");
  }
  Results out(call);
  if (out.room() == 0 && out.columns.defined()) out.columns.zero_();
  if (call.input.numel() == 0) {
    zeroed<4>({out.mean, out.rstd, out.side, out.columns});
  } else if (call.input.is_cpu()) {
    forward_on_cpu(call, norm, out);
#ifdef FUSED_NORM_WITH_CUDA
  } else {
    forward_on_cuda(call, norm, out);
#endif
  }
  return std::move(out).list();
}

namespace {

// Of tensors with data.
void check_saved(const NormBackwardCall& call, int64_t cols) {
  const Tensor& dy = call.dy;
  const ScalarType stats_dtype = at::toOpMathType(call.input_dtype);
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
  const int64_t room = has(call.columns) ? call.columns->numel() - 1 : 0;
  const int64_t count =
      room > 0 ? std::clamp<int64_t>(*call.columns->const_data_ptr<int32_t>(), 0, room) : 0;
  Tensor listed = at::empty({0}, at::kLong);
  if (count > 0) {
    listed = call.columns->slice(0, 1, 1 + count).to(at::kLong);
    const int64_t least = listed.min().item<int64_t>(), most = listed.max().item<int64_t>();
    TORCH_CHECK(least >= 0 && most < norm.cols, "columns must be those of normalized_shape, 0 to ",
                norm.cols - 1, ", but holds ", least < 0 ? least : most);
    pass.columns = listed;
    pass.side = call.side->narrow(1, 0, count);
  }
  const auto limits = recoverable_limits<double>(to_dtype(norm.y_dtype));
  const Tensor lost = cpu::columns_beyond(limits, norm);
  if (lost.numel() > 0) {
    const Tensor unlisted = at::isin(lost, listed, /*assume_unique=*/false, /*invert=*/true);
    const int64_t missing = unlisted.sum().item<int64_t>();
    if (missing > 0) raise_overflow({overflow_of(norm, missing)});
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
  const int pack = pack_elements(to_dtype(norm.x_dtype), to_dtype(norm.y_dtype));
  const Rows dy = as_rows(call.dy, row_dims, pack), saved = as_rows(call.saved, row_dims, pack);
  const Tensor weight = aligned(norm.weight), bias = aligned(norm.bias);
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
  const Tensor totals = set_totals(norm, &params.watch);
  launch(launch_norm_backward, params);
}

#endif  // FUSED_NORM_WITH_CUDA

}  // namespace

Gradients<3> norm_backward(const NormBackwardCall& call) {
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
  if (has(call.dresidual)) {
    check_given(*call.dresidual, "dresidual", call.input_dtype, dy.sym_sizes(), dy, Strides::kAny);
  }

  NormColumns norm;
  Tensor dresidual;
  if (!dy.is_meta()) {
    norm = columns_of(call);
    check_saved(call, norm.cols);
    dresidual = aligned(or_undefined(call.dresidual));
  }
  const Gradients<3> made = {call.output_mask[0] ? new_like(dy, call.input_dtype) : Tensor(),
                             new_like_if(call.output_mask[1], call.weight),
                             new_like_if(call.output_mask[2], call.bias)};
  if (dy.is_meta() || dy.numel() == 0) return zeroed(made);
  if (dy.is_cpu()) {
    backward_on_cpu(call, norm, dresidual, made);
#ifdef FUSED_NORM_WITH_CUDA
  } else {
    backward_on_cuda(call, norm, dresidual, made);
#endif
  }
  return made;
}

int64_t unrecoverable_columns(const OptionalTensor& weight, const OptionalTensor& bias,
                              double weight_offset, ScalarType out_dtype) {
  const auto on_cpu = [](const OptionalTensor& t) { return has(t) ? t->cpu() : Tensor(); };
  NormColumns norm{on_cpu(weight), on_cpu(bias), weight_offset, 0, out_dtype, out_dtype};
  norm.cols = norm.first().numel();
  norm.x_dtype = norm.first().scalar_type();
  return cpu::columns_beyond(recoverable_limits<double>(to_dtype(out_dtype)), norm).numel();
}

}  // namespace fused_norm::ops
