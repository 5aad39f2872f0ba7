#include "core/norm/launch.cuh"

template struct fused_norm::NormOf<__nv_bfloat16>;
