// Argument checks that the operators share. Each throws, naming the argument and its value.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fused_norm::ops {

// Column indices inside the kernels are 32 bit, with room for a block that overhangs the row's end.
constexpr int64_t kMaxCols = int64_t{1} << 30;

bool is_16_bit(at::ScalarType type);

void check_layout(const at::Tensor& tensor, const char* name);

// float16, bfloat16, float32 or float64.
void check_floating(at::ScalarType type, const char* name);

// Of a CPU-only build, given a tensor of another device.
[[noreturn]] void raise_cpu_only(const at::Tensor& tensor);

}  // namespace fused_norm::ops
