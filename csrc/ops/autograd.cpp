#include "ops/autograd.h"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <bitset>
#include <iterator>

namespace fused_norm::ops {

using at::Tensor;
using c10::IValue;

namespace {

void call_decomposed(const std::string& name, c10::Stack* stack) {
  const NoAutocast guard(c10::autocast_dispatch_keyset);
  find_operator("fused_norm::decomposed_" + name.substr(name.find(':') + 2)).callBoxed(stack);
}

bool is_tensor(const IValue& value) { return value.isTensor() && value.toTensor().defined(); }

// Which of a saved call's arguments are tensors, as bits.
uint64_t tensor_places(AutogradContext* ctx) { return ctx->saved_data["places"].toInt(); }

// A call's arguments from its tensors.
c10::Stack saved_call(AutogradContext* ctx, const variable_list& tensors) {
  const uint64_t places = tensor_places(ctx);
  c10::Stack arguments = ctx->saved_data["arguments"].toListRef().vec();
  auto tensor = tensors.begin();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (places >> i & 1) arguments[i] = *tensor++;
  }
  return arguments;
}

}  // namespace

variable_list tensors_in(const c10::Stack& stack) {
  variable_list tensors;
  for (const IValue& value : stack) {
    if (is_tensor(value)) tensors.push_back(value.toTensor());
  }
  return tensors;
}

void save_call(AutogradContext* ctx, const c10::Stack& arguments, at::TensorList tensors,
               at::TensorList results) {
  uint64_t places = 0;
  c10::impl::GenericList others(c10::AnyType::get());
  others.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool place = is_tensor(arguments[i]);
    places |= uint64_t{place} << i;
    others.push_back(place ? IValue() : arguments[i]);
  }
  variable_list saved;
  saved.reserve(tensors.size() + results.size());
  saved.insert(saved.end(), tensors.begin(), tensors.end());
  saved.insert(saved.end(), results.begin(), results.end());
  ctx->save_for_backward(std::move(saved));
  ctx->set_materialize_grads(false);
  ctx->saved_data["places"] = static_cast<int64_t>(places);
  ctx->saved_data["arguments"] = std::move(others);
}

variable_list backward_of_call(AutogradContext* ctx, const variable_list& saved, const char* name,
                               at::IntArrayRef places, c10::Stack before) {
  const std::bitset<64> given = tensor_places(ctx);
  // CallFunction::forward takes n tensors and three more arguments; `saved` holds n + 2.
  variable_list results(saved.size() + 1);
  c10::List<bool> wanted;
  c10::SmallVector<size_t, 8> edges;  // how many given tensors stand before each place
  for (const int64_t place : places) {
    edges.push_back((given << (64 - place)).count());
    wanted.push_back(given[place] && ctx->needs_input_grad(edges.back()));
  }
  const InBackward guard(tensors_in(before));
  c10::Stack stack = std::move(before), arguments = saved_call(ctx, saved);
  std::move(arguments.begin(), arguments.end(), std::back_inserter(stack));
  stack.emplace_back(wanted);
  find_operator(name).callBoxed(&stack);
  for (size_t i = 0; i < stack.size(); ++i) {
    if (wanted[i] && is_tensor(stack[i])) results[edges[i]] = stack[i].toTensor();
  }
  return results;
}

// A call of an operator for a backward pass where it is to be differentiated in turn. `stack` holds
// the arguments, of which `tensors` are tensors, and then the results. Profiles show this name.
struct BackwardFunction : torch::autograd::Function<BackwardFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, at::TensorList tensors,
                               const c10::OperatorHandle& op, c10::Stack* stack) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    save_call(ctx, *stack, tensors, {});
    ctx->saved_data["name"] = op.schema().name();
    op.callBoxed(stack);
    return tensors_in(*stack);  // a Function gives no undefined tensors
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode enable_grad(true);
    // Aliases: of the tensors themselves some are functions of others, as a saved output is of the
    // weight, and a derivative is wanted in each alone.
    variable_list aliases = ctx->get_saved_variables();
    for (Tensor& tensor : aliases) tensor = tensor.view_as(tensor);
    c10::Stack stack = saved_call(ctx, aliases);
    const NoAutocast guard(c10::autocast_dispatch_keyset);
    call_decomposed(ctx->saved_data["name"].toStringRef(), &stack);

    // One for each argument of forward.
    variable_list outputs, of_outputs, inputs, results(aliases.size() + 2);
    const variable_list made = tensors_in(stack);
    for (size_t i = 0; i < made.size(); ++i) {
      if (!grads[i].defined() || !made[i].requires_grad()) continue;
      outputs.push_back(made[i]);
      of_outputs.push_back(grads[i]);
    }
    for (size_t i = 0; i < aliases.size(); ++i) {
      if (ctx->needs_input_grad(i)) inputs.push_back(aliases[i]);
    }
    if (outputs.empty() || inputs.empty()) return results;
    const variable_list gradients =
        torch::autograd::grad(outputs, inputs, of_outputs, /*retain_graph=*/std::nullopt,
                              create_graph, /*allow_unused=*/true);
    auto next = gradients.begin();
    for (size_t i = 0; i < aliases.size(); ++i) {
      if (ctx->needs_input_grad(i)) results[i] = *next++;
    }
    return results;
  }
};

void differentiate_backward(const c10::OperatorHandle& op, c10::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  const auto any = [&](auto&& of_tensor) {
    return std::any_of(arguments.begin(), arguments.end(), [&](const IValue& argument) {
      return is_tensor(argument) && of_tensor(argument.toTensor());
    });
  };
  if (is_transformed() || any(has_tangent)) {
    return call_decomposed(op.schema().name(), stack);
  }
  if (!at::GradMode::is_enabled() || !any(requires_grad)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.callBoxed(stack);
  }
  c10::Stack call = arguments.vec();  // apart from what the caller has below
  torch::jit::drop(*stack, count);
  const variable_list tensors = tensors_in(call);
  const variable_list made = BackwardFunction::apply(at::TensorList(tensors), op, &call);
  size_t next = 0;
  for (const IValue& result : call) {
    stack->push_back(is_tensor(result) ? IValue(made[next++]) : result);
  }
}

}  // namespace fused_norm::ops
