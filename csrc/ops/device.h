// What the operators need of the CUDA runtime: chip properties, memory, and errors a user can act
// on.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include "core/common/types.h"

namespace fused_norm::ops {

// Of the current device; asked for once.
const DeviceProperties& current_device_properties();

// at::empty past the dispatcher, which takes the host as long again, for outputs on the current
// device.
at::Tensor empty_tensor(at::IntArrayRef sizes, at::ScalarType dtype);

// Throws for anything but cudaSuccess; a chip that this build has no kernels for is named, with
// what to do.
void check_launch(cudaError_t error);

}  // namespace fused_norm::ops
