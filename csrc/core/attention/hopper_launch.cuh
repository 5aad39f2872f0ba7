// From a call's parameters to a launch of one form of the forward kernel.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/attention/hopper.h"
#include "core/attention/hopper_forward.cuh"
#include "core/attention/hopper_tensor_map.h"
#include "core/attention/plan.h"
#include "core/common/launch.cuh"

namespace fused_norm::hopper {

// A kernel's arguments by name of a call's. kRows: queries of a tile.
template <int kRows>
void set_work(const AttentionParams& params, const HopperForwardPlan& plan, uint32_t* ticket,
              WorkArgs* args) {
  args->batch = params.batch;
  args->heads = params.heads;
  args->heads_per_kv = params.heads / params.kv_heads;
  args->queries = params.queries;
  args->keys = params.keys;
  args->query_offsets = params.query_offsets;
  args->key_offsets = params.key_offsets;
  args->total_queries = params.total_queries;
  args->total_keys = params.total_keys;
  args->query_tiles = (params.queries + kRows - 1) / kRows;
  args->section = plan.section;
  args->longest_first = plan.in_order;
  args->batch_first = plan.batch_first;
  args->ticket = ticket;
  const auto limit = [](int32_t window) {
    return window < 0 ? kNoLimit : std::min(window, kNoLimit);
  };
  args->window_left = limit(params.window_left);
  args->window_right = limit(params.window_right);
  args->top_left = params.top_left;
}

inline void set_scores(const AttentionParams& params, ScoreArgs* args) {
  const bool capped = params.softcap > 0;
  const bool added = params.mask.data != nullptr || params.alibi_slopes != nullptr;
  const double factor = capped ? params.softcap : params.scale;
  const bool folded = !added && factor >= kSmallestPlainScale;
  args->scale =
      static_cast<float>(capped ? params.scale / params.softcap * kTanhUnit : params.scale);
  args->multiplies = !added && !folded;
  args->exponent = static_cast<float>((folded ? factor : 1) * 1.4426950408889634);
  args->softcap = static_cast<float>(params.softcap);
  args->mask = params.mask;
  args->alibi_slopes = params.alibi_slopes;
  args->alibi_batch_stride = params.alibi_batch_stride;
  args->sink = params.sink;
  args->sink_dtype = params.sink_dtype;
}

template <typename Form>
cudaError_t launch_form(const AttentionParams& params, const HopperForwardPlan& plan,
                        const DeviceProperties& device, uint32_t* ticket, cudaStream_t stream) {
  const bool packed = params.query_offsets != nullptr;
  ForwardArgs args{};
  const auto map = [&](const AttentionTensor& tensor, int heads, int rows, int columns,
                       int tile_rows, CUtensorMap* to) {
    AttentionTensor source = tensor;
    // A tensor without rows is never read.
    if (rows == 0) source = params.query;
    return make_tensor_map(source, params.dtype, packed ? 1 : params.batch, heads,
                           std::max(rows, 1), columns, tile_rows, Form::KeyTile::kPanelColumns, to);
  };
  const int query_rows = packed ? params.total_queries : params.queries;
  const int key_rows = packed ? params.total_keys : params.keys;
  cudaError_t error =
      map(params.query, params.heads, query_rows, params.head_dim, Form::kRows, &args.query);
  if (error == cudaSuccess)
    error = map(params.key, params.kv_heads, key_rows, params.head_dim, Form::kKeys, &args.key);
  if (error == cudaSuccess)
    error =
        map(params.value, params.kv_heads, key_rows, params.value_dim, Form::kKeys, &args.value);
  if (error != cudaSuccess) return error;

  set_work<Form::kRows>(params, plan, ticket, &args);
  set_scores(params, &args);
  args.out = params.out.data;
  args.out_batch_stride = params.out.batch_stride;
  args.out_head_stride = params.out.head_stride;
  args.out_row_stride = params.out.row_stride;
  args.value_dim = params.value_dim;
  args.lse = static_cast<float*>(params.lse);

  const int64_t tiles =
      packed ? int64_t{params.heads} * (params.total_queries / Form::kRows + params.batch + 2)
             : int64_t{params.heads} * params.batch * args.query_tiles;
  if (ticket != nullptr) {
    error = cudaMemsetAsync(ticket, 0, sizeof(*ticket), stream);
    if (error != cudaSuccess) return error;
  }
  detail::LaunchOptions options;
  options.shared_bytes = sizeof(ForwardMemory<Form>);
  return detail::launch(attention_forward_hopper<Form>,
                        static_cast<unsigned>(std::min<int64_t>(device.sm_count, tiles)),
                        Form::kThreads, options, stream, args);
}

// The four forms of a head dimension. Each has a source file of its own, so that they compile side
// by side.
template <int kDim>
cudaError_t launch_forward(const AttentionParams& params, const HopperForwardPlan& plan,
                           const DeviceProperties& device, uint32_t* ticket, cudaStream_t stream);

// Plain and General: forms by the type of the tensors, for scores that are plain and for others.
template <template <typename> class Plain, template <typename> class General>
cudaError_t launch_forms(const AttentionParams& params, const HopperForwardPlan& plan,
                         const DeviceProperties& device, uint32_t* ticket, cudaStream_t stream) {
  const auto launch = [&](auto form) {
    using Form = decltype(form);
    if (plan.queries != Form::kRows || plan.keys != Form::kKeys) return cudaErrorInvalidValue;
    return launch_form<Form>(params, plan, device, ticket, stream);
  };
  return with_dtype<__half, __nv_bfloat16>(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    return plan.general ? launch(General<T>()) : launch(Plain<T>());
  });
}

}  // namespace fused_norm::hopper
