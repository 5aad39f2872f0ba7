#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "core/common/launch.cuh"
#include "core/norm/launchers.cuh"

namespace fused_norm {
namespace {

constexpr int kListThreads = 512;
constexpr int kListPack = 8;  // columns that a thread tests at once: 16 bytes of a 16-bit weight
constexpr int kListTurn = kListThreads * kListPack;
constexpr int kListedAtOnce = 1024;
constexpr int kRowsInFlight = 4;

template <typename A>
struct ListInput {
  NormForwardParams of;
  int part_cols;  // of a block
  bool gathers;
  RecoverableLimits<A> recoverable, precise;

  // Which of a pack's columns are unrecoverable, and which are lost: a bit for each.
  struct Bits {
    uint32_t unrecoverable, lost;
  };
  __device__ __forceinline__ Bits find(int col, int end) const {
    A g[kListPack], b[kListPack];
    if (col + kListPack <= of.cols) {
      AskedParams<A, kListPack, true, RowsLie::kRegular>(of, col).take(of, col, 1, g, b);
    } else {
      AskedParams<A, kListPack, true, RowsLie::kElements>(of, col, 1).take(of, col, 1, g, b);
    }
    Bits bits{};
#pragma unroll
    for (int i = 0; i < kListPack; ++i) {
      const bool inside = col + i < end;
      bits.unrecoverable |= uint32_t{inside && !meets(recoverable, g[i], b[i])} << i;
      bits.lost |= uint32_t{inside && !meets(precise, g[i], b[i])} << i;
    }
    return bits;
  }
};

// Lists the columns of a block from its `base`-th listed one on, as many as there are places.
// `found`: of the thread's first pack.
template <typename A, typename Scan>
__device__ __forceinline__ void list_part(const ListInput<A>& in, typename Scan::TempStorage& scan,
                                          int (&listed)[kListedAtOnce], int begin, int end, int own,
                                          typename ListInput<A>::Bits found,
                                          bool unrecoverable_only, int base) {
  int place = -base;
  for (int first = 0; begin + first < end && place < kListedAtOnce; first += kListTurn) {
    const int col = own + first;
    if (first > 0) found = col < end ? in.find(col, end) : typename ListInput<A>::Bits{};
    uint32_t bits = unrecoverable_only ? found.unrecoverable : found.lost;
    int at, more;
    Scan(scan).ExclusiveSum(__popc(bits), at, more);
    at += place;
    for (; bits != 0; bits &= bits - 1, ++at) {
      if (at >= 0 && at < kListedAtOnce) listed[at] = col + __ffs(bits) - 1;
    }
    place += more;
    __syncthreads();
  }
}

// Gathers xhat of `places` columns to `side`, from the rows of one of so many clusters: the last
// rows first, which may still be in the L2 cache. T: the type of x.
template <typename T, typename A>
__device__ __forceinline__ void gather_listed(const NormForwardParams& of,
                                              const int (&listed)[kListedAtOnce], int places,
                                              A* side, int64_t cluster, int64_t clusters) {
  int lanes = 1;
  while (lanes < places && lanes < kWarpSize) lanes *= 2;
  const int lane = threadIdx.x % lanes, row_in_turn = threadIdx.x / lanes;
  const int rows_a_turn = kListThreads / lanes;
  const int64_t tile = int64_t{rows_a_turn} * kRowsInFlight;
  for (int64_t end_row = of.rows - cluster * tile; end_row > 0; end_row -= clusters * tile) {
    const int64_t last = end_row - 1 - row_in_turn;
    for (int i = lane; i < places; i += lanes) {
      const int col = listed[i];
      T value[kRowsInFlight];
      A mean[kRowsInFlight], rstd[kRowsInFlight];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        const int64_t row = max(last - r * rows_a_turn, int64_t{0});
        value[r] = row_start(static_cast<const T*>(of.x), of.x_layout, row)[col];
        rstd[r] = static_cast<const A*>(of.rstd)[row];
        mean[r] = of.rms ? A(0) : static_cast<const A*>(of.mean)[row];
      }
      // As the forward kernel has it.
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        const int64_t row = last - r * rows_a_turn;
        if (row < 0) break;
        const A x = static_cast<A>(value[r]);
        side[row * of.list.room + i] = of.rms ? x * rstd[r] : (x - mean[r]) * rstd[r];
      }
    }
  }
}

// A cluster of blocks, each of which has a part of the columns, finds out which are to be listed.
//
// A kernel that also gathers their xhat follows the forward kernel, and does this while that still
// runs: the parameters are ready. If there are any, it waits, and each block gathers those of its
// part from the rows of its cluster.
template <typename A>
__global__ void __launch_bounds__(kListThreads, 1)
    list_columns(const __grid_constant__ ListInput<A> in) {
  const int room = in.of.list.room;
  int32_t* const columns = in.of.list.columns;
  using Scan = cub::BlockScan<int, kListThreads>;
  __shared__ typename Scan::TempStorage scan;
  __shared__ int listed[kListedAtOnce];
  __shared__ int2 of_blocks[2][kPortableClusterBlocks];
  __shared__ int found[2];

  if (!in.gathers) meet_previous_kernel();
  RowCluster cluster;
  const int rank = cluster.rank(), blocks = cluster.blocks();
  cluster.arrive();
  if (threadIdx.x < 2) found[threadIdx.x] = 0;
  __syncthreads();
  const int begin = min(in.of.cols, rank * in.part_cols),
            end = min(in.of.cols, begin + in.part_cols);
  const int own = begin + threadIdx.x * kListPack;
  int lost = 0, unrecoverable = 0;
  typename ListInput<A>::Bits first_found{};
  for (int col = own; col < end; col += kListTurn) {
    const auto bits = in.find(col, end);
    if (col == own) first_found = bits;
    lost += __popc(bits.lost);
    unrecoverable += __popc(bits.unrecoverable);
  }
  if (lost > 0) atomicAdd(&found[0], lost);  // the unrecoverable ones are among them
  if (unrecoverable > 0) atomicAdd(&found[1], unrecoverable);
  __syncthreads();
  int before = 0, total = 0;  // in the blocks before, and in all
  const int2 here = {found[0], found[1]};
  cluster.wait();
  const int2* const parts = blocks > 1 ? cluster.gather(here, of_blocks) : &here;
  for (int b = 0; b < blocks; ++b) total += parts[b].x;
  const bool unrecoverable_only = total > room;
  if (unrecoverable_only) total = 0;
  for (int b = 0; b < blocks; ++b) {
    const int part = unrecoverable_only ? parts[b].y : parts[b].x;
    if (unrecoverable_only) total += part;
    if (b < rank) before += part;
  }
  const int count = min(unrecoverable_only ? here.y : here.x, max(0, room - before));

  auto list = [&](int base) {
    list_part<A, Scan>(in, scan, listed, begin, end, own, first_found, unrecoverable_only, base);
  };
  if (count > 0) list(0);
  // Who writes nothing need not wait.
  const bool writes_list = static_cast<int>(blockIdx.x) < blocks;
  if (count == 0 && blockIdx.x != 0) return;
  if (in.gathers) meet_previous_kernel();
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) columns[0] = total;
    for (int i = total + threadIdx.x; i < room; i += kListThreads) columns[1 + i] = 0;
  }

  for (int base = 0; base < count; base += kListedAtOnce) {
    if (base > 0) {
      __syncthreads();
      list(base);
    }
    const int places = min(count - base, kListedAtOnce);
    if (writes_list) {
      for (int i = threadIdx.x; i < places; i += kListThreads)
        columns[1 + before + base + i] = listed[i];
    }
    if (!in.gathers) continue;
    A* const side = static_cast<A*>(in.of.list.side) + before + base;
    with_param_type<A>(in.of.x_dtype, [&](auto type) {
      gather_listed<decltype(type)>(in.of, listed, places, side, blockIdx.x / blocks,
                                    gridDim.x / blocks);
    });
  }
}

constexpr int kLookThreads = 256;
template <typename A>
__global__ void __launch_bounds__(kLookThreads)
    column_look(const __grid_constant__ ColumnLook<A> look) {
  look_at_columns(look, blockIdx.x, gridDim.x);
}

}  // namespace

cudaError_t launch_list_columns(const NormForwardParams& params, bool gathers,
                                const DeviceProperties& device, cudaStream_t stream) {
  // Blocks of a cluster share the columns, which takes a barrier of the cluster.
  int cluster = 1;
  while (cluster < device.max_cluster_blocks && cluster * kListTurn < params.cols) cluster *= 2;
  const int packs = (params.cols + kListPack - 1) / kListPack;
  const int part_cols = (packs + cluster - 1) / cluster * kListPack;
  const int64_t elements = params.rows * std::min(params.list.room, cluster * kListedAtOnce);
  const int64_t most_blocks = gathers ? 2 * device.sm_count : cluster;
  const int64_t blocks =
      std::clamp<int64_t>(elements / (kListThreads * kRowsInFlight),
                          std::min<int64_t>(kPortableClusterBlocks, most_blocks), most_blocks);
  return with_accumulator(params.x_dtype, [&](auto zero) {
    using A = decltype(zero);
    const ListInput<A> in{params, part_cols, gathers, recoverable_limits<A>(params.y_dtype),
                          precise_limits<A>(params.y_dtype)};
    return launch(list_columns<A>, static_cast<int>(blocks / cluster * cluster), kListThreads,
                  {0, cluster, device.max_cluster_blocks > 1}, stream, in);
  });
}

cudaError_t launch_column_look(const NormBackwardParams& params, cudaStream_t stream) {
  return with_accumulator(params.x_dtype, [&](auto zero) {
    using A = decltype(zero);
    const int blocks = params.cols / kLookThreads + 1;  // one of no columns, too
    return launch(column_look<A>, blocks, kLookThreads, {}, stream, column_look_of<A>(params));
  });
}

}  // namespace fused_norm
