#ifdef FUSED_NORM_WITH_CUDA

#include "ops/device.h"

#include <array>
#include <mutex>

#include "core/common/device.h"

namespace fused_norm::ops {

const DeviceProperties& current_device_properties() {
  constexpr int kMaxDevices = 64;
  static std::array<DeviceProperties, kMaxDevices> properties;
  static std::array<std::once_flag, kMaxDevices> asked;
  const int device = c10::cuda::current_device();
  TORCH_CHECK(device < kMaxDevices, "device index is ", device, ", but at most ", kMaxDevices,
              " devices are supported");
  std::call_once(asked[device], [&] { check_launch(query_device(device, &properties[device])); });
  return properties[device];
}

void check_launch(cudaError_t error) {
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion) {
    (void)cudaGetLastError();
    const cudaDeviceProp* prop = at::cuda::getCurrentDeviceProperties();
    TORCH_CHECK(false, "fused_norm was built for compute capability ", FUSED_NORM_ARCH_LIST,
                " and cannot run on ", prop->name, " (", prop->major, ".", prop->minor,
                "); rebuild with TORCH_CUDA_ARCH_LIST=", prop->major, ".", prop->minor,
                " pip install --no-build-isolation --force-reinstall --no-deps .");
  }
  C10_CUDA_CHECK(error);
}

}  // namespace fused_norm::ops

#endif  // FUSED_NORM_WITH_CUDA
