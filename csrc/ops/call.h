// Operators of many arguments, as functions of a struct that holds or refers to them. fields() of
// the struct are its members in the schema's order, std::tie()d: struct, fields() and schema are
// the only lists of the arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/BoxedKernel.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

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
template <typename Call, typename Fields = decltype(Call::fields(std::declval<Call&>()))>
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

// As the dispatcher's stack has a call.
template <typename Call>
c10::Stack as_stack(const Call& call) {
  c10::Stack stack;
  stack.reserve(std::tuple_size_v<decltype(Call::fields(call))>);
  std::apply([&](const auto&... members) { (stack.emplace_back(members), ...); },
             Call::fields(call));
  return stack;
}

// Whether is(tensor) of one that a call has.
template <typename Call, typename Is>
bool any_tensor(const Call& call, const Is& is) {
  const auto holds = [&](const auto& member) {
    using T = std::decay_t<decltype(member)>;
    if constexpr (std::is_same_v<T, at::Tensor>) return is(member);
    if constexpr (std::is_same_v<T, OptionalTensor>) return has(member) && is(*member);
    return false;
  };
  return std::apply([&](const auto&... members) { return (holds(members) || ...); },
                    Call::fields(call));
}

}  // namespace fused_norm::ops
