// Launching a kernel: attributes, run-time dtypes, and the form of rows.
#pragma once

#include <cuda_runtime.h>

#include "core/common/pack.cuh"
#include "core/common/types.h"

namespace fused_norm {

// Whether every row starts on a pack boundary and is a whole number of packs (common/pack.cuh).
inline bool is_regular(const void* data, const RowLayout& layout, int64_t cols, int pack,
                       DType dtype) {
  const int64_t bytes = int64_t{pack} * size_of(dtype);
  return reinterpret_cast<uintptr_t>(data) % bytes == 0 && cols % pack == 0 &&
         layout.stride % pack == 0 && layout.outer_stride % pack == 0;
}

// Whether the rows follow each other without gaps from a multiple of 16 bytes on.
inline bool lies_flat(const void* data, const RowLayout& layout, int64_t cols) {
  return layout.inner == 0 && layout.stride == cols && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

namespace detail {

// How a kernel is launched, beyond its grid.
struct LaunchOptions {
  int shared_bytes = 0;
  int cluster_blocks = 1;
  bool overlaps_previous =
      false;  // the kernel itself waits for the one before (programmatic dependent launch)
};

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 threads, const LaunchOptions& options,
                   cudaStream_t stream, const Args&... args) {
  // 48 KB need no leave; kernels also have up to 16 KB of static shared memory.
  if (options.shared_bytes > 32 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, options.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  if (options.cluster_blocks > kPortableClusterBlocks) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = options.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (options.cluster_blocks > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(options.cluster_blocks),
                                                    1, 1};
  }
  if (options.overlaps_previous) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, Params(args)...);
  return error == cudaSuccess ? cudaGetLastError() : error;
}

}  // namespace detail

// Calls launch(T{}) with the type of `dtype`, which must be one of Ts.
template <typename... Ts, typename Launch>
cudaError_t with_dtype(DType dtype, Launch launch) {
  cudaError_t result = cudaErrorInvalidValue;
  ((dtype == kDTypeOf<Ts> ? (result = launch(Ts()), true) : false) || ...);
  return result;
}

}  // namespace fused_norm
