// LayerNorm and RMSNorm on the GPU: y = (x - mean) * rstd * (weight + weight_offset) + bias, and
// its gradients. RMSNorm is the same without the mean (and rstd = 1 / sqrt(mean(x^2) + eps)).
//
// Launchers check nothing: pointers and sizes are the caller's promise. They return what CUDA says,
// and work on the current device and the given stream, also under graph capture.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/common/types.h"
#include "core/norm/columns.h"

namespace fused_norm {

struct NormForwardParams {
  int64_t rows;
  int32_t cols;
  DType x_dtype, y_dtype;  // equal, or 16 bit -> fp32, or fp32 -> 16 bit
  bool rms;
  double eps, weight_offset;
  const void* x;
  RowLayout x_layout;
  // If not null, x + addend is normalized in place of x, as rounded to x's dtype, in which it is
  // written to `sum`. Only where norm_forward_adds().
  const void* addend;  // has y's dtype
  RowLayout addend_layout;
  void* sum;  // rows x cols, contiguous
  ParamVector weight, bias;
  void* y;          // rows x cols, contiguous
  void* mean;       // rows, fp32 (fp64 for fp64 x); null when rms
  void* rstd;       // rows
  ColumnList list;  // with room 0 none are listed, and nothing is launched for it
};

// Whether there is a kernel that adds for rows of this length and these dtypes.
bool norm_forward_adds(int32_t cols, DType x_dtype, DType y_dtype, const DeviceProperties& device);

cudaError_t launch_norm_forward(const NormForwardParams& params, const DeviceProperties& device,
                                cudaStream_t stream);

struct NormBackwardParams {
  int64_t rows;
  int32_t cols;
  DType x_dtype, y_dtype;  // dx has x's dtype, dy has y's
  bool rms;
  bool from_output;  // `saved` is the output y; else the input x
  double weight_offset;
  const void* dy;
  RowLayout dy_layout;
  const void* saved;
  RowLayout saved_layout;
  const void* mean;  // null when rms or from_output
  const void* rstd;
  ParamVector weight, bias;
  ColumnList list;    // the forward call's; only from_output
  ColumnWatch watch;  // takes a look at the parameters on the way
  // Added to dx if not null: x's gradient from elsewhere. rows x cols in x's dtype, contiguous.
  const void* dresidual;
  // Gradients; null when not asked for. dx is contiguous, dweight and dbias have the parameter's
  // dtype.
  void* dx;
  void* dweight;
  void* dbias;
  void* workspace;  // norm_backward_workspace() bytes, 16-byte aligned, contents irrelevant
};

size_t norm_backward_workspace(const NormBackwardParams& params, const DeviceProperties& device);

cudaError_t launch_norm_backward(const NormBackwardParams& params, const DeviceProperties& device,
                                 cudaStream_t stream);

}  // namespace fused_norm
