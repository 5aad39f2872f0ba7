#include "core/attention/hopper_launch.cuh"

FUSED_NORM_HOPPER(64)
