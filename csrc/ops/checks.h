// Argument checks that the operators share. Each throws, naming the argument and its value.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace fused_norm::ops {

// Column indices inside the kernels are 32 bit, with room for a block that overhangs the row's end.
constexpr int64_t kMaxCols = int64_t{1} << 30;

using OptionalTensor = std::optional<at::Tensor>;
inline const OptionalTensor kNoTensor;

inline bool has(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }
inline at::Tensor or_undefined(const OptionalTensor& tensor) {
  return tensor.value_or(at::Tensor());
}

std::optional<at::ScalarType> dtype_of(const OptionalTensor& tensor);

bool is_16_bit(at::ScalarType type);
bool is_floating(at::ScalarType type);  // float16, bfloat16, float32 or float64

void check_layout(const at::Tensor& tensor, const char* name);
void check_floating(at::ScalarType type, const char* name);

// Whether sizes are equal, or broadcast to others: a tracer may know that only at run time.
c10::SymBool are_alike(c10::SymIntArrayRef sizes, c10::SymIntArrayRef others,
                       bool broadcasts = false);
// check_device: on the other's device. check_like: of its shape too.
void check_device(const at::Tensor& tensor, const char* name, const at::Tensor& other,
                  const char* other_name);
void check_like(const at::Tensor& tensor, const char* name, const at::Tensor& other,
                const char* other_name);

// A tensor of a backward call: its layout, dtype and shape, and the device of `beside`; with
// kContiguous also that it has no gaps.
enum class Strides { kAny, kContiguous };
void check_given(const at::Tensor& tensor, const char* name, at::ScalarType dtype,
                 c10::SymIntArrayRef sizes, const at::Tensor& beside,
                 Strides strides = Strides::kContiguous);

// The tensor's last dimensions must be normalized_shape.
void check_normalized(const at::Tensor& tensor, const char* name,
                      c10::SymIntArrayRef normalized_shape);

// A norm's parameter: layout, shape and device. `input` is what it goes with.
void check_param(const OptionalTensor& param, const char* name,
                 c10::SymIntArrayRef normalized_shape, const at::Tensor& input);

// A contiguous tensor on the device of another, as results are; sizes may be symbols.
at::Tensor new_tensor(const at::Tensor& like, c10::SymIntArrayRef sizes, at::ScalarType dtype);
inline at::Tensor new_like(const at::Tensor& tensor, at::ScalarType dtype) {
  return new_tensor(tensor, tensor.sym_sizes(), dtype);
}
inline at::Tensor new_like(const at::Tensor& tensor) {
  return new_like(tensor, tensor.scalar_type());
}

// The gradient of a parameter, or undefined if it is not wanted or there is no parameter.
inline at::Tensor new_like_if(bool wanted, const OptionalTensor& tensor) {
  return wanted && has(tensor) ? new_like(*tensor) : at::Tensor();
}

// In a CPU-only build an error for any tensor with data on another device.
void check_built_for(const at::Tensor& tensor);

// The number of a tier, for tests and benchmarks, from the names of all.
int tier_number(c10::ArrayRef<const char*> names, const std::string& wanted);

}  // namespace fused_norm::ops
