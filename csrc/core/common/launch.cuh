// Launching a kernel: attributes, run-time dtypes, and the form of rows.
#pragma once

#include <cuda_runtime.h>

#include <unordered_set>

#include "core/common/pack.cuh"
#include "core/common/types.h"

namespace fused_norm {

// Whether the rows follow each other without gaps from a multiple of 16 bytes on.
inline bool lies_flat(const void* data, const RowLayout& layout, int64_t cols) {
  return layout.inner == 0 && layout.stride == cols && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// How a kernel is launched, beyond its grid.
struct LaunchOptions {
  int shared_bytes = 0;
  int cluster_blocks = 1;
  // The kernel itself waits for the one before (programmatic dependent launch).
  bool overlaps_previous = false;
};

// Lets a kernel have all the dynamic shared memory that a block of the current device can have, or
// clusters of more than portable size: once a kernel and device. The value is always the same. Set
// to what each launch needs, it would be lowered by one thread while another is about to launch.
inline cudaError_t allow_most(const void* kernel, bool shared_memory, bool clusters) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  thread_local std::unordered_set<size_t> allowed;  // no thread waits for another
  auto once = [&](bool wanted, int kind, auto set) {
    const size_t key = reinterpret_cast<size_t>(kernel) * 256 + device * 2 + kind;
    if (!wanted || error != cudaSuccess || allowed.count(key)) return;
    error = set();
    if (error == cudaSuccess) allowed.insert(key);
  };
  once(shared_memory, 0, [&] {
    int most = 0;
    cudaFuncAttributes attributes{};
    const cudaError_t asked =
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const cudaError_t known = cudaFuncGetAttributes(&attributes, kernel);
    if (asked != cudaSuccess || known != cudaSuccess) return asked != cudaSuccess ? asked : known;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                most - static_cast<int>(attributes.sharedSizeBytes));
  });
  once(clusters, 1, [&] {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  });
  return error;
}

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 threads, const LaunchOptions& options,
                   cudaStream_t stream, const Args&... args) {
  // 48 KB need no leave; kernels also have up to 16 KB of static shared memory.
  const bool much_memory = options.shared_bytes > 32 * 1024;
  const bool large_clusters = options.cluster_blocks > kPortableClusterBlocks;
  if (much_memory || large_clusters) {
    const cudaError_t error =
        allow_most(reinterpret_cast<const void*>(kernel), much_memory, large_clusters);
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
  // What the launch itself says: cudaGetLastError() would return, and clear, errors of others.
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

// The same as a plan says it.
template <typename Kernel, typename... Args>
cudaError_t launch_plan(Kernel kernel, const KernelPlan& plan, cudaStream_t stream,
                        const Args&... args) {
  return launch(kernel, plan.blocks, dim3(plan.threads_per_row, plan.rows_per_block),
                {plan.shared_bytes, plan.cluster_blocks, plan.overlaps}, stream, args...);
}

// Calls launch(T{}) with the type of `dtype`, which must be one of Ts.
template <typename... Ts, typename Launch>
cudaError_t with_dtype(DType dtype, Launch launch) {
  cudaError_t result = cudaErrorInvalidValue;
  ((dtype == kDTypeOf<Ts> ? (result = launch(Ts()), true) : false) || ...);
  return result;
}

// Calls launch(A{}) with the type that a call's sums have: double for fp64, else float.
template <typename Launch>
cudaError_t with_accumulator(DType dtype, Launch launch) {
  return dtype == DType::kFloat64 ? launch(double()) : launch(float());
}

}  // namespace fused_norm
