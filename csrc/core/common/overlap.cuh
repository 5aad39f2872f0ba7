// Programmatic dependent launch, on chips that have it (compute capability 9.0 on): a kernel that
// is launched to overlap the one before it starts while that one drains, and waits for its results
// on the GPU. So kernels of this kind follow each other closely. After other kernels it starts as
// usual.
#pragma once

namespace fused_norm {

// From here on the next kernel may be launched. It sees what this one writes only when it waits.
// Called once this kernel or its predecessor has waited: so the next kernel begins after the end of
// the one before this, and finds nothing that is older in its caches.
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

// Both, at the top of a kernel. The next one is launched when the last block has begun.
__device__ __forceinline__ void meet_previous_kernel() {
  wait_for_prerequisites();
  launch_dependents();
}

}  // namespace fused_norm
