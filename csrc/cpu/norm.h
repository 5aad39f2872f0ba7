// LayerNorm and RMSNorm on the CPU. Arguments are already checked; every tensor is a CPU tensor and
// has elements, norm.cols in each row whatever its shape. Statistics have an element for each row,
// in the accumulation type: fp64 for fp64 x, fp32 for every other. What is written is contiguous.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "core/norm/recoverable.h"

namespace fused_norm {

// The parameters of a norm, and what decides which of its columns are recoverable. Without a weight
// its factor is 1, whatever weight_offset is.
struct NormColumns {
  at::Tensor weight, bias;  // undefined when absent
  double weight_offset;
  int64_t cols;
  at::ScalarType x_dtype, y_dtype;  // of what is normalized, and of the output

  const at::Tensor& first() const { return weight.defined() ? weight : bias; }
};

namespace cpu {

// Writes y = xhat * (weight + weight_offset) + bias, with xhat = (x - mean) * rstd, or x * rstd
// with rms, and the statistics; mean is not looked at with rms. x has any strides.
void norm_forward(const at::Tensor& x, const NormColumns& norm, double eps, bool rms,
                  const at::Tensor& y, const at::Tensor& mean, const at::Tensor& rstd);

// The columns that do not meet the limits: int64, ascending.
at::Tensor columns_beyond(const RecoverableLimits<double>& limits, const NormColumns& norm);

struct NormBackward {
  const at::Tensor &dy, &saved;   // saved: x, or with from_output y
  const at::Tensor &mean, &rstd;  // mean is read only for LayerNorm from its input
  const NormColumns& norm;
  bool rms, from_output;
  // With from_output xhat = (y - bias) / (weight + weight_offset), but of these columns (int64) it
  // is in `side`, (rows, columns). Undefined: there are none.
  at::Tensor columns, side;
  const at::Tensor& dresidual;  // if defined, it is added to dx
  // dx in x_dtype, dweight and dbias in the parameters'; undefined: not wanted.
  const std::array<at::Tensor, 3>& gradients;
};

// Writes the gradients. Their bits do not depend on the number of threads.
void norm_backward(const NormBackward& call);

}  // namespace cpu
}  // namespace fused_norm
