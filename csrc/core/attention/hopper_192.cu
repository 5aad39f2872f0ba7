#include "core/attention/hopper_launch.cuh"

template struct fused_norm::HopperLaunch<192>;
