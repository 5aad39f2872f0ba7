// Programmatic dependent launch, on chips that have it (compute capability 9.0 on): a kernel that
// is launched to overlap the one before it starts while that one drains, and waits for its results
// on the GPU.
#pragma once

namespace fused_norm {

// From here on the next kernel may be launched. It sees what this one writes only when it waits.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until the kernel before is done. Nothing that kernels write may be read, or written, before.
__device__ __forceinline__ void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fused_norm
