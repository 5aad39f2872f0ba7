#include "ops/launch.h"

#include <array>
#include <limits>
#include <mutex>
#include <optional>

#include "ops/checks.h"

#ifdef FUSED_NORM_WITH_CUDA
#include "core/common/device.h"
#endif

namespace fused_norm::ops {
namespace {

std::optional<RowLayout> find_layout(const at::Tensor& tensor, int64_t row_dims) {
  const int64_t lead = tensor.dim() - row_dims;
  const auto row = folded_dims(tensor, lead, tensor.dim());
  if (row.size() > 1 || (row.size() == 1 && row[0].second != 1)) return std::nullopt;

  const auto dims = folded_dims(tensor, 0, lead);
  if (dims.size() < 2) return one_stride(dims.empty() ? 0 : dims[0].second);
  const auto [inner, outer] = std::pair(dims[0], dims[1]);
  const bool fits = inner.first * outer.first <= std::numeric_limits<int32_t>::max();
  if (dims.size() > 2 || !fits) return std::nullopt;
  return two_strides(static_cast<uint32_t>(inner.first), inner.second, outer.second);
}

}  // namespace

c10::SmallVector<std::pair<int64_t, int64_t>, 4> folded_dims(const at::Tensor& tensor,
                                                             int64_t begin, int64_t end) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 4> dims;
  for (int64_t d = end - 1; d >= begin; --d) {
    const int64_t size = tensor.size(d), stride = tensor.stride(d);
    if (size == 1) continue;
    if (!dims.empty() && stride == dims.back().second * dims.back().first) {
      dims.back().first *= size;
    } else {
      dims.emplace_back(size, stride);
    }
  }
  return dims;
}

Rows as_rows(const at::Tensor& tensor, int64_t row_dims, int pack) {
  const auto layout = find_layout(tensor, row_dims);
  const int64_t cols = c10::multiply_integers(tensor.sizes().slice(tensor.dim() - row_dims));
  const bool packed = pack > 0 && cols % pack == 0;
  const DType dtype = to_dtype(tensor.scalar_type());
  if (layout && (!packed || start_on_packs(tensor.const_data_ptr(), dtype, *layout, pack)))
    return {tensor, *layout};
  return as_rows(tensor.clone(at::MemoryFormat::Contiguous), row_dims);
}

DType to_dtype(at::ScalarType type) {
  if (type == at::kHalf) return DType::kFloat16;
  if (type == at::kBFloat16) return DType::kBFloat16;
  TORCH_INTERNAL_ASSERT(type == at::kFloat || type == at::kDouble, "unchecked dtype ", type);
  return type == at::kFloat ? DType::kFloat32 : DType::kFloat64;
}

at::Tensor aligned(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  return aligned ? tensor.contiguous() : tensor.clone(at::MemoryFormat::Contiguous);
}

ParamVector to_param(const at::Tensor& tensor) {
  if (!tensor.defined()) return {nullptr, DType::kFloat32};
  return {tensor.const_data_ptr(), to_dtype(tensor.scalar_type())};
}

#ifdef FUSED_NORM_WITH_CUDA

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

#endif  // FUSED_NORM_WITH_CUDA

}  // namespace fused_norm::ops
