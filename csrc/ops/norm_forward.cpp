#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "cpu/norm.h"
#include "ops/column_watch.h"
#include "ops/norm.h"
#include "ops/rows.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>

#include "core/norm/norm.h"
#include "ops/device.h"
#endif

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymIntArrayRef;

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

struct Results {
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
    if (!side.defined()) {  // there is no room
      side = at::zeros({rstd.numel(), *room}, rstd.options());
      columns = at::zeros({1 + *room}, rstd.options().dtype(at::kInt));
    }
    results.insert(results.end(), {std::move(rstd), std::move(side), std::move(columns)});
    return results;
  }
};

// The results for meta tensors, and of no elements.
std::vector<Tensor> describe(const NormCall& call) {
  const SymIntArrayRef sizes = call.input.sym_sizes();
  const auto zeros = [&](SymIntArrayRef shape, ScalarType dtype) {
    return at::zeros_symint(shape, call.input.options().dtype(dtype));
  };
  c10::SymDimVector stats_shape(sizes.begin(), sizes.end() - call.normalized_shape.size());
  stats_shape.resize(sizes.size(), 1);
  const ScalarType stats_dtype = accumulate_dtype(call.x_dtype());
  Results out;
  out.y = new_like(call.input, call.y_dtype());
  if (has(call.residual)) out.residual_out = new_like(call.input, call.x_dtype());
  out.rstd = zeros(stats_shape, stats_dtype);
  out.mean = call.rms ? zeros({0}, stats_dtype) : zeros(stats_shape, stats_dtype);
  if (!call.room.has_value()) return std::move(out).list(std::nullopt);
  out.side = zeros({out.rstd.sym_numel(), *call.room}, stats_dtype);
  out.columns = zeros({*call.room + 1}, at::kInt);
  return std::move(out).list(0);
}

// A call that was checked, of tensors with data.
struct Call {
  const Tensor& input;
  const Tensor& residual;  // undefined when absent
  const NormColumns& norm;
  const NormRows& shape;
  double eps;
  bool rms;
  int64_t room;

  ScalarType stats_dtype() const { return accumulate_dtype(norm.x_dtype); }
  at::TensorOptions options(ScalarType dtype) const { return input.options().dtype(dtype); }
};

Results forward_on_cpu(const Call& call) {
  const auto& [weight, bias, weight_offset, cols, x_dtype, y_dtype] = call.norm;
  const int64_t rows = call.shape.rows, room = call.room;
  const auto options = call.options(call.stats_dtype());
  Results out;
  if (call.residual.defined()) {
    out.residual_out = add_residual(call.input, call.residual, x_dtype);
  }
  const Tensor x = (call.residual.defined() ? out.residual_out : call.input).reshape({rows, cols});
  const Tensor g = weight.defined() ? weight.reshape({-1}) : weight;
  const Tensor b = bias.defined() ? bias.reshape({-1}) : bias;
  const auto result = cpu::norm_forward(x, g, b, call.eps, weight_offset, call.rms, y_dtype);
  out.y = result.y.view(call.input.sizes());
  out.mean = call.rms ? at::empty({0}, options) : result.mean.view(call.shape.stats_shape);
  out.rstd = result.rstd.view(call.shape.stats_shape);
  if (room == 0) return out;

  Tensor lost = cpu::lost_columns(g, b, weight_offset, cols, x_dtype, y_dtype, /*precise=*/true);
  if (lost.numel() > room) {
    lost = cpu::lost_columns(g, b, weight_offset, cols, x_dtype, y_dtype, /*precise=*/false);
  }
  note_listing(call.norm, lost.numel(), room);
  const Tensor listed = lost.slice(0, 0, room);
  out.columns = at::zeros({1 + room}, options.dtype(at::kInt));
  out.columns.select(0, 0).fill_(lost.numel());
  out.columns.slice(0, 1, 1 + listed.numel()).copy_(listed);
  out.side = at::zeros({rows, room}, options);
  out.side.slice(1, 0, listed.numel()).copy_(cpu::gather_xhat(x, result.mean, result.rstd, listed));
  return out;
}

#ifdef FUSED_NORM_WITH_CUDA

Results forward_on_cuda(const Call& call) {
  const auto& [input, residual, norm, shape, eps, rms, room] = call;
  const ScalarType stats_dtype = call.stats_dtype();
  const c10::cuda::CUDAGuard guard(input.device());
  const DeviceProperties& device = current_device_properties();
  Results out;
  // A kernel adds where it can. The others are few, and are added up before.
  const bool adds = residual.defined() && residual.scalar_type() == norm.x_dtype &&
                    input.scalar_type() == norm.y_dtype &&
                    norm_forward_adds(static_cast<int32_t>(shape.cols), to_dtype(norm.x_dtype),
                                      to_dtype(norm.y_dtype), device);
  if (adds) {
    out.residual_out = empty_tensor(input.sizes(), norm.x_dtype);
  } else if (residual.defined()) {
    out.residual_out = add_residual(input, residual, norm.x_dtype);
  }
  const Rows x = as_rows(adds                 ? residual
                         : residual.defined() ? out.residual_out
                                              : input,
                         shape.row_dims);
  const Tensor weight = aligned_param(norm.weight), bias = aligned_param(norm.bias);
  out.y = empty_tensor(input.sizes(), norm.y_dtype);
  out.rstd = empty_tensor(shape.stats_shape, stats_dtype);
  out.mean =
      empty_tensor(rms ? at::IntArrayRef(0) : at::IntArrayRef(shape.stats_shape), stats_dtype);

  NormForwardParams params{};
  params.rows = shape.rows;
  params.cols = static_cast<int32_t>(shape.cols);
  params.x_dtype = to_dtype(norm.x_dtype);
  params.y_dtype = to_dtype(norm.y_dtype);
  params.rms = rms;
  params.eps = eps;
  params.weight_offset = norm.weight_offset;
  params.x = x.tensor.const_data_ptr();
  params.x_layout = x.layout;
  std::optional<Rows> addend;
  if (adds) {
    addend = as_rows(input, shape.row_dims);
    params.addend = addend->tensor.const_data_ptr();
    params.addend_layout = addend->layout;
    params.sum = out.residual_out.mutable_data_ptr();
  }
  params.weight = to_param(weight);
  params.bias = to_param(bias);
  params.y = out.y.mutable_data_ptr();
  params.mean = rms ? nullptr : out.mean.mutable_data_ptr();
  params.rstd = out.rstd.mutable_data_ptr();
  if (room > 0) {
    out.side = empty_tensor({shape.rows, room}, stats_dtype);
    out.columns = empty_tensor({1 + room}, at::kInt);
    params.list = {static_cast<int32_t>(room), out.columns.mutable_data_ptr<int32_t>(),
                   out.side.mutable_data_ptr()};
  }
  check_launch(launch_norm_forward(params, device, at::cuda::getCurrentCUDAStream()));
  return out;
}

#endif  // FUSED_NORM_WITH_CUDA

Results run(const Call& call) {
  if (call.input.is_cpu()) return forward_on_cpu(call);
#ifdef FUSED_NORM_WITH_CUDA
  return forward_on_cuda(call);
#else
  raise_cpu_only(call.input);
#endif
}

}  // namespace

std::vector<Tensor> norm_forward(const NormCall& call) {
  // Outputs are new tensors to autograd, also where they are views of what the CPU path made.
  const at::AutoDispatchBelowADInplaceOrView guard_views;
  check_norm(call);
  if (call.input.is_meta()) return describe(call);
  check_overflow();
  const at::IntArrayRef normalized_shape = C10_AS_INTARRAYREF_SLOW(call.normalized_shape);
  std::optional<int64_t> room;
  if (call.room.has_value()) {
    room = call.room->guard_int(__FILE__, __LINE__);
    check_room(*room, normalized_shape);
  }
  const NormRows shape = norm_rows(call.input, normalized_shape);
  if (shape.empty()) return describe(call);
  const Tensor residual = or_undefined(call.residual);
  const NormColumns norm{or_undefined(call.weight),
                         or_undefined(call.bias),
                         call.weight_offset,
                         shape.cols,
                         call.x_dtype(),
                         call.y_dtype()};
  return run({call.input, residual, norm, shape, call.eps, call.rms, room.value_or(0)}).list(room);
}

}  // namespace fused_norm::ops
