// Operators of many arguments, as functions of a struct that holds or refers to them. fields() of
// the struct are its members in the schema's order, std::tie()d: struct, fields() and schema are
// the only lists of the arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <initializer_list>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/checks.h"

namespace fused_norm::ops {

// How the dispatcher passes a member.
template <typename Member, typename T = std::remove_const_t<Member>>
using Passed = std::conditional_t<
    std::is_same_v<T, at::Tensor> || std::is_same_v<T, OptionalTensor>, const T&,
    std::conditional_t<std::is_same_v<T, std::vector<c10::SymInt>>, c10::SymIntArrayRef, T>>;

template <typename Member, typename T>
decltype(auto) as_member(T& passed) {
  if constexpr (std::is_same_v<Member, std::vector<c10::SymInt>>) {
    return passed.vec();
  } else {
    return (passed);
  }
}

using Forward = std::tuple<at::Tensor, at::Tensor>;
// Of n gradients; undefined what is not wanted.
template <size_t n>
using Gradients = std::array<at::Tensor, n>;

// The kernels of operators whose arguments are a Call's, from functions of the Call; forward, and
// backward with tensors before the call and n wanted gradients behind it.
template <typename Call, typename Fields = decltype(Call::fields(std::declval<Call&>()))>
struct Kernels;

template <typename Call, typename... Members>
struct Kernels<Call, std::tuple<Members&...>> {
  template <auto function>
  static auto forward(Passed<Members>... members) {
    return function(Call{as_member<Members>(members)...});
  }

  template <size_t n, typename... Before>
  struct Backward {
    template <Gradients<n> (*function)(Before..., const Call&, const std::array<bool, n>&)>
    static auto kernel(Before... before, Passed<Members>... members, std::array<bool, n> wanted) {
      return std::tuple_cat(function(before..., Call{as_member<Members>(members)...}, wanted));
    }
  };
};

// A node of the graph with a call, and `more` behind its tensors.
template <typename Call>
void save_call(torch::autograd::AutogradContext* ctx, const Call& call,
               std::initializer_list<at::Tensor> more) {
  constexpr size_t kMembers = std::tuple_size_v<decltype(Call::fields(call))>;
  torch::autograd::variable_list tensors;
  tensors.reserve(kMembers);
  c10::impl::GenericList others(c10::AnyType::get());
  others.reserve(kMembers);
  const auto save = [&](const auto& member) {
    using T = std::decay_t<decltype(member)>;
    if constexpr (std::is_same_v<T, at::Tensor>) {
      tensors.push_back(member);
    } else if constexpr (std::is_same_v<T, OptionalTensor>) {
      tensors.push_back(or_undefined(member));
    } else if constexpr (std::is_same_v<T, std::vector<c10::SymInt>>) {
      others.push_back(c10::SymIntArrayRef(member));
    } else {
      others.push_back(member);
    }
  };
  std::apply([&](const auto&... members) { (save(members), ...); }, Call::fields(call));
  tensors.insert(tensors.end(), more.begin(), more.end());
  ctx->save_for_backward(std::move(tensors));
  ctx->set_materialize_grads(false);
  ctx->saved_data["others"] = std::move(others);
}

// `tensors` are the node's saved ones.
template <typename Call>
Call saved_call(torch::autograd::AutogradContext* ctx,
                const torch::autograd::variable_list& tensors) {
  Call call{};
  auto tensor = tensors.begin();
  const auto others = ctx->saved_data["others"].toListRef();
  auto other = others.begin();
  const auto restore = [&](auto& member) {
    using T = std::decay_t<decltype(member)>;
    if constexpr (std::is_same_v<T, at::Tensor>) {
      member = *tensor++;
    } else if constexpr (std::is_same_v<T, OptionalTensor>) {
      if (tensor->defined()) member = *tensor;
      ++tensor;
    } else if constexpr (std::is_same_v<T, std::vector<c10::SymInt>>) {
      member = (other++)->toSymIntVector();
    } else {
      member = (other++)->template to<T>();
    }
  };
  std::apply([&](auto&... members) { (restore(members), ...); }, Call::fields(call));
  return call;
}

}  // namespace fused_norm::ops
