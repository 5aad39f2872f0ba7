// Tensors as the kernels take them, and launching.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <utility>

#include "core/common/types.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <cuda_runtime_api.h>
#endif

namespace fused_norm::ops {

// A tensor as rows of consecutive elements. `tensor` owns the memory: the argument itself, or a
// contiguous copy where two strides cannot say where the rows start.
struct Rows {
  at::Tensor tensor;
  RowLayout layout;

  // To fields of a launcher's params.
  void set(const void** data, RowLayout* fields) const {
    *data = tensor.const_data_ptr();
    *fields = layout;
  }
};

// The dimensions [begin, end), inner to outer, as the fewest (size, stride) that say the same.
c10::SmallVector<std::pair<int64_t, int64_t>, 4> folded_dims(const at::Tensor& tensor,
                                                             int64_t begin, int64_t end);

// The last `row_dims` dimensions of `tensor` make up a row. The tensor must not be empty. Rows of
// whole packs, of `pack` elements, start on pack boundaries: if need be in a copy.
Rows as_rows(const at::Tensor& tensor, int64_t row_dims, int pack = 0);

DType to_dtype(at::ScalarType type);

// `tensor`, if need be as a contiguous copy that starts on 16 bytes. Undefined stays undefined.
at::Tensor aligned(const at::Tensor& tensor);

// The kernels' view of what aligned() gives.
ParamVector to_param(const at::Tensor& tensor);

#ifdef FUSED_NORM_WITH_CUDA

// Properties of the current device; asked for once.
const DeviceProperties& current_device_properties();

// Throws for anything but cudaSuccess; a chip that this build has no kernels for is named, with
// what to do.
void check_launch(cudaError_t error);

// Calls a launcher of core's on the current device and stream.
template <typename Params>
void launch(cudaError_t (*launcher)(const Params&, const DeviceProperties&, cudaStream_t),
            const Params& params) {
  check_launch(launcher(params, current_device_properties(), at::cuda::getCurrentCUDAStream()));
}

#endif  // FUSED_NORM_WITH_CUDA

}  // namespace fused_norm::ops
