#include "core/softmax/launch.cuh"

template struct fused_norm::SoftmaxOf<__nv_bfloat16>;
