// From a call's parameters to launches of the kernels of a head dimension.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/attention/hopper_forward.cuh"
#include "core/attention/hopper_fused.cuh"
#include "core/attention/tiers.h"
#include "core/common/launch.cuh"

namespace fused_norm {
namespace hopper {

// A tensor map by the driver's function, which is asked for once. The box is so many elements of
// each of kRank dimensions; strides, of all but the first, are multiples of 16 bytes.
template <int kRank>
cudaError_t make_map(CUtensorMapDataType type, const void* data, const cuuint64_t (&sizes)[kRank],
                     const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank],
                     CUtensorMapSwizzle swizzle, CUtensorMap* to) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr cuuint32_t kSteps[] = {1, 1, 1, 1};
  const CUresult result =
      encode(to, type, kRank, const_cast<void*>(data), sizes, strides, box, kSteps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// `masks_pairs`: the kernel takes a mask of pairs of queries and keys.
inline void set_scores(const AttentionParams& params, bool masks_pairs, ScoreArgs* args) {
  const bool capped = params.softcap > 0;
  args->adds_mask = masks_pairs && params.mask.data != nullptr && !params.mask.boolean;
  const bool added = args->adds_mask || params.alibi_slopes != nullptr;
  const double factor = capped ? params.softcap : params.scale;
  const bool folded = !added && factor >= kSmallestPlainScale;
  args->tanh_scale = static_cast<float>(capped ? params.scale / params.softcap * kTanhUnit : 0);
  args->factor = static_cast<float>(factor);
  args->factor_for_mask = params.alibi_slopes != nullptr ? 1 : args->factor;
  args->multiplies = !added && !folded;
  args->general = args->multiplies || capped || params.alibi_slopes != nullptr;
  args->exponent = static_cast<float>((folded ? factor : 1) * 1.4426950408889634);
  args->softcap = static_cast<float>(params.softcap);
  args->dropout_scale = static_cast<float>(params.dropout_scale);
}

// Makes tensor maps of a call's tensors, until one fails: of (batch, heads, rows, columns) with
// strides of multiples of 8 elements, for tiles of `tile_rows` rows and panels of kPanelColumns
// columns (SharedTile).
template <int kPanelColumns>
struct MapMaker {
  const AttentionParams& params;
  cudaError_t error = cudaSuccess;

  void operator()(const AttentionTensor& tensor, bool of_keys, int columns, int tile_rows,
                  CUtensorMap* to) {
    if (error != cudaSuccess) return;
    const int64_t batch = params.packed() ? 1 : params.batch;
    const int64_t heads = of_keys ? params.kv_heads : params.heads;
    const int64_t rows = of_keys ? (params.packed() ? params.total_keys : params.keys)
                                 : (params.packed() ? params.total_queries : params.queries);
    // A tensor without rows is never read.
    const AttentionTensor& read = rows > 0 ? tensor : of_keys ? params.query : params.key;
    using Size = cuuint64_t;
    const Size sizes[] = {Size(columns), Size(std::max<int64_t>(rows, 1)), Size(heads),
                          Size(batch)};
    // A dimension of one element may have any stride; the driver wants a multiple of 16 bytes.
    const auto bytes = [](int64_t stride, Size size) { return Size(size > 1 ? 2 * stride : 16); };
    const Size strides[] = {bytes(read.row_stride, sizes[1]), bytes(read.head_stride, sizes[2]),
                            bytes(read.batch_stride, sizes[3])};
    const cuuint32_t box[] = {kPanelColumns, static_cast<cuuint32_t>(tile_rows), 1, 1};
    error =
        make_map(params.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                 read.data, sizes, strides, box,
                 kPanelColumns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, to);
  }
};

// Says that a kernel's work is that of `params`, in tiles of so many rows of queries, each once for
// at most so many parts of its keys; returns the most tiles that there may be. What of `args` sets
// their order is there.
inline int64_t set_work(const AttentionParams& params, int rows, int parts, WorkArgs* args) {
  static_cast<AttentionParams&>(*args) = params;
  args->heads_per_kv = params.heads / params.kv_heads;
  args->query_tiles = params.packed() ? 0 : (params.queries + rows - 1) / rows * parts;
  const int64_t pairs = std::max<int64_t>(1, int64_t{params.heads} * params.batch);
  args->section = static_cast<int32_t>(std::clamp<int64_t>(args->section, 1, pairs));
  const auto limit = [](int32_t window) {
    return window < 0 ? kNoLimit : std::min(window, kNoLimit);
  };
  args->window_left = limit(params.window_left);
  args->window_right = limit(params.window_right);
  const int64_t tiles = params.packed()
                            ? (params.total_queries / rows + params.batch + 2) * int64_t{parts}
                            : int64_t{params.batch} * args->query_tiles;
  return tiles * params.heads;
}

// Launches a kernel whose blocks stay, one on each multiprocessor, for that work.
template <typename Form, int kRows, typename Memory, typename Args>
cudaError_t launch_kernel(void (*kernel)(Args), const AttentionParams& params, int parts,
                          const DeviceProperties& device, cudaStream_t stream, Args* args) {
  const int64_t tiles = set_work(params, kRows, parts, args);
  if (tiles == 0) return cudaSuccess;
  static_assert(sizeof(Memory) <= 227 * 1024);
  const auto blocks = std::min<int64_t>(device.sm_count, tiles);
  return launch(kernel, static_cast<unsigned>(blocks), Form::kThreads, {sizeof(Memory)}, stream,
                *args);
}

template <typename Form>
__global__ void __launch_bounds__(Form::kThreads, 1)
    attention_forward_hopper(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(1024) char shared[];
  auto& memory = *reinterpret_cast<ForwardMemory<Form>*>(shared);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be the warp's
  if (threadIdx.x == 0) {
    prefetch_map(&args.query_map);
    prefetch_map(&args.key_map);
    prefetch_map(&args.value_map);
    memory.init();
    if constexpr (Form::kDrops) memory.dropout = dropout_of(args, 0);
    CopyBarrier::order_inits();
  }
  __syncthreads();
  if (group == 0) {
    shrink_registers<Form::kProducerRegisters>();
    if (threadIdx.x < 32) {
      ForwardProducer<Form>(args, memory).run();
    } else if constexpr (Form::kMasked) {
      copy_masks(args, memory);
    }
  } else {
    grow_registers<Form::kConsumerRegisters>();
    Consumer<Form>(args, memory, group - 1).run();
  }
}

template <typename Form>
cudaError_t launch_forward_form(const AttentionParams& params, const KeyParts& parts,
                                const DeviceProperties& device, uint32_t* ticket,
                                cudaStream_t stream) {
  ForwardArgs args{};
  MapMaker<Form::KeyTile::kPanelColumns> map{params};
  map(params.query, false, params.head_dim, Form::kRows, &args.query_map);
  map(params.key, true, params.head_dim, Form::kKeys, &args.key_map);
  map(params.value, true, params.value_dim, Form::kKeys, &args.value_map);
  if (map.error != cudaSuccess) return map.error;
  set_scores(params, Form::kMasked, &args);
  args.mask_factor = kLog2E / args.exponent;
  const bool narrow = size_of(params.mask.dtype) == 2, boolean = params.mask.boolean;
  if (!args.general && (boolean || narrow))
    args.mask_kind = boolean ? MaskKind::kBoolean : MaskKind::kNarrow;
  args.mask = mapped_mask(params, /*backward=*/false, ticket);
  args.key_parts = parts;
  args.dense_parts = parts.count(params.queries, params.keys);
  const bool packed_parts = params.packed() && parts.few >= 0;
  const int most = packed_parts ? params.total_keys / parts.keys + 1 : args.dense_parts;
  const HopperPlan plan = hopper_plan(params);
  args.longest_first = plan.uneven;
  args.section = plan.forward_section;
  args.batch_first = plan.batch_first;
  if (plan.uneven) args.ticket = ticket;
  return launch_kernel<Form, Form::kRows, ForwardMemory<Form>>(attention_forward_hopper<Form>,
                                                               params, most, device, stream, &args);
}

inline ChunkSums dquery_sums(const HopperScratch& layout, char* scratch) {
  return {reinterpret_cast<float*>(scratch + layout.chunks),
          reinterpret_cast<uint32_t*>(scratch + kHopperTicketBytes), layout.tiles};
}

// `scratch`: where HopperScratch's memory begins.
template <typename Form>
cudaError_t launch_backward_form(const AttentionGradient& gradient, const DeviceProperties& device,
                                 uint32_t* ticket, char* scratch, cudaStream_t stream) {
  constexpr bool kOfKeys = Form::kOfKeys;
  const AttentionParams& params = gradient.params.forward;
  BackwardArgs args{};
  const HopperScratch layout = hopper_scratch(params, /*backward=*/true);
  args.own_sums = {reinterpret_cast<float*>(scratch + layout.key_chunks),
                   reinterpret_cast<uint32_t*>(scratch + layout.key_counters), layout.key_tiles};
  if (Form::kAll) args.sums = dquery_sums(layout, scratch);
  args.dquery = gradient.params.dquery;
  args.mask = mapped_mask(params, /*backward=*/true, scratch);
  args.masks_keys = Form::kAll && attention_masks_keys(params);
  args.gradient = gradient;
  const AttentionBackwardParams& of = gradient.params;
  const bool wanted = Form::kOfMask || (kOfKeys && (of.dkey.data || of.dvalue.data)) ||
                      (!Form::kApart && of.dquery.data);
  if (!wanted) return cudaSuccess;
  MapMaker<Form::OwnTile::kPanelColumns> map{params};
  const auto maps_of = [&](bool of_keys, int rows, CUtensorMap* first, CUtensorMap* second) {
    map(of_keys ? params.key : params.query, of_keys, params.head_dim, rows, first);
    map(of_keys ? params.value : of.dout, of_keys, params.value_dim, rows, second);
  };
  maps_of(kOfKeys, Form::kOwn, &args.own_first, &args.own_second);
  maps_of(!kOfKeys, Form::kOthers, &args.other_first, &args.other_second);
  const auto queries = static_cast<cuuint64_t>(query_statistics(gradient.of_statistics));
  if (map.error == cudaSuccess && (kOfKeys || Form::kOfMask) && queries > 0) {
    map.error = make_map<2>(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, gradient.statistics, {queries, 2},
                            {queries * sizeof(float)}, {BackwardMemory<Form>::kStageQueries, 2},
                            CU_TENSOR_MAP_SWIZZLE_NONE, &args.statistics_map);
  }
  if (map.error != cudaSuccess) return map.error;
  set_scores(params, Form::kGeneral && !args.masks_keys, &args);
  const HopperPlan plan = hopper_plan(params);
  args.parts = plan.key_parts;
  args.group = params.heads / params.kv_heads / plan.key_parts;
  args.gradient_scale = static_cast<float>(params.scale);
  if constexpr (Form::kOfMask) {
    args.mask.bits = nullptr;
    set_work(params, Form::kOwn, 1, &args);
    return launch(attention_backward_hopper<Form>, device.sm_count, Form::kThreads,
                  {sizeof(BackwardMemory<Form>)}, stream, args);
  }
  // Of queries, causal, the last see most; of keys, the first are seen most.
  args.longest_first = plan.uneven && !kOfKeys;
  args.section = kOfKeys ? plan.key_section : plan.query_section;
  args.batch_first = plan.key_parts > 1 || (Form::kAll && plan.batch_first);
  if (plan.uneven || Form::kAll || (kOfKeys && plan.key_parts > 1)) args.ticket = ticket;
  return launch_kernel<Form, Form::kOwn, BackwardMemory<Form>>(
      attention_backward_hopper<Form>,
      kOfKeys ? with_sides_changed(params, plan.key_parts) : params, 1, device, stream, &args);
}

}  // namespace hopper

template <int kDim>
cudaError_t HopperLaunch<kDim>::forward(const AttentionParams& params, const KeyParts& parts,
                                        const DeviceProperties& device, void* scratch,
                                        cudaStream_t stream) {
  using namespace hopper;
  const auto launch = [&](auto form) {
    return launch_forward_form<decltype(form)>(params, parts, device,
                                               static_cast<uint32_t*>(scratch), stream);
  };
  return with_dtype<__half, __nv_bfloat16>(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kMost = hopper_most_groups(kDim), kMasked = hopper_most_groups(kDim, true);
    const bool masked = params.mask.data != nullptr && !attention_masks_keys(params);
    if constexpr (hopper_drops(kDim)) {
      if (params.dropout_threshold > 0) return launch(ForwardForm<T, kDim, Options::kDropout, 2>());
    }
    if (masked) return launch(ForwardForm<T, kDim, Options::kMask, kMasked>());
    if (!attention_scores_are_plain(params))
      return launch(ForwardForm<T, kDim, Options::kSome, kMost>());
    return hopper_forward_groups(params, device) == 2
               ? launch(ForwardForm<T, kDim, Options::kNone, 2>())
               : launch(ForwardForm<T, kDim, Options::kNone, kMost>());
  });
}

template <int kDim>
cudaError_t HopperLaunch<kDim>::backward(const AttentionGradient& gradient,
                                         const DeviceProperties& device, void* scratch,
                                         cudaStream_t stream) {
  using namespace hopper;
  const AttentionParams& params = gradient.params.forward;
  auto* ticket = static_cast<uint32_t*>(scratch);
  const auto launch = [&](auto form) {
    return launch_backward_form<decltype(form)>(gradient, device, ticket++,
                                                static_cast<char*>(scratch), stream);
  };
  const auto launch_all = [&](auto zero, auto general) {
    using T = decltype(zero);
    constexpr bool kGeneral = general.value;
    if constexpr (hopper_has_fused(kDim)) {
      return launch(BackwardForm<T, kDim, Makes::kAll, kGeneral>());
    } else {
      const cudaError_t error = launch(BackwardForm<T, kDim, Makes::kQuery, kGeneral>());
      if (error != cudaSuccess) return error;
      return launch(BackwardForm<T, kDim, Makes::kKeys, kGeneral>());
    }
  };
  return with_dtype<__half, __nv_bfloat16>(params.dtype, [&](auto zero) {
    if constexpr (hopper_drops(kDim)) {
      if (params.dropout_threshold > 0)
        return launch(BackwardForm<decltype(zero), kDim, Makes::kAll, true, true>());
    }
    return hopper_plan(params).general ? launch_all(zero, std::true_type())
                                       : launch_all(zero, std::false_type());
  });
}

}  // namespace fused_norm
