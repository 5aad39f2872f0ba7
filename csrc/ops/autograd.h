// What the operators have in common at the dispatcher: how they are registered, and, for their
// kernels of its Autograd key, who differentiates a call. The first derivative is the kernels',
// recorded by a torch::autograd::Function of each operator. Derivatives above the first, forward
// mode, torch.func transforms and torch.jit.trace have the operator's decomposition, decomposed_*
// of the same arguments (fused_norm/_decompositions.py).
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/TracerMode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/call.h"
#include "ops/checks.h"

namespace fused_norm::ops {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Through the dispatcher, so that fake tensors and tracers see the operators too.
inline c10::OperatorHandle find_operator(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
}

inline OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

inline bool has_tangent(const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }
inline bool requires_grad(const at::Tensor& tensor) { return tensor.requires_grad(); }

// A torch.func transform, forward mode or torch.jit.trace is at work, which know no
// torch::autograd::Function. A transform calls this level's Autograd kernels, and then the operator
// at the level below through the key FuncTorchDynamicLayerBackMode.
template <typename... Args>
bool is_transformed(const Args&... args) {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         at::tracer::impl::is_dispatch_enabled() || any_tensor(has_tangent, args...);
}

template <typename... Args>
bool needs_grad(const Args&... args) {
  return at::GradMode::is_enabled() && any_tensor(requires_grad, args...);
}

// Around decompositions, where autocast would round in between.
using NoAutocast = c10::impl::ExcludeDispatchKeyGuard;

// Keeps autograd off a call in a backward pass that is not differentiated in turn.
class InBackward {
 public:
  template <typename... Args>
  explicit InBackward(const Args&... args) {
    if (!at::GradMode::is_enabled() && !is_transformed(args...)) below_autograd_.emplace();
  }

 private:
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd_;
};

template <typename Signature>
class Operator {
 public:
  // `kernel` gives the signature.
  Operator(const std::string& name, Signature* /*kernel*/)
      : op_{find_operator("fused_norm::" + name).typed<Signature>()},
        decomposed_{find_operator("fused_norm::decomposed_" + name).typed<Signature>()} {}

  template <typename... Args>
  auto call(const Args&... args) const {
    return call_by(op_, args...);
  }
  // Where autograd is to see nothing of the call.
  template <typename... Args>
  auto below_autograd(const Args&... args) const {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call(args...);
  }
  // For a backward pass. With create_graph=True, or under a transform, the operator's own Autograd
  // kernel decides.
  template <typename... Args>
  auto in_backward(const Args&... args) const {
    const InBackward guard(args...);
    return call(args...);
  }
  // For the operator's Autograd kernel: the results of a call that is not to be recorded. A
  // transform has the decomposition, behind check(arguments).
  template <typename Check, typename... Args>
  auto unrecorded(const Check& check, const Args&... args) const {
    std::optional<decltype(call(args...))> results;
    if (is_transformed(args...)) {
      check(args...);
      const NoAutocast guard(c10::autocast_dispatch_keyset);
      results = call_by(decomposed_, args...);
    } else if (!needs_grad(args...)) {
      results = below_autograd(args...);
    }
    return results;
  }

 private:
  template <typename... Args>
  static auto call_by(const c10::TypedOperatorHandle<Signature>& op, const Args&... args) {
    return call_with([&](const auto&... each) { return op.call(each...); }, args...);
  }

  c10::TypedOperatorHandle<Signature> op_, decomposed_;
};

// The operator of this name, with the signature of a kernel.
template <auto function>
const auto& operator_of(const char* name) {
  static const Operator op(name, function);
  return op;
}

inline bool has_saved_tensor_hooks() {
  return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

// A result as a Function saves it. A hook of saved tensors that kept the result itself would keep
// the node, and the node the hook's.
inline at::Tensor saved_result(const at::Tensor& result) {
  return has_saved_tensor_hooks() ? result.detach() : result;
}

// saved_result() may have cut the tensor from its node. Where the backward pass is differentiated,
// this makes it result `number` of the node again, so that derivatives flow through it.
inline void make_result(at::Tensor* saved, uint32_t number) {
  if (!at::GradMode::is_enabled() || !saved->defined() || saved->grad_fn() != nullptr) return;
  *saved = saved->detach();
  torch::autograd::impl::set_gradient_edge(*saved, {torch::autograd::get_current_node(), number});
}

variable_list tensors_in(const c10::Stack& stack);

// What a Function of an operator of a Call (call.h) saves: its arguments, of which `tensors` are
// tensors, and results behind these.
void save_call(AutogradContext* ctx, const c10::Stack& arguments, at::TensorList tensors,
               at::TensorList results);

// Its backward pass. `before`: what the backward operator `op` takes before the arguments.
// `places`: of the arguments that are differentiated, in the order of the gradients; behind the
// arguments `op` takes which of them are wanted.
variable_list backward_of_call(AutogradContext* ctx, const variable_list& saved, const char* op,
                               at::IntArrayRef places, c10::Stack before);

// Of an operator of two results. The second is always saved, the first if Self::kSavesFirst; the
// first is always differentiable, the second if Self::kDifferentiatesSecond. `Self` also has the
// operator, op(), and kBackward, kPlaces and before(gradients of the results that are
// differentiable, the results saved) for backward_of_call().
template <typename Self>
struct CallFunction : torch::autograd::Function<Self> {
  static constexpr bool is_traceable = true;

  // The tensors come by themselves too: autograd does not look into `call`. A second result that is
  // not differentiable goes to `constant`: compiled autograd takes none that is marked so.
  template <typename Call>
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, const Call& call,
                               const c10::Stack& arguments, at::Tensor* constant) {
    const auto [first, second] = Self::op().below_autograd(call);
    save_call(ctx, arguments, tensors,
              {Self::kSavesFirst ? saved_result(first) : at::Tensor(), saved_result(second)});
    if (Self::kDifferentiatesSecond) return {first, second};
    *constant = second;
    return {first};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list saved = ctx->get_saved_variables();
    if (!grads[0].defined() && !grads.back().defined()) return variable_list(saved.size() + 1);
    saved.back() = saved.back().contiguous();  // a hook of saved tensors may give other strides
    return backward_of_call(ctx, saved, Self::kBackward, Self::kPlaces,
                            Self::before(grads, *(saved.end() - 2), saved.back()));
  }
};

// Before a call is recorded: a Function asks its tensors for sizes, which not every tensor has.
// check() says which.
template <typename Check, typename Call>
void check_sizes(const Check& check, const Call& call) {
  const auto lacks_sizes = [](const at::Tensor& tensor) {
    return tensor.is_nested() || tensor.layout() != at::kStrided;
  };
  if (any_tensor(lacks_sizes, call)) check(call);
}

// The Autograd kernel of an operator that has a CallFunction.
template <typename Self, typename Call>
Forward differentiate_call(const Call& call) {
  if (auto results = Self::op().unrecorded(Self::kCheck, call)) return *results;
  check_sizes(Self::kCheck, call);
  const c10::Stack arguments = as_stack(call);
  const variable_list tensors = tensors_in(arguments);
  at::Tensor constant;
  const variable_list results = Self::apply(at::TensorList(tensors), call, arguments, &constant);
  return {results[0], Self::kDifferentiatesSecond ? results[1] : constant};
}

// The Autograd kernel of every operator for a backward pass: the kernels' values, and derivatives
// to any order.
void differentiate_backward(const c10::OperatorHandle& op, c10::Stack* stack);

// Registration, by each family of its own operators, torch.ops.fused_norm.*.

// The functions look at device and layout themselves, so that a CPU-only build can say what is
// missing and a sparse argument is named. Of meta tensors they give shapes and dtypes.
template <typename Kernel>
void define(torch::Library& m, const std::string& name, const std::string& signature,
            Kernel* function, const std::vector<at::Tag>& tags = {}) {
  using Key = c10::DispatchKey;
  m.def((name + signature).c_str(), tags);
  for (const Key key : {Key::CPU, Key::CUDA, Key::Meta, Key::SparseCPU, Key::SparseCUDA,
                        Key::SparseCsrCPU, Key::SparseCsrCUDA, Key::MkldnnCPU, Key::QuantizedCPU,
                        Key::QuantizedCUDA, Key::NestedTensorCPU, Key::NestedTensorCUDA}) {
    m.impl(name.c_str(), torch::dispatch(key, function));
  }
}

// An operator that is differentiated by `autograd`, with its decomposition, to which
// fused_norm/_decompositions.py gives a kernel.
template <typename Kernel, typename Autograd>
void define_differentiable(torch::Library& m, const std::string& name, const std::string& signature,
                           Kernel* function, Autograd&& autograd) {
  define(m, name, signature, function);
  m.def(("decomposed_" + name + signature).c_str());
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, std::move(autograd)));
}

// An operator for a backward pass.
template <typename Kernel>
void define_backward(torch::Library& m, const std::string& name, const std::string& signature,
                     Kernel* function) {
  define_differentiable(m, name, signature, function,
                        torch::CppFunction::makeFromBoxedFunction<&differentiate_backward>());
}

}  // namespace fused_norm::ops
