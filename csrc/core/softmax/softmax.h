// Softmax and log_softmax on the GPU, and their gradients.
//   softmax      y = exp(x - max) / sum(exp(x - max))     dx = scale * (dy - sum(y * dy)) * y
//   log_softmax  y = x - max - log(sum(exp(x - max)))     dx = scale * (dy - exp(y) * sum(dy))
// Rows of x may be scaled and masked on the way in: x stands for scale * x + mask then.
//
// Launchers check nothing: pointers and sizes are the caller's promise; there is at least one row
// and one column, and at most 2^30 columns. They return what CUDA says, and work on the current
// device and the given stream, also under graph capture. They need no workspace.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/common/types.h"
#include "core/softmax/tier.h"

namespace fused_norm {

// A mask of x's shape, never expanded in memory: a stride of zero broadcasts.
struct SoftmaxMask {
  static constexpr int kMaxDims = 6;

  const void* data;    // null: no mask
  bool additive;       // elements of `dtype`, added to scale * x; else bytes, 1 = masked out
  DType dtype;         // of an additive mask; kFloat64 only for fp64 x
  int64_t col_stride;  // in elements, as the strides below

  // The dimensions before the last, the innermost first, folded together by the caller where
  // strides allow. Their sizes multiply to the number of rows, which is below 2^31. Dimensions from
  // `dims` on are not looked at.
  int dims;
  Divider sizes[kMaxDims];
  int64_t strides[kMaxDims];
};

struct SoftmaxForwardParams {
  int64_t rows;
  int32_t cols;
  DType x_dtype, y_dtype;  // equal, or 16 bit -> fp32
  bool log;                // never together with scale, mask or causal
  const void* x;
  RowLayout x_layout;
  void* y;  // rows x cols, contiguous

  // A row whose elements are all masked out (or -inf) gives zeros if there is a mask or `causal`,
  // and NaN otherwise. What is masked out is not looked at: it may be NaN.
  double scale;
  SoftmaxMask mask;
  bool causal;       // key j is masked out for query i if j > i + cols - queries
  uint32_t queries;  // with `causal`: row r is query r % queries; rows are below 2^31 then

  // kAuto; or, to measure and to test, one that softmax_tier_holds(), for less than 2^28 rows.
  SoftmaxTier tier;
};

constexpr SoftmaxPass forward_pass(double scale, bool has_mask, bool causal) {
  return scale != 1.0 || has_mask || causal ? SoftmaxPass::kMaskedForward : SoftmaxPass::kForward;
}
constexpr SoftmaxPass backward_pass(bool log) {
  return log ? SoftmaxPass::kLogBackward : SoftmaxPass::kBackward;
}

cudaError_t launch_softmax_forward(const SoftmaxForwardParams& params,
                                   const DeviceProperties& device, cudaStream_t stream);

struct SoftmaxBackwardParams {
  int64_t rows;
  int32_t cols;
  DType x_dtype, y_dtype;  // dx has x's dtype, y and dy have y's
  bool log;
  double scale;
  const void* dy;
  RowLayout dy_layout;
  const void* y;  // the output: zero where x was masked out, so that dx is too
  RowLayout y_layout;
  void* dx;  // rows x cols, contiguous
  SoftmaxTier tier;
};

cudaError_t launch_softmax_backward(const SoftmaxBackwardParams& params,
                                    const DeviceProperties& device, cudaStream_t stream);

// The same over another dimension than the last: tensors are contiguous [outer, cols, inner], and
// the sums go over cols. For inner > 1. Neither scale nor mask.
struct SoftmaxColumnsParams {
  int64_t outer;
  int32_t cols;
  int64_t inner;
  DType x_dtype, y_dtype;
  bool log, backward;
  const void* read[2];  // x; in backward dy and y
  void* written;        // y; in backward dx
};

cudaError_t launch_softmax_columns(const SoftmaxColumnsParams& params,
                                   const DeviceProperties& device, cudaStream_t stream);

}  // namespace fused_norm
