#include <algorithm>
#include <utility>

#include "core/common/device.h"

namespace fused_norm {
namespace {

__global__ void __launch_bounds__(512) fill_multiprocessor() {}

}  // namespace

cudaError_t query_device(int device, DeviceProperties* properties) {
  int major = 0, minor = 0;
  const std::pair<int*, cudaDeviceAttr> attributes[] = {
      {&properties->sm_count, cudaDevAttrMultiProcessorCount},
      {&properties->shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin},
      {&major, cudaDevAttrComputeCapabilityMajor},
      {&minor, cudaDevAttrComputeCapabilityMinor}};
  cudaError_t error = cudaSuccess;
  for (const auto& [value, attribute] : attributes) {
    error = cudaDeviceGetAttribute(value, attribute, device);
    if (error != cudaSuccess) return error;
  }
  properties->capability = 10 * major + minor;
  properties->max_cluster_blocks = 1;
  std::fill_n(properties->filled_by_clusters, kMaxClusterBlocks, 0);
  properties->filled_by_clusters[0] = properties->sm_count;
  // Code that the driver compiled from an older chip's PTX has nothing of what 9.0 brought.
  cudaFuncAttributes compiled;
  if ((error = cudaFuncGetAttributes(&compiled, fill_multiprocessor)) != cudaSuccess) return error;
  if (major < 9 || compiled.ptxVersion < 90) return cudaSuccess;

  // A block with more than half of the shared memory has a multiprocessor to itself.
  const int shared_bytes = properties->shared_bytes_per_block / 4 * 3;
  error = cudaFuncSetAttribute(fill_multiprocessor, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               shared_bytes);
  if (error != cudaSuccess) return error;
  error =
      cudaFuncSetAttribute(fill_multiprocessor, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  for (int blocks : {2, 3, 4, 5, 6, 7, 8, 16}) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = 512;
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    error = cudaOccupancyMaxActiveClusters(&clusters, fill_multiprocessor, &config);
    if (error != cudaSuccess) {
      const bool needed = blocks == 2 || blocks == 4 || blocks == kPortableClusterBlocks;
      if (needed) return error;
      cudaGetLastError();  // a chip without larger clusters
      continue;
    }
    if (clusters == 0) continue;  // a slice of a chip may be too small
    properties->filled_by_clusters[blocks - 1] = clusters * blocks;
    if (blocks == 2 * properties->max_cluster_blocks && blocks <= kPortableClusterBlocks)
      properties->max_cluster_blocks = blocks;
  }
  return cudaSuccess;
}

}  // namespace fused_norm
