// The norm operators: argument checks, allocation, and the choice between the CPU path and the
// kernels. Registered as torch.ops.fused_norm.* and bound in fused_norm._C (bindings.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace fused_norm::ops {

using OptionalTensor = std::optional<at::Tensor>;
using TensorTriple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The checks that need no tensor, for fake kernels too: dtypes that go together, and numbers in
// range.
void check_norm_options(at::ScalarType input, std::optional<at::ScalarType> weight,
                        std::optional<at::ScalarType> bias, at::ScalarType out, double eps,
                        double weight_offset);

// -> (output, mean, rstd). mean and rstd have the shape of input with the normalized dimensions as
// ones, in fp32 (fp64 for fp64 input); mean is empty when rms.
TensorTriple norm_forward(const at::Tensor& input, const OptionalTensor& weight,
                          const OptionalTensor& bias, at::IntArrayRef normalized_shape, double eps,
                          double weight_offset, bool rms, std::optional<at::ScalarType> out_dtype);

// -> (output, rstd, side, columns), for a backward call from the output. columns, int32 of 1 +
// room, says how many columns are not precise (core/norm/recoverable.h) and which they are; if room
// does not suffice, how many are not recoverable, and the first of these. side, (rows, room) in the
// type of rstd, holds their xhat. room is at most the number of columns.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_forward_listing(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    at::IntArrayRef normalized_shape, double eps, double weight_offset, bool rms,
    std::optional<at::ScalarType> out_dtype, int64_t room);

// The same for add_norm_forward.
void check_add_norm_options(at::ScalarType input, at::ScalarType residual,
                            at::ScalarType residual_out, std::optional<at::ScalarType> weight,
                            std::optional<at::ScalarType> bias, at::ScalarType out, double eps,
                            double weight_offset);

// -> (output, residual_out, mean, rstd): residual_out is input + residual, added in fp32 (fp64 for
// fp64 input) and rounded to residual_dtype, by default residual's; it is contiguous. The rest is
// norm_forward(residual_out), whose output has input's dtype by default.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_norm_forward(
    const at::Tensor& input, const at::Tensor& residual, const OptionalTensor& weight,
    const OptionalTensor& bias, at::IntArrayRef normalized_shape, double eps, double weight_offset,
    bool rms, std::optional<at::ScalarType> residual_dtype,
    std::optional<at::ScalarType> out_dtype);

// -> (output, residual_out, rstd, side, columns), as norm_forward_listing(residual_out).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_norm_forward_listing(
    const at::Tensor& input, const at::Tensor& residual, const OptionalTensor& weight,
    const OptionalTensor& bias, at::IntArrayRef normalized_shape, double eps, double weight_offset,
    bool rms, std::optional<at::ScalarType> residual_dtype, std::optional<at::ScalarType> out_dtype,
    int64_t room);

// -> (dx, dweight, dbias), undefined where output_mask is false. `saved` is the input, or the
// output when from_output; `mean` is needed only for a LayerNorm's input. from_output may come with
// side and columns; a column that is not recoverable and not listed makes the gradients NaN.
// dresidual, the gradient of residual_out, is added to dx before it is rounded.
TensorTriple norm_backward(const at::Tensor& dy, const at::Tensor& saved,
                           const OptionalTensor& mean, const at::Tensor& rstd,
                           const OptionalTensor& weight, const OptionalTensor& bias,
                           at::IntArrayRef normalized_shape, double weight_offset, bool rms,
                           bool from_output, at::ScalarType input_dtype,
                           std::array<bool, 3> output_mask, const OptionalTensor& side,
                           const OptionalTensor& columns, const OptionalTensor& dresidual);

// How many columns of a norm with these parameters cannot be taken back from an output of out_dtype
// (0-d int64).
at::Tensor unrecoverable_columns(const OptionalTensor& weight, const OptionalTensor& bias,
                                 double weight_offset, at::ScalarType out_dtype);

}  // namespace fused_norm::ops
