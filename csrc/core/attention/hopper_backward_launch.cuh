// From a call's parameters to a launch of one form of the backward kernel.
#pragma once

#include <algorithm>
#include <utility>

#include "core/attention/hopper.h"
#include "core/attention/hopper_backward.cuh"
#include "core/attention/hopper_launch.cuh"
#include "core/attention/workspace.h"

namespace fused_norm::hopper {

// The call whose queries are this one's keys.
inline AttentionParams with_sides_changed(AttentionParams params) {
  params.heads = params.kv_heads;
  std::swap(params.queries, params.keys);
  std::swap(params.query_offsets, params.key_offsets);
  std::swap(params.total_queries, params.total_keys);
  std::swap(params.window_left, params.window_right);
  return params;
}

template <typename Form>
cudaError_t launch_backward_form(const AttentionGradient& gradient, const DeviceProperties& device,
                                 const HopperBackwardPlan& plan, uint32_t* ticket,
                                 cudaStream_t stream) {
  const AttentionParams& params = gradient.params.forward;
  const bool wanted = Form::kOfKeys ? (Form::kFirst && gradient.params.dkey.data != nullptr) ||
                                          (Form::kSecond && gradient.params.dvalue.data != nullptr)
                                    : gradient.params.dquery.data != nullptr;
  if (!wanted) return cudaSuccess;
  const AttentionParams work = Form::kOfKeys ? with_sides_changed(params) : params;
  const bool packed = params.query_offsets != nullptr;
  BackwardArgs args{};
  const auto map = [&](const AttentionTensor& tensor, bool of_keys, int columns, CUtensorMap* to) {
    const int of_queries = packed ? params.total_queries : params.queries;
    const int rows = of_keys ? (packed ? params.total_keys : params.keys) : of_queries;
    // A tensor without rows is never read.
    return make_tensor_map(rows == 0 ? (of_keys ? params.query : params.key) : tensor, params.dtype,
                           packed ? 1 : params.batch, of_keys ? params.kv_heads : params.heads,
                           std::max(rows, 1), columns,
                           of_keys == Form::kOfKeys ? Form::kOwn : Form::kOthers,
                           Form::OwnTile::kPanelColumns, to);
  };
  const auto maps_of = [&](bool of_keys, CUtensorMap* first, CUtensorMap* second) {
    const cudaError_t error =
        map(of_keys ? params.key : params.query, of_keys, params.head_dim, first);
    if (error != cudaSuccess) return error;
    return map(of_keys ? params.value : gradient.params.dout, of_keys, params.value_dim, second);
  };
  cudaError_t error = maps_of(Form::kOfKeys, &args.own_first, &args.own_second);
  if (error == cudaSuccess) error = maps_of(!Form::kOfKeys, &args.other_first, &args.other_second);
  if (error != cudaSuccess) return error;

  HopperForwardPlan order{};
  order.section = Form::kOfKeys ? plan.key_section : plan.query_section;
  // Of queries, causal, the last see most; of keys, the first are seen most.
  order.in_order = plan.in_order && !Form::kOfKeys;
  set_work<Form::kOwn>(work, order, ticket, &args);
  set_scores(params, &args);
  args.exponents = static_cast<const float*>(gradient.exponents);
  args.delta = static_cast<const float*>(gradient.delta);
  args.group = params.heads / params.kv_heads;
  args.gradient_scale = static_cast<float>(params.scale);
  args.first = Form::kOfKeys ? gradient.params.dkey : gradient.params.dquery;
  args.second = gradient.params.dvalue;
  args.head_dim = params.head_dim;
  args.value_dim = params.value_dim;

  const int64_t tiles =
      packed ? int64_t{work.heads} * (work.total_queries / Form::kOwn + work.batch + 2)
             : int64_t{work.heads} * work.batch * args.query_tiles;
  if (tiles == 0) return cudaSuccess;
  detail::LaunchOptions options;
  options.shared_bytes = sizeof(BackwardMemory<Form>);
  return detail::launch(attention_backward_hopper<Form>,
                        static_cast<unsigned>(std::min<int64_t>(device.sm_count, tiles)),
                        Form::kThreads, options, stream, args);
}

// The kernels of a head dimension, for each a source file of its own.
template <int kDim>
cudaError_t launch_backward(const AttentionGradient& gradient, const HopperBackwardPlan& plan,
                            const DeviceProperties& device, uint32_t* tickets, cudaStream_t stream);

// Forms by the type of the tensors and whether scores are plain, in turn.
template <template <typename, bool> class... Forms>
cudaError_t launch_backward_forms(const AttentionGradient& gradient, const HopperBackwardPlan& plan,
                                  const DeviceProperties& device, uint32_t* tickets,
                                  cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (tickets != nullptr) {
    error = cudaMemsetAsync(tickets, 0, sizeof...(Forms) * sizeof(*tickets), stream);
  }
  const auto launch = [&](auto form) {
    if (error != cudaSuccess) return;
    error = launch_backward_form<decltype(form)>(gradient, device, plan, tickets, stream);
    if (tickets != nullptr) ++tickets;
  };
  return with_dtype<__half, __nv_bfloat16>(gradient.params.forward.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (plan.general) {
      (launch(Forms<T, true>()), ...);
    } else {
      (launch(Forms<T, false>()), ...);
    }
    return error;
  });
}

#define FUSED_NORM_BACKWARD(dim, ...)                                                              \
  template <>                                                                                      \
  cudaError_t launch_backward<dim>(const AttentionGradient& gradient,                              \
                                   const HopperBackwardPlan& plan, const DeviceProperties& device, \
                                   uint32_t* tickets, cudaStream_t stream) {                       \
    return launch_backward_forms<__VA_ARGS__>(gradient, plan, device, tickets, stream);            \
  }

}  // namespace fused_norm::hopper
