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

// Of a gated RMSNorm: y = norm(x) * act(gate), or norm(x * act(gate)). A row may be a group, one of
// several in a row of the weight: group g has the weight from column g * cols on.
struct GateForm {
  int32_t groups;   // row r is of group r % groups
  bool norm_first;  // the norm, then the gate
  bool silu;        // act(z) is z * sigmoid(z), or else sigmoid(z)

  constexpr int32_t group_of(int64_t row) const {
    return groups > 1 ? static_cast<int32_t>(row % groups) : 0;
  }
};
struct Gate {
  const void* data;  // of x's dtype; null: there is no gate
  RowLayout layout;
  GateForm form;
  void* gradient;  // backward: if dx is asked for; contiguous
};

// Rows that are whole packs (pack_elements() of x's dtype and y's) start on pack boundaries, of
// every tensor; the parameters on 16 bytes.
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
  // Only of RMSNorm with y in x's dtype, without addend and list, and where norm_gates().
  Gate gate;
};

// Whether there is a kernel that adds for rows of this length and these dtypes.
bool norm_forward_adds(int32_t cols, DType x_dtype, DType y_dtype, const DeviceProperties& device);

cudaError_t launch_norm_forward(const NormForwardParams& params, const DeviceProperties& device,
                                cudaStream_t stream);

// Whether there are kernels with a gate: not for fp64, nor for the longest rows; in backward, and
// with groups, for whole packs (of 16 bytes, in forward four elements).
bool norm_gates(int32_t cols, int32_t groups, DType x_dtype, bool backward,
                const DeviceProperties& device);

// As in NormForwardParams, rows of whole packs start on pack boundaries.
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
  Gate gate;        // forward's
};

size_t norm_backward_workspace(const NormBackwardParams& params, const DeviceProperties& device);

cudaError_t launch_norm_backward(const NormBackwardParams& params, const DeviceProperties& device,
                                 cudaStream_t stream);

}  // namespace fused_norm
