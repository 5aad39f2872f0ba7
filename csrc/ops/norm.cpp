#include "ops/norm.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/isin.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu/norm.h"
#include "ops/checks.h"
#include "ops/column_watch.h"
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

void check_options(ScalarType x, const char* x_name, std::optional<ScalarType> weight,
                   std::optional<ScalarType> bias, ScalarType out, double eps,
                   double weight_offset) {
  TORCH_CHECK(
      out == x || (is_16_bit(x) && out == at::kFloat) || (x == at::kFloat && is_16_bit(out)),
      "out_dtype is ", out, ", which does not go with ", x, " ", x_name,
      ": it must be its dtype, float32 for 16 bit, or 16-bit for float32");
  check_param_dtype(x, x_name, weight, "weight");
  check_param_dtype(x, x_name, bias, "bias");
  TORCH_CHECK(std::isfinite(eps) && eps >= 0, "eps must be finite and not negative, but is ", eps);
  TORCH_CHECK(std::isfinite(weight_offset), "weight_offset must be finite, but is ", weight_offset);
  TORCH_CHECK(weight.has_value() || weight_offset == 0, "weight_offset is ", weight_offset,
              ", but there is no weight to add it to");
}

std::optional<ScalarType> dtype_of(const OptionalTensor& tensor) {
  if (!tensor.has_value() || !tensor->defined()) return std::nullopt;
  return tensor->scalar_type();
}

// A norm's parameter, checked against the input: layout, shape and device. Undefined when absent.
Tensor check_param(const OptionalTensor& param, const char* name, SymIntArrayRef normalized_shape,
                   const Tensor& input) {
  if (!param.has_value() || !param->defined()) return {};
  check_layout(*param, name);
  TORCH_CHECK(param->sym_sizes() == normalized_shape, name,
              " must have the shape of normalized_shape ", normalized_shape, ", but has shape ",
              param->sym_sizes());
  TORCH_CHECK(param->device() == input.device(), name, " is on ", param->device(),
              ", but input is on ", input.device());
  return *param;
}

void check_rms_bias(bool rms, const Tensor& bias) {
  TORCH_CHECK(!rms || !bias.defined(), "bias must be None with rms=True, but has shape ",
              bias.sym_sizes());
}

// weight + weight_offset, added in the precision in which the kernels add it.
Tensor effective_weight(const Tensor& weight, double weight_offset) {
  return weight.to(weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
      .add(weight_offset);
}

void check_shape(const Tensor& tensor, const char* name, SymIntArrayRef normalized_shape) {
  const size_t row_dims = normalized_shape.size();
  TORCH_CHECK(row_dims > 0, "normalized_shape must have at least one dimension, but is []");
  const SymIntArrayRef sizes = tensor.sym_sizes();
  TORCH_CHECK(sizes.size() >= row_dims && sizes.slice(sizes.size() - row_dims) == normalized_shape,
              "normalized_shape is ", normalized_shape, ", but ", name, " has shape ", sizes,
              ", whose last dimensions differ from it");
}

ScalarType stats_dtype_of(ScalarType x) { return x == at::kDouble ? at::kDouble : at::kFloat; }

// A meta tensor on the device of `like`.
Tensor described(const Tensor& like, SymIntArrayRef sizes, ScalarType dtype) {
  return at::empty_symint(sizes, like.options().dtype(dtype));
}

struct Geometry {
  int64_t rows, cols, row_dims;
  at::DimVector stats_shape;  // the leading dimensions, then ones
};

// Of a tensor whose shape was checked.
Geometry geometry_of(const Tensor& tensor, at::IntArrayRef normalized_shape) {
  const int64_t row_dims = static_cast<int64_t>(normalized_shape.size());
  const auto sizes = tensor.sizes();
  Geometry geometry{1, c10::multiply_integers(normalized_shape), row_dims,
                    at::DimVector(sizes.begin(), sizes.end() - row_dims)};
  geometry.rows = c10::multiply_integers(geometry.stats_shape);
  geometry.stats_shape.resize(tensor.dim(), 1);
  TORCH_CHECK(geometry.cols <= kMaxCols, "normalized_shape ", normalized_shape, " has ",
              geometry.cols, " elements; at most 2^30 are supported");
  return geometry;
}

#ifdef FUSED_NORM_WITH_CUDA
void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}
#endif

}  // namespace

void check_norm_options(ScalarType input, std::optional<ScalarType> weight,
                        std::optional<ScalarType> bias, ScalarType out, double eps,
                        double weight_offset) {
  check_floating(input, "input");
  check_options(input, "input", weight, bias, out, eps, weight_offset);
}

void check_add_norm_options(ScalarType input, ScalarType residual, ScalarType residual_out,
                            std::optional<ScalarType> weight, std::optional<ScalarType> bias,
                            ScalarType out, double eps, double weight_offset) {
  check_floating(input, "input");
  const auto goes_with_input = [&](ScalarType dtype) {
    return dtype == input || (is_16_bit(input) && dtype == at::kFloat);
  };
  // residual_dtype is the residual's by default: a caller who gave none reads of the residual.
  TORCH_CHECK(goes_with_input(residual), "residual is ", residual, ", which does not go with ",
              input, " input: it must have the input's dtype, or be float32 for 16-bit input");
  TORCH_CHECK(goes_with_input(residual_out), "residual_dtype is ", residual_out,
              ", which does not go with ", input,
              " input: it must be the input's dtype, or float32 for 16-bit input");
  TORCH_CHECK(residual == input || residual == residual_out, "residual is ", residual,
              ", which does not go with ", input, " input and residual_dtype ", residual_out,
              ": it must have the dtype of one of them");
  check_options(residual_out, "residual_out", weight, bias, out, eps, weight_offset);
}

namespace {

// input + residual, added and rounded as the kernels do it.
Tensor add_residual(const Tensor& input, const Tensor& residual, ScalarType dtype) {
  Tensor sum = at::empty(input.sizes(), input.options().dtype(dtype));
  return at::add_out(sum, input, residual.to(dtype));
}

// For a call that lists columns.
void check_room(int64_t room, at::IntArrayRef normalized_shape) {
  const int64_t most = std::min(c10::multiply_integers(normalized_shape), kMostRoom);
  TORCH_CHECK(room >= 0 && room <= most, "room is ", room, "; it must lie between 0 and ", most,
              ", for the ", c10::multiply_integers(normalized_shape),
              " columns of normalized_shape ", normalized_shape, " and at most 2^24");
}

struct Forward {
  Tensor y, mean, rstd;
  Tensor side, columns;  // undefined without room
  Tensor residual_out;   // undefined without a residual

  // The operator's results.
  std::vector<Tensor> list(std::optional<int64_t> room) && {
    std::vector<Tensor> results;
    results.reserve(5);
    results.push_back(std::move(y));
    if (residual_out.defined()) results.push_back(std::move(residual_out));
    if (!room.has_value()) {
      results.push_back(std::move(mean));
      results.push_back(std::move(rstd));
      return results;
    }
    if (!side.defined()) {  // there are no rows, or there is no room
      side = at::zeros({rstd.numel(), *room}, rstd.options());
      columns = at::zeros({1 + *room}, rstd.options().dtype(at::kInt));
    }
    results.insert(results.end(), {std::move(rstd), std::move(side), std::move(columns)});
    return results;
  }
};

// The results for meta tensors.
std::vector<Tensor> describe_forward(const Tensor& input, bool adds, size_t row_dims, bool rms,
                                     ScalarType x_dtype, ScalarType y_dtype,
                                     const std::optional<SymInt>& room) {
  const SymIntArrayRef sizes = input.sym_sizes();
  c10::SymDimVector stats_shape(sizes.begin(), sizes.end() - row_dims);
  stats_shape.resize(sizes.size(), 1);
  Forward out;
  out.y = described(input, sizes, y_dtype);
  if (adds) out.residual_out = described(input, sizes, x_dtype);
  out.rstd = described(input, stats_shape, stats_dtype_of(x_dtype));
  out.mean = rms ? at::empty({0}, out.rstd.options()) : at::empty_like(out.rstd);
  if (!room.has_value()) return std::move(out).list(std::nullopt);
  out.side = described(input, {out.rstd.sym_numel(), *room}, out.rstd.scalar_type());
  out.columns = described(input, {*room + 1}, at::kInt);
  return std::move(out).list(0);
}

}  // namespace

std::vector<Tensor> norm_forward(const Tensor& input, const OptionalTensor& weight,
                                 const OptionalTensor& bias, SymIntArrayRef sym_shape, double eps,
                                 double weight_offset, bool rms,
                                 std::optional<ScalarType> out_dtype, const OptionalTensor& added,
                                 std::optional<ScalarType> residual_dtype,
                                 std::optional<SymInt> sym_room) {
  // Outputs are new tensors to autograd, also where they are views of what the CPU path made.
  const at::AutoDispatchBelowADInplaceOrView guard_views;
  const Tensor residual = added.value_or(Tensor());
  check_layout(input, "input");
  ScalarType x_dtype = input.scalar_type();
  const ScalarType y_dtype = out_dtype.value_or(x_dtype);
  if (residual.defined()) {
    check_layout(residual, "residual");
    x_dtype = residual_dtype.value_or(residual.scalar_type());
    check_add_norm_options(input.scalar_type(), residual.scalar_type(), x_dtype, dtype_of(weight),
                           dtype_of(bias), y_dtype, eps, weight_offset);
    TORCH_CHECK(residual.sym_sizes() == input.sym_sizes(), "residual must have the shape of input ",
                input.sym_sizes(), ", but has shape ", residual.sym_sizes());
    TORCH_CHECK(residual.device() == input.device(), "residual is on ", residual.device(),
                ", but input is on ", input.device());
  } else {
    check_norm_options(x_dtype, dtype_of(weight), dtype_of(bias), y_dtype, eps, weight_offset);
  }
  check_shape(input, "input", sym_shape);
  const Tensor g = check_param(weight, "weight", sym_shape, input);
  const Tensor b = check_param(bias, "bias", sym_shape, input);
  check_rms_bias(rms, b);
  if (input.is_meta()) {
    return describe_forward(input, residual.defined(), sym_shape.size(), rms, x_dtype, y_dtype,
                            sym_room);
  }

  check_overflow();
  const at::IntArrayRef normalized_shape = C10_AS_INTARRAYREF_SLOW(sym_shape);
  std::optional<int64_t> room_given;
  if (sym_room.has_value()) {
    room_given = sym_room->guard_int(__FILE__, __LINE__);
    check_room(*room_given, normalized_shape);
  }
  const int64_t room = room_given.value_or(0);
  const Geometry geometry = geometry_of(input, normalized_shape);
  const ScalarType stats_dtype = stats_dtype_of(x_dtype);
  const auto options = input.options();
  const NormColumns norm{g, b, weight_offset, geometry.cols, x_dtype, y_dtype};
  Forward out;
  if (geometry.rows == 0 || geometry.cols == 0) {
    auto stats = [&] { return at::zeros(geometry.stats_shape, options.dtype(stats_dtype)); };
    out.y = at::empty(input.sizes(), options.dtype(y_dtype));
    out.mean = rms ? at::empty({0}, options.dtype(stats_dtype)) : stats();
    out.rstd = stats();
    if (residual.defined()) out.residual_out = add_residual(input, residual, x_dtype);
    return std::move(out).list(room_given);
  }

  if (input.is_cpu()) {
    if (residual.defined()) out.residual_out = add_residual(input, residual, x_dtype);
    const Tensor x =
        (residual.defined() ? out.residual_out : input).reshape({geometry.rows, geometry.cols});
    const Tensor g_row = g.defined() ? g.reshape({-1}) : g;
    const Tensor b_row = b.defined() ? b.reshape({-1}) : b;
    const auto result = cpu::norm_forward(x, g_row, b_row, eps, weight_offset, rms, y_dtype);
    out.y = result.y.view(input.sizes());
    out.mean =
        rms ? at::empty({0}, options.dtype(stats_dtype)) : result.mean.view(geometry.stats_shape);
    out.rstd = result.rstd.view(geometry.stats_shape);
    if (room > 0) {
      auto find = [&](bool precise) {
        return cpu::lost_columns(g_row, b_row, weight_offset, geometry.cols, x_dtype, y_dtype,
                                 precise);
      };
      Tensor lost = find(true);
      if (lost.numel() > room) lost = find(false);
      note_listing(norm, room, lost.numel());
      const Tensor listed = lost.slice(0, 0, room);
      out.columns = at::zeros({1 + room}, options.dtype(at::kInt));
      out.columns.select(0, 0).fill_(lost.numel());
      out.columns.slice(0, 1, 1 + listed.numel()).copy_(listed);
      out.side = at::zeros({geometry.rows, room}, options.dtype(stats_dtype));
      out.side.slice(1, 0, listed.numel())
          .copy_(cpu::gather_xhat(x, result.mean, result.rstd, listed));
    }
    return std::move(out).list(room_given);
  }
#ifdef FUSED_NORM_WITH_CUDA
  const c10::cuda::CUDAGuard guard(input.device());
  const DeviceProperties& device = current_device_properties();
  // A kernel adds where it can. The others are few, and are added up before.
  const bool adds = residual.defined() && residual.scalar_type() == x_dtype &&
                    input.scalar_type() == y_dtype &&
                    norm_forward_adds(static_cast<int32_t>(geometry.cols), to_dtype(x_dtype),
                                      to_dtype(y_dtype), device);
  if (adds) {
    out.residual_out = empty_tensor(input.sizes(), x_dtype);
  } else if (residual.defined()) {
    out.residual_out = add_residual(input, residual, x_dtype);
  }
  const Rows x = as_rows(adds                 ? residual
                         : residual.defined() ? out.residual_out
                                              : input,
                         geometry.row_dims);
  const Tensor g_data = aligned_param(g), b_data = aligned_param(b);
  out.y = empty_tensor(input.sizes(), y_dtype);
  out.rstd = empty_tensor(geometry.stats_shape, stats_dtype);
  out.mean =
      empty_tensor(rms ? at::IntArrayRef(0) : at::IntArrayRef(geometry.stats_shape), stats_dtype);

  NormForwardParams params{};
  params.rows = geometry.rows;
  params.cols = static_cast<int32_t>(geometry.cols);
  params.x_dtype = to_dtype(x_dtype);
  params.y_dtype = to_dtype(y_dtype);
  params.rms = rms;
  params.eps = eps;
  params.weight_offset = weight_offset;
  params.x = x.tensor.const_data_ptr();
  params.x_layout = x.layout;
  std::optional<Rows> addend;
  if (adds) {
    addend = as_rows(input, geometry.row_dims);
    params.addend = addend->tensor.const_data_ptr();
    params.addend_layout = addend->layout;
    params.sum = out.residual_out.mutable_data_ptr();
  }
  params.weight = to_param(g_data);
  params.bias = to_param(b_data);
  params.y = out.y.mutable_data_ptr();
  params.mean = rms ? nullptr : out.mean.mutable_data_ptr();
  params.rstd = out.rstd.mutable_data_ptr();
  if (room > 0) {
    note_listing(norm, room, -1);
    out.side = empty_tensor({geometry.rows, room}, stats_dtype);
    out.columns = empty_tensor({1 + room}, at::kInt);
    params.list = {static_cast<int32_t>(room), out.columns.mutable_data_ptr<int32_t>(),
                   out.side.mutable_data_ptr()};
  }
  check_launch(launch_norm_forward(params, device, at::cuda::getCurrentCUDAStream()));
  return std::move(out).list(room_given);
#else
  raise_cpu_only(input);
#endif
}

namespace {

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
  check_shape(dy, "dy", sym_shape);
  TORCH_CHECK(saved.sym_sizes() == dy.sym_sizes(), "saved must have the shape of dy ",
              dy.sym_sizes(), ", but has shape ", saved.sym_sizes());
  TORCH_CHECK(saved.device() == dy.device(), "saved is on ", saved.device(), ", but dy is on ",
              dy.device());
  const ScalarType y_dtype = dy.scalar_type();
  check_floating(y_dtype, "dy");
  check_norm_options(input_dtype, dtype_of(weight), dtype_of(bias), y_dtype, 0, weight_offset);
  const ScalarType saved_dtype = from_output ? y_dtype : input_dtype;
  TORCH_CHECK(saved.scalar_type() == saved_dtype, "saved must be ", saved_dtype, ", but is ",
              saved.scalar_type());
  const Tensor g = check_param(weight, "weight", sym_shape, dy);
  const Tensor b = check_param(bias, "bias", sym_shape, dy);
  check_rms_bias(rms, b);
  output_mask[1] = output_mask[1] && g.defined();
  output_mask[2] = output_mask[2] && b.defined();
  if (dy.is_meta()) {
    return {output_mask[0] ? described(dy, dy.sym_sizes(), input_dtype) : Tensor(),
            output_mask[1] ? described(g, g.sym_sizes(), g.scalar_type()) : Tensor(),
            output_mask[2] ? described(b, b.sym_sizes(), b.scalar_type()) : Tensor()};
  }

  const at::IntArrayRef normalized_shape = C10_AS_INTARRAYREF_SLOW(sym_shape);
  const Geometry geometry = geometry_of(dy, normalized_shape);
  const ScalarType stats_dtype = stats_dtype_of(input_dtype);
  auto check_stats = [&](const Tensor& stats, const char* name) {
    TORCH_CHECK(stats.scalar_type() == stats_dtype && stats.numel() == geometry.rows &&
                    stats.device() == dy.device() && stats.is_contiguous(),
                name, " must hold ", geometry.rows, " contiguous elements of ", stats_dtype, " on ",
                dy.device(), ", but has shape ", stats.sizes(), ", dtype ", stats.scalar_type(),
                " on ", stats.device());
  };
  check_stats(rstd, "rstd");
  const bool needs_mean = !rms && !from_output;
  TORCH_CHECK(!needs_mean || (mean.has_value() && mean->defined()),
              "mean must be given, but is None");
  const Tensor row_mean = needs_mean ? *mean : Tensor();
  if (needs_mean) check_stats(row_mean, "mean");
  const Tensor listed = columns.has_value() ? *columns : Tensor();
  const Tensor listed_xhat = side.has_value() ? *side : Tensor();
  TORCH_CHECK(listed.defined() == listed_xhat.defined() && (!listed.defined() || from_output),
              "side and columns come together, and only with from_output: side is ",
              listed_xhat.defined() ? "given" : "None", ", columns is ",
              listed.defined() ? "given" : "None", ", from_output is ",
              from_output ? "True" : "False");
  if (listed.defined()) {
    const int64_t room = listed.numel() - 1;
    TORCH_CHECK(listed.scalar_type() == at::kInt && listed.device() == dy.device() &&
                    listed.is_contiguous() && listed.dim() == 1 && room >= 0 &&
                    room <= geometry.cols,
                "columns must be at most ", geometry.cols + 1, " int32 on ", dy.device(),
                ", but has shape ", listed.sizes(), ", dtype ", listed.scalar_type(), " on ",
                listed.device());
    TORCH_CHECK(listed_xhat.scalar_type() == stats_dtype && listed_xhat.device() == dy.device() &&
                    listed_xhat.is_contiguous() &&
                    listed_xhat.sizes() == at::IntArrayRef({geometry.rows, room}),
                "side must have shape ", at::IntArrayRef({geometry.rows, room}), " and dtype ",
                stats_dtype, " on ", dy.device(), ", but has shape ", listed_xhat.sizes(),
                ", dtype ", listed_xhat.scalar_type(), " on ", listed_xhat.device());
  }
  Tensor added = dresidual.value_or(Tensor());
  if (added.defined()) {
    check_layout(added, "dresidual");
    TORCH_CHECK(added.scalar_type() == input_dtype && added.sizes() == dy.sizes() &&
                    added.device() == dy.device(),
                "dresidual must have dtype ", input_dtype, " and shape ", dy.sizes(), " on ",
                dy.device(), ", but has dtype ", added.scalar_type(), " and shape ", added.sizes(),
                " on ", added.device());
  }
  const NormColumns norm{g, b, weight_offset, geometry.cols, input_dtype, y_dtype};

  if (geometry.rows == 0 || geometry.cols == 0) {
    return {output_mask[0] ? at::empty(dy.sizes(), dy.options().dtype(input_dtype)) : Tensor(),
            output_mask[1] ? at::zeros_like(g) : Tensor(),
            output_mask[2] ? at::zeros_like(b) : Tensor()};
  }

  if (dy.is_cpu()) {
    const at::DimVector flat = {geometry.rows, geometry.cols};
    auto flat_or_undefined = [](const Tensor& t) { return t.defined() ? t.reshape({-1}) : t; };
    const Tensor g_row = flat_or_undefined(g), b_row = flat_or_undefined(b);
    cpu::ListedColumns list;
    if (from_output) list = recover_on_cpu(norm, g_row, b_row, listed, listed_xhat);
    auto result =
        cpu::norm_backward(dy.reshape(flat), saved.reshape(flat), flat_or_undefined(row_mean),
                           rstd.view({-1}), g_row, b_row, weight_offset, rms, from_output, list,
                           input_dtype, output_mask, added.defined() ? added.reshape(flat) : added);
    if (list.missing.defined() && result.dbias.defined())
      result.dbias.index_fill_(0, list.missing, NAN);
    if (result.dx.defined()) result.dx = result.dx.view(dy.sizes());
    if (result.dweight.defined()) result.dweight = result.dweight.view(normalized_shape);
    if (result.dbias.defined()) result.dbias = result.dbias.view(normalized_shape);
    return {result.dx, result.dweight, result.dbias};
  }
#ifdef FUSED_NORM_WITH_CUDA
  const c10::cuda::CUDAGuard guard(dy.device());
  const Rows dy_rows = as_rows(dy, geometry.row_dims);
  const Rows saved_rows = as_rows(saved, geometry.row_dims);
  const Tensor g_data = aligned_param(g), b_data = aligned_param(b);
  auto gradient = [&](bool wanted, at::IntArrayRef shape, ScalarType dtype) {
    return wanted ? empty_tensor(shape, dtype) : Tensor();
  };
  const Tensor dx = gradient(output_mask[0], dy.sizes(), input_dtype);
  const Tensor dweight =
      output_mask[1] ? gradient(true, normalized_shape, g.scalar_type()) : Tensor();
  const Tensor dbias =
      output_mask[2] ? gradient(true, normalized_shape, b.scalar_type()) : Tensor();

  NormBackwardParams params{};
  params.rows = geometry.rows;
  params.cols = static_cast<int32_t>(geometry.cols);
  params.x_dtype = to_dtype(input_dtype);
  params.y_dtype = to_dtype(y_dtype);
  params.rms = rms;
  params.from_output = from_output;
  params.weight_offset = weight_offset;
  params.dy = dy_rows.tensor.const_data_ptr();
  params.dy_layout = dy_rows.layout;
  params.saved = saved_rows.tensor.const_data_ptr();
  params.saved_layout = saved_rows.layout;
  params.mean = needs_mean ? row_mean.const_data_ptr() : nullptr;
  params.rstd = rstd.const_data_ptr();
  params.weight = to_param(g_data);
  params.bias = to_param(b_data);
  if (listed.defined() && listed.numel() > 1) {
    params.list = {static_cast<int32_t>(listed.numel() - 1), listed.mutable_data_ptr<int32_t>(),
                   listed_xhat.mutable_data_ptr()};
  }
  if (added.defined() && dx.defined()) {
    added = added.contiguous();
    params.dresidual = added.const_data_ptr();
  }
  params.dx = data_or_null(dx);
  params.dweight = data_or_null(dweight);
  params.dbias = data_or_null(dbias);
  const DeviceProperties& device = current_device_properties();
  const c10::DataPtr workspace =
      c10::cuda::CUDACachingAllocator::get()->allocate(norm_backward_workspace(params, device));
  params.workspace = workspace.get();
  const auto stream = at::cuda::getCurrentCUDAStream();
  params.watch = watch_backward(norm, from_output, params.list.room, stream);
  check_launch(launch_norm_backward(params, device, stream));
  return {dx, dweight, dbias};
#else
  raise_cpu_only(dy);
#endif
}

Tensor unrecoverable_columns(const OptionalTensor& weight, const OptionalTensor& bias,
                             double weight_offset, ScalarType out_dtype) {
  const bool has_weight = weight.has_value() && weight->defined();
  const bool has_bias = bias.has_value() && bias->defined();
  TORCH_CHECK(has_weight || has_bias, "unrecoverable_columns needs a weight or a bias");

  double roundoff, smallest, largest;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out_dtype, "unrecoverable_columns",
                                  [&] {
                                    using Limits = std::numeric_limits<scalar_t>;
                                    roundoff = static_cast<double>(Limits::epsilon()) / 2;
                                    smallest = static_cast<double>(Limits::min());
                                    largest = static_cast<double>(Limits::max());
                                  });
  // In fp64, so that no comparison over- or underflows whatever the parameters' dtype.
  const Tensor g = has_weight ? effective_weight(*weight, weight_offset).to(at::kDouble).abs()
                              : at::ones_like(*bias, bias->options().dtype(at::kDouble));
  Tensor recoverable = g.ge(smallest).logical_and_(g.le(largest));
  if (has_bias) recoverable.logical_and_(bias->to(at::kDouble).abs().mul_(roundoff * 64).le(g));
  return recoverable.logical_not_().sum();
}

}  // namespace fused_norm::ops
