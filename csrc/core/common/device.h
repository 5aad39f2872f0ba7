// Reads what plans need of a chip.
#pragma once

#include <cuda_runtime_api.h>

#include "core/common/types.h"

namespace fused_norm {

// Asks the driver about `device`, which must be the current one. Slow: callers keep the answer.
cudaError_t query_device(int device, DeviceProperties* properties);

}  // namespace fused_norm
