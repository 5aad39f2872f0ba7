// dquery from the sums of the kernel of all gradients (hopper_fused.cuh), and the launch of the
// kernel of a mask's gradient.
#include <type_traits>

#include "core/attention/hopper_launch.cuh"

namespace fused_norm {
namespace hopper {

struct QueryGradientArgs : WorkArgs {
  ChunkSums sums;
  AttentionTensor dquery;
  float gradient_scale;
  int32_t dim;  // of the tiles
};

// Of tiles of kRows queries; a tile has two chunks, of 64 queries each, or of 64 columns and the
// rest.
template <int kRows>
__device__ __forceinline__ void round_sums(const QueryGradientArgs& args, WorkTile& work,
                                           ListPlace& place) {
  constexpr bool kByQueries = kRows == 128;
  const int half = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int columns = kByQueries || half == 0 ? 64 : args.dim - 64;
  if (threadIdx.x == 0) place = {};
  __syncthreads();
  WorkList<kRows, kHopperOwnRows, Hidden::kKeys> list(args, &place);
  for (uint32_t index = blockIdx.x;; index += gridDim.x) {
    if (threadIdx.x < 32) list.tile(index, &work);
    __syncthreads();
    if (work.sequence < 0) return;
    if (sees_keys(work) && hopper_stores_dquery(work.keys, work.queries)) {  // is stored
      __syncthreads();
      continue;
    }
    const int64_t chunk =
        first_chunk<kRows>(args.sums.tiles, work.sequence, work.head, work.query_begin, half) +
        2 * (work.first / kRows);
    const auto* from =
        reinterpret_cast<const float4*>(args.sums.chunks + chunk * kChunkElements) + thread;
    const int end = sees_keys(work) ? columns / 8 : 0;
    float values[kChunkElements / 128];
#pragma unroll
    for (int i = 0; i < kChunkElements / 512; ++i) {
      const float4 four = i < end ? from[128 * i] : make_float4(0, 0, 0, 0);
      values[4 * i] = four.x, values[4 * i + 1] = four.y;
      values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
    }
    const int row = work.first + (kByQueries ? 64 * half : 0) + thread / 32 * 16 + thread % 32 / 4;
    const int column = kByQueries ? 0 : 64 * half;
    const auto store = [&](auto zero) {
      using T = decltype(zero);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool stores = row + 8 * r < work.queries;
        T* out = stores ? row_of<T>(args.dquery, work, work.head, row + 8 * r) + column : nullptr;
        store_row<T>(values, r, args.gradient_scale, out, args.head_dim - column);
      }
    };
    args.dtype == DType::kFloat16 ? store(__half()) : store(__nv_bfloat16());
    __syncthreads();
  }
}

__global__ void __launch_bounds__(256, 4)  // without the 4 the compiler spills
    attention_query_gradient_hopper(const __grid_constant__ QueryGradientArgs args) {
  __shared__ WorkTile work;
  __shared__ ListPlace place;
  args.dim == 64 ? round_sums<128>(args, work, place) : round_sums<64>(args, work, place);
}

}  // namespace hopper

cudaError_t hopper_query_gradient(const AttentionGradient& gradient, const DeviceProperties& device,
                                  void* scratch, cudaStream_t stream) {
  using namespace hopper;
  const AttentionParams& params = gradient.params.forward;
  const bool sees_all = !params.packed() && params.window_left < 0 && params.window_right < 0 &&
                        !attention_maps_mask(params) && params.keys > 0;
  if (gradient.params.dquery.data == nullptr || !hopper_fuses(params) ||
      (sees_all && hopper_stores_dquery(params.keys, params.queries)))
    return cudaSuccess;
  QueryGradientArgs args{};
  args.sums = dquery_sums(hopper_scratch(params, /*backward=*/true), static_cast<char*>(scratch));
  args.dquery = gradient.params.dquery;
  args.gradient_scale = static_cast<float>(params.scale);
  args.dim = hopper_plan(params).dim;
  args.mask = mapped_mask(params, /*backward=*/true, scratch);
  const int64_t tiles = set_work(params, args.dim == 64 ? 128 : 64, 1, &args);
  if (tiles == 0) return cudaSuccess;
  const auto blocks = std::min<int64_t>(8 * device.sm_count, tiles);
  return launch(attention_query_gradient_hopper, static_cast<unsigned>(blocks), 256, {}, stream,
                args);
}

cudaError_t hopper_mask_gradient(const AttentionGradient& gradient, const DeviceProperties& device,
                                 void* scratch, cudaStream_t stream) {
  using namespace hopper;
  const AttentionParams& params = gradient.params.forward;
  return with_dtype<__half, __nv_bfloat16>(params.dtype, [&](auto zero) {
    const auto launch = [&](auto dim) {
      using Form = BackwardForm<decltype(zero), dim.value, Makes::kMask, true>;
      return launch_backward_form<Form>(gradient, device, nullptr, static_cast<char*>(scratch),
                                        stream);
    };
    return hopper_plan(params).dim == 64 ? launch(std::integral_constant<int, 64>())
                                         : launch(std::integral_constant<int, 128>());
  });
}

}  // namespace fused_norm
