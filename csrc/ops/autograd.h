// What the operators' autograd (norm_autograd.cpp, softmax_autograd.cpp) asks of a call.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <optional>
#include <type_traits>

namespace fused_norm::ops {

// Through the dispatcher, so that fake tensors and tracers see the operators too.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// A small struct as one number: each entry of AutogradContext::saved_data takes its time.
template <typename T>
int64_t packed(const T& fields) {
  static_assert(sizeof(T) <= sizeof(int64_t) && std::is_trivially_copyable_v<T>);
  int64_t number = 0;
  std::memcpy(&number, &fields, sizeof(T));
  return number;
}
template <typename T>
T unpacked(int64_t number) {
  T fields;
  std::memcpy(&fields, &number, sizeof(T));
  return fields;
}

inline bool has_tangent(const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }
inline bool has_tangent(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() && has_tangent(*tensor);
}

// A torch.func transform or forward mode is to differentiate, which know no
// torch::autograd::Function. What a transform asks of this level's Autograd kernels passes on to
// the level below through a key of its own.
template <typename... Tensors>
bool is_transformed(const Tensors&... tensors) {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         (has_tangent(tensors) || ...);
}

inline bool requires_grad(const at::Tensor& tensor) { return tensor.requires_grad(); }
inline bool requires_grad(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() && tensor->requires_grad();
}

template <typename... Tensors>
bool needs_grad(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

}  // namespace fused_norm::ops
