// Tiles of rows that pass through shared memory by bulk copies and are changed there in place.
#pragma once

#include "core/common/bulk_copy.cuh"
#include "core/common/flat_rows.h"
#include "core/common/launch.cuh"
#include "core/common/overlap.cuh"
#include "core/common/row_access.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

// By all threads of the block: copies rows, those from row `first` of a tensor on, to where they
// follow each other.
template <typename T>
__device__ __noinline__ void gather_rows(T* to, const T* base, RowLayout layout, int64_t first,
                                         int rows, int cols) {
  for (int row = threadIdx.x / kWarpSize; row < rows; row += blockDim.x / kWarpSize) {
    const T* const from = row_start(base, layout, first + row);
#pragma unroll 4
    for (int col = threadIdx.x % kWarpSize; col < cols; col += kWarpSize)
      to[row * cols + col] = from[col];
  }
}

// A tensor whose rows pass through; and all of them. What becomes of the last one's is written.
template <typename T>
struct TileRows {
  const T* data;
  RowLayout layout;
};
template <typename T, int kCount>
struct TileTensors {
  TileRows<T> of[kCount];
  T* written;
  int64_t rows;
  int cols;
  // Everywhere the rows follow each other without gaps from a multiple of 16 bytes on. Others are
  // copied by the block's threads, before and after a tile's turn.
  bool lie_flat;
};
template <typename T, typename... Rows>
TileTensors<T, sizeof...(Rows)> tile_tensors(T* written, int64_t rows, int cols,
                                             const Rows&... of) {
  const bool here = lies_flat(written, one_stride(cols), cols);
  return {{of...}, written, rows, cols, here && (lies_flat(of.data, of.layout, cols) && ...)};
}

// A persistent block's tiles: every gridDim.x-th, each in a slot of shared memory for as long as
// the block works on it; others are on their way there, or from there. Tiles are whole granules,
// but for the last one.
template <typename T, int kCount>
class TileRing {
 public:
  // `filled` and `memory`, of kFlatSlots slots, are in shared memory. A barrier of the block
  // follows start().
  __device__ __forceinline__ TileRing(const TileTensors<T, kCount>& tensors, const FlatRows& flat,
                                      CopyBarrier* filled, char* memory)
      : tensors_(tensors),
        flat_(flat),
        filled_(filled),
        memory_(memory),
        tile_(blockIdx.x),
        tiles_(static_cast<int>((tensors.rows + flat.rows - 1) / flat.rows)),
        last_rows_(static_cast<int>(tensors.rows - int64_t{tiles_ - 1} * flat.rows)) {
    if (threadIdx.x != 0) return;
#pragma unroll 1
    for (int slot = 0; slot < kFlatSlots; ++slot) filled[slot].init(kCount);
    CopyBarrier::order_inits();
  }
  // By all threads.
  __device__ __forceinline__ void start() {
    __syncwarp();
    if (!copies() || !tensors_.lie_flat) return;
#pragma unroll 1
    for (int slot = 0; slot < kFlatSlots; ++slot) fill(slot, tile_ + slot * stride());
  }

  // Of the tile at hand: whether there is one; its first row; where its part of a tensor lies, once
  // it is there. After the tensors' last rows comes anything.
  __device__ __forceinline__ bool any() const { return tile_ < tiles_; }
  __device__ __forceinline__ int64_t first_row() const { return int64_t{tile_} * flat_.rows; }
  __device__ __forceinline__ T* part(int tensor) const { return part_of(slot_.number, tensor); }
  __device__ __forceinline__ void wait() const {
    if (tensors_.lie_flat) return filled_[slot_.number].wait(slot_.parity);
#pragma unroll 1
    for (int t = 0; t < kCount; ++t)
      gather_rows(part(t), tensors_.of[t].data, tensors_.of[t].layout, first_row(), rows_of(tile_),
                  tensors_.cols);
    __syncthreads();
  }

  // By all threads of the block, when each is done with its part of the tile: writes it, and goes
  // on to the next.
  __device__ __forceinline__ void next() {
    CopyBarrier::order_writes();
    __syncthreads();
    if (tensors_.lie_flat) {
      // Each of some lanes writes and fills the part of a tensor: the slot before this one, when no
      // more than this one's copy is under way.
      if (copies()) {
        if (threadIdx.x == kWritten) write();
        if (tile_ != static_cast<int>(blockIdx.x))
          fill((slot_.number + kFlatSlots - 1) % kFlatSlots, tile_ + (kFlatSlots - 1) * stride());
      }
      slot_.next(kFlatSlots);
    } else {
      gather_rows(tensors_.written + start_of(tile_), part(kWritten), {tensors_.cols}, 0,
                  rows_of(tile_), tensors_.cols);
      __syncthreads();
    }
    tile_ += stride();
  }
  __device__ __forceinline__ void finish() const {
    if (copies()) wait_for_bulk_reads<0>();
  }

 private:
  static constexpr int kWritten = kCount - 1;
  // By lanes of the block's first warp, each for a tensor.
  __device__ __forceinline__ static bool copies() { return threadIdx.x < kCount; }
  __device__ __forceinline__ T* part_of(int slot, int tensor) const {
    return reinterpret_cast<T*>(memory_ + (slot * kCount + tensor) * flat_.tile_bytes);
  }
  __device__ __forceinline__ static int stride() { return static_cast<int>(gridDim.x); }
  __device__ __forceinline__ int rows_of(int tile) const {
    return tile + 1 < tiles_ ? flat_.rows : last_rows_;
  }
  // Where a tile starts in its tensors, and how many bytes it has.
  __device__ __forceinline__ int64_t start_of(int tile) const {
    return int64_t{tile} * (flat_.rows * tensors_.cols);
  }
  __device__ __forceinline__ int bytes_of(int tile) const {
    return rows_of(tile) * tensors_.cols * static_cast<int>(sizeof(T));
  }

  __device__ __forceinline__ void fill(int slot, int tile) {
    if (tile >= tiles_) return;
    const int bytes = bytes_of(tile), granules = bytes & -kGranule;
    const T* const from = tensors_.of[threadIdx.x].data + start_of(tile);
    T* const to = part_of(slot, threadIdx.x);
    // Past the tensors' end nothing is read: the lane copies the rest itself.
    if (tile + 1 == tiles_) copy_rest<T>(to, from, granules, bytes);
    filled_[slot].expect(granules);
    if (granules > 0) filled_[slot].copy(to, from, granules);
  }
  __device__ __forceinline__ void write() {
    const int bytes = bytes_of(tile_), granules = bytes & -kGranule;
    T* const to = tensors_.written + start_of(tile_);
    const T* const from = part(kWritten);
    if (granules > 0) store_bulk(to, from, granules);
    copy_rest<T>(to, from, granules, bytes);
    commit_bulk_stores();
    wait_for_bulk_reads<1>();
  }

  const TileTensors<T, kCount>& tensors_;
  const FlatRows& flat_;
  CopyBarrier* filled_;
  char* memory_;
  int tile_, tiles_, last_rows_;  // rows of the tensors' last tile
  RingSlot slot_;
};

// Persistent blocks walk over tiles; calls run(r) for the first of each kRows of a warp's rows of
// one. prepare() while the first tiles are on their way.
template <int kRows, typename Tiles, typename Prepare, typename Run>
__device__ __forceinline__ void for_tiles(Tiles& tiles, const FlatRows& flat, Prepare prepare,
                                          Run run) {
  meet_previous_kernel();
  tiles.start();
  prepare();
  __syncthreads();
  for (; tiles.any(); tiles.next()) {
    tiles.wait();
#pragma unroll 1
    for (int r = threadIdx.x / kWarpSize * kRows; r < flat.rows;
         r += kFlatThreads / kWarpSize * kRows)
      run(r);
  }
  tiles.finish();
}

}  // namespace fused_norm
