#include "core/attention/portable_forward.cuh"

template cudaError_t fused_norm::attention_forward_portable<__half>(
    const fused_norm::AttentionParams& params, cudaStream_t stream);
