// What the operators need of the CUDA runtime: chip properties, memory, and errors a user can act
// on.
#pragma once

#include <ATen/cuda/CUDAContext.h>
#include <cuda_runtime_api.h>

#include "core/common/types.h"

namespace fused_norm::ops {

// Of the current device; asked for once.
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

}  // namespace fused_norm::ops
