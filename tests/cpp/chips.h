// Chips of several sizes, for tests of plans.
#pragma once

#include <vector>

#include "core/common/types.h"

namespace fused_norm {

constexpr int kKilobyte = 1024;
// Properties like those of compute capability 9.0, 8.0 and 8.6.
const DeviceProperties kH200{
    132,
    227 * kKilobyte,
    8,
    {132, 132, 117, 120, 110, 102, 105, 120, 81, 70, 77, 84, 91, 98, 105, 112}};
const DeviceProperties kA100{108, 163 * kKilobyte, 1, {108}};
const DeviceProperties kA10{72, 99 * kKilobyte, 1, {72}};
// Clusters beside little shared memory: compute capability 12.0.
const DeviceProperties kRtx{170, 99 * kKilobyte, 8, {170, 170, 168, 168, 165, 168, 168, 168}};
// A slice of a chip.
const DeviceProperties kSlice{16, 227 * kKilobyte, 2, {16, 16, 15}};
const std::vector<DeviceProperties> kChips = {kH200, kA100, kA10, kRtx, kSlice};

}  // namespace fused_norm
