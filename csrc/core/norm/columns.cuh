// Device side of columns.h.
#pragma once

#include <cuda_runtime.h>

#include "core/common/overlap.cuh"
#include "core/common/row_access.cuh"
#include "core/common/row_group.cuh"
#include "core/norm/asked_params.cuh"
#include "core/norm/columns.h"
#include "core/norm/recoverable.h"

namespace fused_norm {

// What a backward call that works from the output was given by its forward call.
template <typename A>
struct ListedColumns {
  RecoverableLimits<A> recoverable, precise;
  int32_t room;  // 0: nothing is listed, and the pointers may be null
  const int32_t* columns;
  const A* side;

  __device__ __forceinline__ int count() const { return room > 0 ? min(columns[0], room) : 0; }

  // The place of a column in the list; -1: it is not there.
  __device__ int find(int col) const {
    const int count = this->count();
    int low = 0, end = count;
    while (low < end) {
      const int middle = (low + end) / 2;
      if (columns[1 + middle] < col) {
        low = middle + 1;
      } else {
        end = middle;
      }
    }
    return low < count && columns[1 + low] == col ? low : -1;
  }

  // The places of the columns from `first` to `end`, by all lanes of a warp.
  __device__ int2 places(int first, int end) const {
    int2 before = {};
    const int count = this->count();
#pragma unroll 4
    for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
      const int col = columns[1 + i];
      before.x += col < first;
      before.y += col < end;
    }
    return {static_cast<int>(__reduce_add_sync(kFullMask, before.x)),
            static_cast<int>(__reduce_add_sync(kFullMask, before.y))};
  }

  __device__ __forceinline__ A xhat(int64_t row, int place) const {
    return side[row * room + place];
  }
  // By all threads of a block: brings the list near, and a row's values.
  __device__ __forceinline__ void prefetch(int64_t row) const {
    constexpr int kSector = 32 / sizeof(A);
    const int place = threadIdx.x * kSector;
    prefetch_to_l2(columns + place, place < room);
    prefetch_to_l2(side + row * room + place, place < room);
  }
};

// Where a forward kernel keeps xhat of columns that the kernel before it lists. Of those in a
// block's part of a row, `cols` columns from `first` on, a thread takes the place of its number,
// and every blockDim.x-th from there on. Behind the last place taken, to the end of a sector, the
// list has column 0, which is kept too: what a sector lacks would be read from memory.
template <typename A>
struct SideOut {
  int32_t room;  // 0: nothing is listed
  const int32_t* columns;
  A* side;

  // At the top of a forward kernel. The kernel that lists has waited for all before it: what they
  // wrote may be read while it is at work.
  __device__ __forceinline__ void meet_previous_kernel() const {
    if (room == 0) wait_for_prerequisites();
    launch_dependents();
  }

  // How many places are written.
  __device__ __forceinline__ int places() const {
    if (room == 0) return 0;
    wait_for_prerequisites();
    constexpr int kSector = 32 / sizeof(A);
    return min((*columns + kSector - 1) / kSector * kSector, room);
  }

  // The column at a place that is written; kNone if it is none of these `cols` from `first` on.
  static constexpr int kNone = -1;
  __device__ __forceinline__ int column(int place, int first, int cols) const {
    const int col = columns[1 + place];
    return static_cast<unsigned>(col - first) < static_cast<unsigned>(cols) ? col : kNone;
  }
  // The first of a thread's places, from `place` on, with one of these columns; and that column.
  __device__ __forceinline__ int first_column(int& place, int places, int first, int cols) const {
    int col = kNone;
    while (place < places && (col = column(place, first, cols)) < 0) place += blockDim.x;
    return col;
  }
  // That of a thread that has one place, kNone if it has none; kLater if it has more. Both are
  // negative.
  static constexpr int kLater = -2;
  __device__ __forceinline__ int only_column(int first, int cols) const {
    const int place = threadIdx.x, more = place + blockDim.x;
    if (place >= room) return kNone;
    const int end = places(), col = column(place, first, cols);  // both loads are on their way
    return place >= end ? kNone : more < end ? kLater : col;
  }

  // Keeps xhat of value x at a place. RMSNorm's mean is 0.
  __device__ __forceinline__ void keep(int64_t row, int place, A x, A mean, A rstd) const {
    side[row * room + place] = (x - mean) * rstd;
  }
  // The same at the thread's places from `place` on, up to `end`; their values are read again.
  template <typename Load>
  __device__ __forceinline__ void keep_all(const Load& load, int64_t row, int place, int end,
                                           int first, int cols, A mean, A rstd) const {
    for (; place < end; place += blockDim.x) {
      const int col = column(place, first, cols);
      if (col >= 0) keep(row, place, static_cast<A>(load.value(row, col)), mean, rstd);
    }
  }
};

// What a look at the parameters counts.
enum { kOverflow, kMoving, kAtRisk, kLookCounts };

// Where the blocks of a look add up what they found; zero before, and again after.
struct LookTotals {
  unsigned arrived;  // blocks
  int counts[kLookCounts];
};
static_assert(sizeof(LookTotals) <= kTotalsBytes);

// A look at the columns of a norm.
template <typename A>
struct ColumnLook {
  int cols;
  ParamVector weight, bias;
  A weight_offset;
  ListedColumns<A> listed;
  bool from_output;  // the call needs every column to be recoverable or listed
  ColumnWatch watch;

  using Asked = AskedParams<A, 1, true, RowsLie::kElements>;

  // Whether the gradients of a column, whose parameters were asked for, are NaN.
  __device__ __forceinline__ bool spoils(int col, const Asked& asked) const {
    A g[1], b[1];
    asked.take(*this, col, kWarpSize, g, b);
    return spoils(col, g[0], b[0]);
  }

  // A column is at risk when it might not be precise after kUpdatesAhead updates, were each to move
  // its g and bias twice as far as the last ones did, with a factor 2 to spare.
  __device__ void look_at(int col, bool (&found)[kLookCounts]) const {
    const Asked asked(*this, col);
    const bool has_bias = bias.data != nullptr;
    const int64_t pitch = cols;
    A* const at = static_cast<A*>(watch.history) + col;
    A before[4] = {};  // g, its speed, and the same of the bias
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (watch.history && (i < 2 || has_bias)) before[i] = at[i * pitch];
    }
    A of_g[1], of_bias[1];
    asked.take(*this, col, kWarpSize, of_g, of_bias);
    const A g = of_g[0], b = of_bias[0];
    const RecoverableLimits<A>& precise = listed.precise;
    const bool lost = !meets(precise, g, b);
    if (lost) found[kOverflow] = spoils(col, g, b);
    if (!watch.history) return;
    const bool first = isnan(before[0]) && isnan(before[1]);
    const A g_step = fabs(g - before[0]), b_step = has_bias ? fabs(b - before[2]) : A(0);
    A g_speed = first ? A(0) : before[1], b_speed = first ? A(0) : before[3];
    if (!first && (g_step > 0 || b_step > 0)) {
      g_speed = fmax(g_step, g_speed / 2);
      b_speed = fmax(b_step, b_speed / 2);
    }
    at[0] = g;
    at[pitch] = g_speed;
    if (has_bias) {
      at[2 * pitch] = b;
      at[3 * pitch] = b_speed;
    }
    constexpr A kReach = 2 * kUpdatesAhead;
    found[kMoving] = g_speed > 0 || b_speed > 0;
    const A nearest = fabs(g) - kReach * g_speed, farthest = fabs(b) + kReach * b_speed;
    found[kAtRisk] = lost || !meets(precise, nearest / 2, farthest) || nearest <= 0;
  }

  // By one thread of each of so many blocks, with what its block has found: adds that up. Whether
  // it is the last, which then has what all have found.
  __device__ bool add_up(unsigned blocks, int (&counts)[kLookCounts]) const {
    auto* const sums = static_cast<LookTotals*>(watch.totals);
    bool any = false;
#pragma unroll
    for (int i = 0; i < kLookCounts; ++i) {
      if (counts[i] == 0) continue;
      atomicAdd(sums->counts + i, counts[i]);
      any = true;
    }
    if (any) __threadfence();
    if (atomicInc(&sums->arrived, blocks - 1) != blocks - 1) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < kLookCounts; ++i) counts[i] = atomicExch(sums->counts + i, 0);
    return true;
  }

  // By one thread that has what all have found.
  __device__ void report(const int (&counts)[kLookCounts]) const {
    if (watch.history) {
      *static_cast<volatile uint64_t*>(&watch.report->report) =
          pack_report(counts[kAtRisk], watch.stamp, counts[kMoving] > 0);
    }
    if (counts[kOverflow] > 0) {
      *static_cast<volatile uint32_t*>(&watch.report->overflow) = counts[kOverflow];
      __threadfence_system();
      *static_cast<volatile uint32_t*>(watch.overflow_signal) = 1;
    }
  }

 private:
  __device__ __forceinline__ bool spoils(int col, A g, A b) const {
    return from_output && !meets(listed.recoverable, g, b) && listed.find(col) < 0;
  }
};

// By so many blocks, each thread at a column.
template <typename A>
__device__ __forceinline__ void look_at_columns(const ColumnLook<A>& look, int block, int blocks) {
  bool found[kLookCounts] = {};
  const int col = block * blockDim.x + threadIdx.x;
  if (col < look.cols) look.look_at(col, found);
  int counts[kLookCounts];
#pragma unroll
  for (int i = 0; i < kLookCounts; ++i) counts[i] = __syncthreads_count(found[i]);
  if (threadIdx.x == 0 && look.add_up(blocks, counts)) look.report(counts);
}

}  // namespace fused_norm
