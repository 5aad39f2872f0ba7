// LayerNorm and RMSNorm on the CPU. Arguments are already checked; every tensor is a CPU tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace fused_norm::cpu {

// Statistics have the accumulation type: fp64 for fp64 input, fp32 for every other.
struct ForwardResult {
  at::Tensor y;     // (rows, cols), contiguous, out_dtype
  at::Tensor mean;  // (rows), undefined with rms
  at::Tensor rstd;  // (rows)
};

// y = xhat * (weight + weight_offset) + bias, with xhat = (x - mean) * rstd, or x * rstd with rms.
// x: (rows, cols), both positive, any strides. weight, bias: (cols) or undefined; without a weight
// the factor is 1, whatever weight_offset is.
ForwardResult norm_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                           double eps, double weight_offset, bool rms, at::ScalarType out_dtype);

// The columns that are not recoverable from an output of y_dtype, or not precise
// (core/norm/recoverable.h): int64, ascending. x_dtype chooses the precision, as in the other
// functions.
at::Tensor lost_columns(const at::Tensor& weight, const at::Tensor& bias, double weight_offset,
                        int64_t cols, at::ScalarType x_dtype, at::ScalarType y_dtype, bool precise);

// xhat of some columns of x, (rows, columns), in the accumulation type; mean undefined with rms.
at::Tensor gather_xhat(const at::Tensor& x, const at::Tensor& mean, const at::Tensor& rstd,
                       const at::Tensor& columns);

// The xhat of columns whose output does not give it: of those in `columns` (int64) it is in `side`
// (rows, at least as many), for those in `missing` it is NaN. Undefined tensors: there are none.
struct ListedColumns {
  at::Tensor columns, side, missing;
};

// Undefined where output_mask did not ask for the gradient or the parameter is undefined.
struct BackwardResult {
  at::Tensor dx;       // (rows, cols), contiguous, input_dtype
  at::Tensor dweight;  // (cols), weight's dtype
  at::Tensor dbias;    // (cols), bias's dtype
};

// saved is x, or with from_output y, from which xhat = (y - bias) / (weight + weight_offset) but
// for the listed columns; mean is read only for LayerNorm from its input. output_mask: {dx,
// dweight, dbias}. dresidual, if defined, (rows, cols) in input_dtype, is added to dx. The bits of
// the result do not depend on the number of threads.
BackwardResult norm_backward(const at::Tensor& dy, const at::Tensor& saved, const at::Tensor& mean,
                             const at::Tensor& rstd, const at::Tensor& weight,
                             const at::Tensor& bias, double weight_offset, bool rms,
                             bool from_output, const ListedColumns& listed,
                             at::ScalarType input_dtype, std::array<bool, 3> output_mask,
                             const at::Tensor& dresidual);

}  // namespace fused_norm::cpu
