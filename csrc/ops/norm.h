// The norm operators (norm.cpp), and how they are recorded and registered (norm_autograd.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/norm.h"
#include "ops/call.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>

#include "core/norm/norm.h"
#include "ops/launch.h"
#endif

namespace fused_norm::ops {

// The checks that need no tensor: dtypes that go together, and numbers in range.
void check_norm_options(at::ScalarType input, std::optional<at::ScalarType> weight,
                        std::optional<at::ScalarType> bias, at::ScalarType out, double eps,
                        double weight_offset, std::optional<at::ScalarType> residual = std::nullopt,
                        std::optional<at::ScalarType> residual_dtype = std::nullopt);

// What a forward call has.
struct NormCall {
  const at::Tensor& input;
  const OptionalTensor &weight, &bias;
  c10::SymIntArrayRef normalized_shape;
  double eps, weight_offset;
  bool rms;
  std::optional<at::ScalarType> out_dtype;
  const OptionalTensor& residual;
  std::optional<at::ScalarType> residual_dtype;
  std::optional<c10::SymInt> room;

  auto fields() const {
    return std::tie(input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype,
                    residual, residual_dtype, room);
  }

  // Of what is normalized, and of the output.
  at::ScalarType x_dtype() const {
    return has(residual) ? residual_dtype.value_or(residual->scalar_type()) : input.scalar_type();
  }
  at::ScalarType y_dtype() const { return out_dtype.value_or(input.scalar_type()); }
};

// What a backward call has.
struct NormBackwardCall {
  const at::Tensor &dy, &saved;
  const OptionalTensor& mean;
  const at::Tensor& rstd;
  const OptionalTensor &weight, &bias;
  c10::SymIntArrayRef normalized_shape;
  double weight_offset;
  bool rms, from_output;
  at::ScalarType input_dtype;
  std::array<bool, 3> output_mask;
  const OptionalTensor &side, &columns, &dresidual;

  auto fields() const {
    return std::tie(dy, saved, mean, rstd, weight, bias, normalized_shape, weight_offset, rms,
                    from_output, input_dtype, output_mask, side, columns, dresidual);
  }
  at::ScalarType x_dtype() const { return input_dtype; }
  at::ScalarType y_dtype() const { return dy.scalar_type(); }
  bool needs_mean() const { return !rms && !from_output; }
};

// The checks that every forward call passes, for decompositions too.
void check_norm(const NormCall& call);

// -> {output, residual_out, mean, rstd}, or with room {output, residual_out, rstd, side, columns}.
// Without a residual there is no residual_out. mean and rstd have the shape of input with the
// normalized dimensions as ones, in fp32 (fp64 for fp64 input); mean is empty when rms.
//
// residual_out is input + residual, added in fp32 (fp64 for fp64 input) and rounded to
// residual_dtype, by default residual's; it is contiguous, and it is what is normalized. The output
// has input's dtype by default.
//
// With room the results are those for a backward call from the output. columns, int32 of 1 + room,
// says how many columns are not precise (core/norm/recoverable.h) and which they are; if room does
// not suffice, how many are not recoverable, and the first of these. side, (rows, room) in the type
// of rstd, holds their xhat. room is at most the number of columns.
std::vector<at::Tensor> norm_forward(const NormCall& call);

// -> (dx, dweight, dbias), undefined where output_mask is false. `saved` is the input, or the
// output when from_output; `mean` is needed only for a LayerNorm's input. from_output may come with
// side and columns; a column that is not recoverable and not listed makes the gradients NaN.
// dresidual, the gradient of residual_out, is added to dx before it is rounded.
Gradients<3> norm_backward(const NormBackwardCall& call);

// What functional norms give: the same results, recorded if autograd is to, with what is saved and
// the room for it chosen here; or, under a transform, those of the operator's own Autograd kernel.
std::vector<at::Tensor> norm(const NormCall& call, bool memory_efficient);

// How many columns of a norm with these parameters, of which one is given, cannot be taken back
// from an output of out_dtype.
int64_t unrecoverable_columns(const OptionalTensor& weight, const OptionalTensor& bias,
                              double weight_offset, at::ScalarType out_dtype);

#ifdef FUSED_NORM_WITH_CUDA

// What launches of norms and gated norms have in common. `weight` and `bias` are aligned().
template <typename Params>
Params norm_params(const NormColumns& norm, int64_t rows, bool rms, const at::Tensor& weight,
                   const at::Tensor& bias) {
  Params params{};
  params.rows = rows;
  params.cols = static_cast<int32_t>(norm.cols);
  params.x_dtype = to_dtype(norm.x_dtype);
  params.y_dtype = to_dtype(norm.y_dtype);
  params.rms = rms;
  params.weight_offset = norm.weight_offset;
  params.weight = to_param(weight);
  params.bias = to_param(bias);
  return params;
}

// Owns what params->workspace points to.
inline c10::DataPtr set_workspace(NormBackwardParams* params) {
  c10::DataPtr memory = c10::cuda::CUDACachingAllocator::get()->allocate(
      norm_backward_workspace(*params, current_device_properties()));
  params->workspace = memory.get();
  return memory;
}

#endif  // FUSED_NORM_WITH_CUDA

}  // namespace fused_norm::ops
