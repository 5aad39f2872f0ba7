#include "core/attention/portable_backward.cuh"

template cudaError_t fused_norm::attention_backward_portable<__nv_bfloat16>(
    const fused_norm::AttentionGradient& gradient, cudaStream_t stream);
