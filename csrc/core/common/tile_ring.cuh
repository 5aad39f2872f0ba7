// Tiles of rows that pass through shared memory by bulk copies and are changed there in place.
#pragma once

#include "core/common/bulk_copy.cuh"
#include "core/common/flat_rows.h"
#include "core/common/overlap.cuh"
#include "core/common/row_access.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

// By all threads of the block: copies rows, those from row `first` of a tensor on, to where they
// follow each other.
template <typename T>
__device__ __noinline__ void gather_rows(T* to, const T* base, RowLayout layout, int64_t first,
                                         int rows, int cols) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  for (int row = warp; row < rows; row += warps) {
    const T* const from = row_start(base, layout, first + row);
#pragma unroll 4
    for (int col = lane; col < cols; col += kWarpSize) to[row * cols + col] = from[col];
  }
}
template <typename T>
__device__ __noinline__ void copy_elements(T* to, const T* from, int count) {
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
// A tensor whose rows pass through.
template <typename T>
struct TileRows {
  const T* base;
  RowLayout layout;
};

// A persistent block's tiles: every gridDim.x-th, each in a slot of shared memory
// for as long as the block works on it; others are on their way there, or from there. Tiles are
// whole granules, but for the last one.
//
// Tensors says what passes through: count() tensors, rows_of(t) being tensor t; written(), where
// what became of tensor kWritten goes; and flat(), whether in each of them the
// rows follow each other without gaps from a multiple of 16 bytes on. Others are copied by the
// block's threads, before and after a tile's turn.
template <typename T, typename Tensors>
class TileRing {
 public:
  // `filled` and `memory`, of kFlatSlots slots, are in shared memory. A barrier of the block
  // follows start().
  __device__ __forceinline__ TileRing(const Tensors& tensors, int64_t rows, int cols,
                                      const FlatRows& flat, CopyBarrier* filled, char* memory)
      : tensors_(tensors),
        flat_(flat),
        filled_(filled),
        memory_(memory),
        cols_(cols),
        tile_(blockIdx.x),
        tiles_(static_cast<int>((rows + flat.rows - 1) / flat.rows)),
        last_rows_(static_cast<int>(rows - int64_t{tiles_ - 1} * flat.rows)) {
    if (threadIdx.x != 0) return;
#pragma unroll 1
    for (int slot = 0; slot < kFlatSlots; ++slot) filled[slot].init(tensors.count());
    CopyBarrier::order_inits();
  }
  // By all threads.
  __device__ __forceinline__ void start() {
    __syncwarp();
    if (!copies() || !tensors_.flat()) return;
#pragma unroll 1
    for (int slot = 0; slot < kFlatSlots; ++slot) fill(slot, tile_ + slot * stride());
  }

  // Of the tile at hand: whether there is one; its first row; where its part of a tensor lies, once
  // it is there. After the tensors' last rows comes anything.
  __device__ __forceinline__ bool any() const { return tile_ < tiles_; }
  __device__ __forceinline__ int64_t first_row() const { return int64_t{tile_} * flat_.rows; }
  __device__ __forceinline__ T* part(int tensor) const {
    return reinterpret_cast<T*>(part_of(slot_.number, tensor));
  }
  __device__ __forceinline__ void wait() const {
    if (tensors_.flat()) return filled_[slot_.number].wait(slot_.parity);
#pragma unroll 1
    for (int t = 0; t < tensors_.count(); ++t) {
      const TileRows<T> of = tensors_.rows_of(t);
      gather_rows(part(t), of.base, of.layout, first_row(), rows_of(tile_), cols_);
    }
    __syncthreads();
  }

  // By all threads of the block, when each is done with its part of the tile: writes it, and goes
  // on to the next.
  __device__ __forceinline__ void next() {
    CopyBarrier::order_writes();
    __syncthreads();
    if (tensors_.flat()) {
      // Each of some lanes writes and fills the part of a tensor: the slot before this one, when no
      // more than this one's copy is under way.
      if (copies()) {
        if (tensor() == Tensors::kWritten) write();
        if (tile_ != static_cast<int>(blockIdx.x))
          fill(slot_.number > 0 ? slot_.number - 1 : kFlatSlots - 1,
               tile_ + (kFlatSlots - 1) * stride());
      }
      slot_.next(kFlatSlots);
    } else {
      copy_elements(tensors_.written() + first_row() * cols_, part(Tensors::kWritten),
                    rows_of(tile_) * cols_);
      __syncthreads();
    }
    tile_ += stride();
  }
  __device__ __forceinline__ void finish() const {
    if (copies()) wait_for_bulk_reads<0>();
  }

 private:
  // Lanes of the block's first warp, each for a tensor.
  __device__ __forceinline__ static int tensor() { return threadIdx.x; }
  __device__ __forceinline__ bool copies() const { return threadIdx.x < tensors_.count(); }
  __device__ __forceinline__ char* part_of(int slot, int tensor) const {
    return memory_ + (slot * tensors_.count() + tensor) * flat_.tile_bytes;
  }
  __device__ __forceinline__ static int stride() { return static_cast<int>(gridDim.x); }
  __device__ __forceinline__ int rows_of(int tile) const {
    return tile + 1 < tiles_ ? flat_.rows : last_rows_;
  }
  // Where a tile starts in its tensors, in bytes, and how many it has.
  __device__ __forceinline__ int64_t start_of(int tile) const {
    return int64_t{tile} * (flat_.rows * cols_ * static_cast<int>(sizeof(T)));
  }
  __device__ __forceinline__ int bytes_of(int tile) const {
    return rows_of(tile) * cols_ * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ static int whole(int bytes) { return bytes & -kGranule; }

  __device__ __forceinline__ void fill(int slot, int tile) {
    if (tile >= tiles_) return;
    const int bytes = bytes_of(tile), granules = whole(bytes);
    const char* const from =
        reinterpret_cast<const char*>(tensors_.rows_of(tensor()).base) + start_of(tile);
    char* const to = part_of(slot, tensor());
    // Past the tensors' end nothing is read: the lane copies the rest itself.
    if (tile + 1 == tiles_) copy_rest<T>(to, from, granules, bytes);
    filled_[slot].expect(granules);
    if (granules > 0) filled_[slot].copy(to, from, granules);
  }
  __device__ __forceinline__ void write() {
    const int bytes = bytes_of(tile_), granules = whole(bytes);
    char* const to = reinterpret_cast<char*>(tensors_.written()) + start_of(tile_);
    const char* const from = part_of(slot_.number, Tensors::kWritten);
    if (granules > 0) store_bulk(to, from, granules);
    copy_rest<T>(to, from, granules, bytes);
    commit_bulk_stores();
    wait_for_bulk_reads<1>();
  }

  const Tensors& tensors_;
  const FlatRows& flat_;
  CopyBarrier* filled_;
  char* memory_;
  int cols_;
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
