#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "core/norm/columns.cuh"
#include "core/norm/launch.cuh"

namespace fused_norm {
namespace {

constexpr int kListThreads = 256;
constexpr int kListedAtOnce = 1024;

template <typename X>
struct ListInput {
  using A = Accumulator<X>;
  const X* x;
  RowLayout layout;
  int64_t rows;
  int cols;
  bool rms;
  const A* mean;
  const A* rstd;
  ColumnAffine<A> affine;
  RecoverableLimits<A> recoverable, precise;
  int room;
  int32_t* columns;
  A* side;

  // Whether a column must be listed, and whether it had better be.
  __device__ bool lost(int col) const { return !meets(recoverable, affine.g(col), affine.b(col)); }
  __device__ bool imprecise(int col) const { return !meets(precise, affine.g(col), affine.b(col)); }

  // As the forward kernel has it.
  __device__ A xhat(int64_t row, int col) const {
    const A value = static_cast<A>(row_start(x, layout, row)[col]);
    return rms ? value * rstd[row] : (value - mean[row]) * rstd[row];
  }
};

// Every block finds the columns for itself, which takes less time than waiting for one that does:
// each thread a run of consecutive columns. Then it gathers for its own rows.
template <typename X>
__global__ void __launch_bounds__(kListThreads)
    list_columns(const __grid_constant__ ListInput<X> in) {
  using Scan = cub::BlockScan<int, kListThreads>;
  __shared__ typename Scan::TempStorage scan;
  __shared__ int listed[kListedAtOnce];

  wait_for_prerequisites();
  const int run = (in.cols + kListThreads - 1) / kListThreads;
  const int begin = min(in.cols, int(threadIdx.x) * run), end = min(in.cols, begin + run);
  int count = 0, first, total;
  for (int col = begin; col < end; ++col) count += in.imprecise(col);
  Scan(scan).ExclusiveSum(count, first, total);
  const bool lost_only = total > in.room;
  if (lost_only) {
    __syncthreads();
    count = 0;
    for (int col = begin; col < end; ++col) count += in.lost(col);
    Scan(scan).ExclusiveSum(count, first, total);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) in.columns[0] = total;

  const int64_t rows_a_block = (in.rows + gridDim.x - 1) / gridDim.x;
  const int64_t first_row = blockIdx.x * rows_a_block;
  const int64_t rows = max(int64_t{0}, min(rows_a_block, in.rows - first_row));
  const int places = min(total, in.room);
  for (int base = 0; base < places; base += kListedAtOnce) {
    __syncthreads();
    int place = first;
    for (int col = begin; col < end && count > 0; ++col) {
      if (!(lost_only ? in.lost(col) : in.imprecise(col))) continue;
      if (place >= base && place < min(places, base + kListedAtOnce)) {
        listed[place - base] = col;
        if (blockIdx.x == 0) in.columns[1 + place] = col;
      }
      ++place;
    }
    __syncthreads();
    const int here = min(places - base, kListedAtOnce);
    for (int64_t i = threadIdx.x; i < rows * here; i += kListThreads) {
      const int64_t row = first_row + i / here;
      const int at = static_cast<int>(i % here);
      in.side[row * in.room + base + at] = in.xhat(row, listed[at]);
    }
  }
}

}  // namespace

cudaError_t launch_list_columns(const NormForwardParams& params, const DeviceProperties& device,
                                cudaStream_t stream) {
  return with_dtype<__half, __nv_bfloat16, float, double>(params.x_dtype, [&](auto x) {
    using X = decltype(x);
    using A = Accumulator<X>;
    const ListInput<X> in{static_cast<const X*>(params.x),
                          params.x_layout,
                          params.rows,
                          params.cols,
                          params.rms,
                          static_cast<const A*>(params.mean),
                          static_cast<const A*>(params.rstd),
                          {params.weight, params.bias, static_cast<A>(params.weight_offset)},
                          recoverable_limits<A>(params.y_dtype),
                          precise_limits<A>(params.y_dtype),
                          params.list.room,
                          params.list.columns,
                          static_cast<A*>(params.list.side)};
    const int64_t elements = params.rows * std::min(params.list.room, kListedAtOnce);
    const int64_t blocks = std::clamp<int64_t>(elements / kListThreads, 1, 2 * device.sm_count);
    return detail::launch(list_columns<X>, static_cast<int>(blocks), kListThreads,
                          {0, 1, device.max_cluster_blocks > 1}, stream, in);
  });
}

cudaError_t launch_column_look(const ColumnLookParams& params, cudaStream_t stream) {
  auto run = [&](auto zero) {
    using A = decltype(zero);
    const ColumnLook<A> look{params.cols,
                             {params.weight, params.bias, static_cast<A>(params.weight_offset)},
                             {recoverable_limits<A>(params.y_dtype),
                              precise_limits<A>(params.y_dtype), 0, nullptr, nullptr},
                             false,
                             params.watch,
                             nullptr};
    return detail::launch(column_look<A>, 1, kLookThreads, {}, stream, look);
  };
  return params.x_dtype == DType::kFloat64 ? run(0.0) : run(0.0f);
}

}  // namespace fused_norm
