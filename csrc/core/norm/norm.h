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
  ParamVector weight, bias;
  void* y;          // rows x cols, contiguous
  void* mean;       // rows, fp32 (fp64 for fp64 x); null when rms
  void* rstd;       // rows
  ColumnList list;  // with room 0 none are listed, and nothing is launched for it
};

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
