// Operators of many arguments, as functions of a struct that holds or refers to them. fields() of
// the struct are its members in the schema's order, std::tie()d: struct, fields() and schema are
// the only lists of the arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/BoxedKernel.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/checks.h"

namespace fused_norm::ops {

// How the dispatcher passes a member.
template <typename Member, typename T = std::remove_const_t<Member>>
using Passed =
    std::conditional_t<std::is_same_v<T, at::Tensor> || std::is_same_v<T, OptionalTensor>, const T&,
                       T>;

using Forward = std::tuple<at::Tensor, at::Tensor>;
// Of n gradients; undefined what is not wanted.
template <size_t n>
using Gradients = std::array<at::Tensor, n>;

template <size_t n>
Gradients<n> zeroed(const Gradients<n>& gradients) {
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined()) gradient.zero_();
  }
  return gradients;
}

// What the dispatcher takes as an operator's results.
template <typename T>
T as_results(T results) {
  return results;
}
template <size_t n>
auto as_results(Gradients<n> gradients) {
  return std::tuple_cat(std::move(gradients));
}

// The kernel of an operator whose arguments are a Call's, from a function of the Call. A Call may
// be a member of another one.
template <typename Call, typename Fields = decltype(std::declval<const Call&>().fields())>
struct Kernels;

template <typename Call, typename... Members>
struct Kernels<Call, std::tuple<Members&...>> {
  template <auto function>
  static auto kernel(Passed<Members>... members) {
    const Call call{members...};
    if constexpr (std::is_void_v<decltype(function(call))>) {
      function(call);
    } else {
      return as_results(function(call));
    }
  }
};
template <auto function, typename Result, typename Call>
constexpr auto* kernel_of(Result (*)(const Call&)) {
  return &Kernels<Call>::template kernel<function>;
}
template <auto function>
constexpr auto* kernel = kernel_of<function>(function);

// A struct of arguments as its members, anything else as it is.
template <typename T>
auto arguments_of(const T& call, int) -> decltype(call.fields()) {
  return call.fields();
}
template <typename T>
std::tuple<const T&> arguments_of(const T& argument, long) {
  return {argument};
}

// function(arguments...), those of structs one by one.
template <typename Function, typename... Args>
auto call_with(const Function& function, const Args&... args) {
  return std::apply(function, std::tuple_cat(arguments_of(args, 0)...));
}

// As the dispatcher's stack has a call.
template <typename... Args>
c10::Stack as_stack(const Args&... args) {
  c10::Stack stack;
  const auto push = [&](const auto&... each) {
    stack.reserve(sizeof...(each));
    (stack.emplace_back(each), ...);
  };
  call_with(push, args...);
  return stack;
}

// Whether is(tensor) of a tensor that is given.
template <typename Is, typename... Args>
bool any_tensor(const Is& is, const Args&... args) {
  const auto holds = [&](const auto& argument) {
    using T = std::decay_t<decltype(argument)>;
    if constexpr (std::is_same_v<T, at::Tensor>) return is(argument);
    if constexpr (std::is_same_v<T, OptionalTensor>) return has(argument) && is(*argument);
    if constexpr (std::is_same_v<T, std::vector<at::Tensor>>) {
      return std::any_of(argument.begin(), argument.end(), is);
    }
    return false;
  };
  return call_with([&](const auto&... each) { return (holds(each) || ...); }, args...);
}

}  // namespace fused_norm::ops
