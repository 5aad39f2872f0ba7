#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>

#include <algorithm>
#include <utility>

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
using c10::SymInt;
using c10::SymIntArrayRef;

struct Results {
  Tensor y, mean, rstd;
  Tensor side, columns;  // undefined without room
  Tensor residual_out;   // undefined without a residual

  explicit Results(const NormCall& call) {
    const ScalarType stats_dtype = accumulate_dtype(call.x_dtype());
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
  Tensor lost = cpu::lost_columns(norm, /*precise=*/true);
  if (lost.numel() > room) lost = cpu::lost_columns(norm, /*precise=*/false);
  note_listing(norm, lost.numel(), room);
  const Tensor listed = lost.slice(0, 0, room);
  out.columns.zero_().slice(0, 1, 1 + listed.numel()).copy_(listed);
  out.columns.select(0, 0).fill_(lost.numel());
  out.side.zero_()
      .slice(1, 0, listed.numel())
      .copy_(cpu::gather_xhat(x, call.rms ? Tensor() : out.mean, out.rstd, listed));
}

#ifdef FUSED_NORM_WITH_CUDA

void forward_on_cuda(const NormCall& call, const NormColumns& norm, const Results& out) {
  const int64_t row_dims = static_cast<int64_t>(call.normalized_shape.size()), room = out.room();
  const c10::cuda::CUDAGuard guard(call.input.device());
  // A kernel adds where it can. The others are few, and are added up before.
  const bool adds = has(call.residual) && call.residual->scalar_type() == norm.x_dtype &&
                    call.input.scalar_type() == norm.y_dtype &&
                    norm_forward_adds(static_cast<int32_t>(norm.cols), to_dtype(norm.x_dtype),
                                      to_dtype(norm.y_dtype), current_device_properties());
  const Rows x = as_rows(adds                 ? *call.residual
                         : has(call.residual) ? add_residual(call, out)
                                              : call.input,
                         row_dims);
  const Tensor weight = aligned_param(norm.weight), bias = aligned_param(norm.bias);
  auto params = norm_params<NormForwardParams>(norm, out.rstd.numel(), call.rms, weight, bias);
  params.eps = call.eps;
  x.set(&params.x, &params.x_layout);
  std::optional<Rows> addend;
  if (adds) {
    addend = as_rows(call.input, row_dims);
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
  // Outputs are new tensors to autograd, also where they are views of what the CPU path made.
  const at::AutoDispatchBelowADInplaceOrView guard_views;
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
    for (const Tensor* of_none : {&out.mean, &out.rstd, &out.side, &out.columns}) {
      if (of_none->defined()) of_none->zero_();
    }
  } else if (call.input.is_cpu()) {
    forward_on_cpu(call, norm, out);
#ifdef FUSED_NORM_WITH_CUDA
  } else {
    forward_on_cuda(call, norm, out);
#endif
  }
  return std::move(out).list();
}

}  // namespace fused_norm::ops
