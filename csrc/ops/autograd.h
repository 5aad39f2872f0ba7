// What the operators' kernels of the dispatcher's Autograd key have in common: who differentiates a
// call. The first derivative is the kernels', recorded by a torch::autograd::Function of each
// operator. Derivatives above the first, forward mode, torch.func transforms and torch.jit.trace
// have the operator's decomposition, decomposed_* of the same arguments
// (fused_norm/_decompositions.py).
#pragma once

#include <ATen/TracerMode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "ops/checks.h"

namespace fused_norm::ops {

// Through the dispatcher, so that fake tensors and tracers see the operators too.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").typed<Signature>();
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

inline OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

inline bool has_tangent(const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }
inline bool has_tangent(const OptionalTensor& tensor) {
  return has(tensor) && has_tangent(*tensor);
}

// A torch.func transform, forward mode or torch.jit.trace is at work, which know no
// torch::autograd::Function. What a transform asks of this level's Autograd kernels passes on to
// the level below through a key of its own.
template <typename... Tensors>
bool is_transformed(const Tensors&... tensors) {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         at::tracer::impl::is_dispatch_enabled() || (has_tangent(tensors) || ...);
}

inline bool requires_grad(const at::Tensor& tensor) { return tensor.requires_grad(); }
inline bool requires_grad(const OptionalTensor& tensor) {
  return has(tensor) && tensor->requires_grad();
}

template <typename... Tensors>
bool needs_grad(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

// A struct of arguments (call.h) as its members, anything else as it is.
template <typename T>
auto arguments_of(const T& call, int) -> decltype(T::fields(call)) {
  return T::fields(call);
}
template <typename T>
std::tuple<const T&> arguments_of(const T& argument, long) {
  return {argument};
}

template <typename Signature>
class Operator {
 public:
  explicit Operator(const std::string& name)
      : op_(find_operator<Signature>("fused_norm::" + name)),
        decomposed_(find_operator<Signature>("fused_norm::decomposed_" + name)) {}

  template <typename... Args>
  auto call(const Args&... args) const {
    return apply(op_, args...);
  }
  template <typename... Args>
  auto decomposed(const Args&... args) const {
    return apply(decomposed_, args...);
  }
  // Where autograd is to see nothing of the call.
  template <typename... Args>
  auto below_autograd(const Args&... args) const {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return apply(op_, args...);
  }
  // For a backward pass. With create_graph=True, or under a transform, the operator's own Autograd
  // kernel decides.
  template <typename... Args>
  auto in_backward(const at::Tensor& dy, const Args&... args) const {
    std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
    if (!at::GradMode::is_enabled() && !is_transformed(dy)) below_autograd.emplace();
    return apply(op_, dy, args...);
  }

 private:
  using Handle = c10::TypedOperatorHandle<Signature>;

  template <typename... Args>
  static auto apply(const Handle& op, const Args&... args) {
    return std::apply([&](const auto&... each) { return op.call(each...); },
                      std::tuple_cat(arguments_of(args, 0)...));
  }

  Handle op_, decomposed_;
};

// The Autograd kernel of every operator for a backward pass: the kernels' values, and derivatives
// to any order.
void differentiate_backward(const c10::OperatorHandle& op, c10::Stack* stack);

}  // namespace fused_norm::ops
