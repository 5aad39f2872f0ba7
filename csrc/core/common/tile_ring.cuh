// Tiles of rows that pass through shared memory by bulk copies and are changed there in place.
#pragma once

#include "core/common/branch.cuh"
#include "core/common/bulk_copy.cuh"
#include "core/common/flat_rows.h"
#include "core/common/launch.cuh"
#include "core/common/overlap.cuh"
#include "core/common/row_access.cuh"
#include "core/common/row_group.cuh"

namespace fused_norm {

// What passes through: tensors of rows, and where the first one's go when they are changed.
template <typename T, int kTensors>
struct TileTensors {
  struct Rows {
    const void* data;
    RowLayout layout;
  };

  Rows read[kTensors];
  void* written;  // contiguous
  int64_t rows;
  int cols;
  // Whether in each of these tensors the rows follow each other without gaps from a multiple of 16
  // bytes on. Else the block's threads copy them, before and after a tile's turn.
  bool lie_flat = false;
};

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

// A persistent block's tiles: every gridDim.x-th, each in a slot of shared memory for as long as
// the block works on it; others are on their way there, or from there. Tiles are whole granules,
// but for the last one.
template <typename T, int kTensors>
class TileRing {
 public:
  // `filled` and `memory`, of kFlatSlots slots, are in shared memory. A barrier of the block
  // follows start().
  __device__ __forceinline__ TileRing(const TileTensors<T, kTensors>& tensors, const FlatRows& flat,
                                      CopyBarrier* filled, char* memory)
      : tensors_(tensors),
        flat_(flat),
        filled_(filled),
        memory_(memory),
        cols_(tensors.cols),
        tiles_(static_cast<int>((tensors.rows + flat.rows - 1) / flat.rows)),
        last_rows_(static_cast<int>(tensors.rows - int64_t{tiles_ - 1} * flat.rows)) {
    if (threadIdx.x != 0) return;
#pragma unroll 1
    for (int slot = 0; slot < kFlatSlots; ++slot) filled[slot].init(kTensors);
    CopyBarrier::order_inits();
  }
  // By all threads.
  __device__ __forceinline__ void start() {
    __syncwarp();
    if (!copies() || !tensors_.lie_flat) return;
#pragma unroll 1
    for (int slot = 0; slot < kFlatSlots; ++slot) fill(slot, tile_ + slot * stride());
  }

  // Of the tile at hand: whether there is one; its first row; where the lane's first column of one
  // of its rows lies, once it is there. After the tensors' last rows comes anything.
  __device__ __forceinline__ bool any() const { return tile_ < tiles_; }
  __device__ __forceinline__ int64_t first_row() const { return int64_t{tile_} * flat_.rows; }
  __device__ __forceinline__ T* own(int tensor, int row) const {
    return part(slot_.number, tensor) + row * cols_ + threadIdx.x % kWarpSize;
  }
  __device__ __forceinline__ void wait() const {
    if (tensors_.lie_flat) return filled_[slot_.number].wait(slot_.parity);
#pragma unroll 1
    for (int t = 0; t < kTensors; ++t) {
      const auto& from = tensors_.read[t];
      gather_rows(part(slot_.number, t), static_cast<const T*>(from.data), from.layout, first_row(),
                  rows_of(tile_), cols_);
    }
    __syncthreads();
  }

  // By all threads of the block, when each is done with its part of the tile: writes it, and goes
  // on to the next.
  __device__ __forceinline__ void next() {
    CopyBarrier::order_writes();
    __syncthreads();
    if (tensors_.lie_flat) {
      // The first lane writes its tensor's part. Each fills a part of the slot before this one,
      // when no more than this one's copy is under way.
      if (copies()) {
        if (threadIdx.x == 0) write();
        if (tile_ != static_cast<int>(blockIdx.x))
          fill(slot_.number > 0 ? slot_.number - 1 : kFlatSlots - 1,
               tile_ + (kFlatSlots - 1) * stride());
      }
      slot_.next(kFlatSlots);
    } else {
      copy_elements(static_cast<T*>(tensors_.written) + first_row() * cols_, part(slot_.number, 0),
                    rows_of(tile_) * cols_);
      __syncthreads();
    }
    tile_ += stride();
  }
  __device__ __forceinline__ void finish() const {
    if (copies()) wait_for_bulk_reads<0>();
  }

 private:
  // Lanes of the block's first warp, each for the tensor of its number.
  __device__ __forceinline__ static bool copies() { return threadIdx.x < kTensors; }
  __device__ __forceinline__ static int stride() { return static_cast<int>(gridDim.x); }
  __device__ __forceinline__ T* part(int slot, int tensor) const {
    return reinterpret_cast<T*>(memory_ + (slot * kTensors + tensor) * flat_.tile_bytes);
  }
  __device__ __forceinline__ int rows_of(int tile) const {
    return tile + 1 < tiles_ ? flat_.rows : last_rows_;
  }
  // Where a tile starts in its tensors, in bytes, and how many it has; and those of whole granules.
  __device__ __forceinline__ int64_t start_of(int tile) const {
    return int64_t{tile} * (flat_.rows * cols_ * static_cast<int>(sizeof(T)));
  }
  __device__ __forceinline__ int bytes_of(int tile) const {
    return rows_of(tile) * cols_ * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ static int whole(int bytes) { return bytes & -kGranule; }

  __device__ __forceinline__ void fill(int slot, int tile) {
    if (tile >= tiles_) return;
    const int tensor = threadIdx.x, bytes = bytes_of(tile), granules = whole(bytes);
    const char* const from = static_cast<const char*>(tensors_.read[tensor].data) + start_of(tile);
    char* const to = reinterpret_cast<char*>(part(slot, tensor));
    // Past the tensors' end nothing is read: the lane copies the rest itself.
    if (tile + 1 == tiles_) copy_rest<T>(to, from, granules, bytes);
    filled_[slot].expect(granules);
    if (granules > 0) filled_[slot].copy(to, from, granules);
  }
  __device__ __forceinline__ void write() {
    const int bytes = bytes_of(tile_), granules = whole(bytes);
    char* const to = static_cast<char*>(tensors_.written) + start_of(tile_);
    const char* const from = reinterpret_cast<const char*>(part(slot_.number, 0));
    if (granules > 0) store_bulk(to, from, granules);
    copy_rest<T>(to, from, granules, bytes);
    commit_bulk_stores();
    wait_for_bulk_reads<1>();
  }

  const TileTensors<T, kTensors>& tensors_;
  const FlatRows& flat_;
  CopyBarrier* filled_;
  char* memory_;
  int cols_;
  int tile_ = blockIdx.x, tiles_, last_rows_;  // rows of the tensors' last tile
  RingSlot slot_;
};

// Calls run(flag, row_class), both known at compile time, once at the top of a kernel.
template <int kFirst, int kEnd, typename Run>
__device__ __forceinline__ void with_row_class(const FlatRows& flat, bool flag, Run run) {
#if __CUDA_ARCH__ >= 900
  with_flag(flag, [&](auto known) {
    with_number<kFirst, kEnd>(flat.row_class, [&](auto row_class) { run(known, row_class); });
  });
#else
  __trap();  // no plan asks for it
#endif
}

// Of a kernel's slots; not a template, as each instance would have barriers of its own.
__device__ __forceinline__ CopyBarrier* tile_barriers() {
  __shared__ CopyBarrier filled[kFlatSlots];
  return filled;
}

// Persistent blocks walk over tiles; calls run(tiles, r) for the first of each kRows of a warp's
// rows of one. prepare() while the first tiles are on their way.
template <int kRows, typename T, int kTensors, typename Prepare, typename Run>
__device__ __forceinline__ void for_tiles(const TileTensors<T, kTensors>& tensors,
                                          const FlatRows& flat, Prepare prepare, Run run) {
  extern __shared__ __align__(128) char memory[];
  TileRing<T, kTensors> tiles(tensors, flat, tile_barriers(), memory);
  meet_previous_kernel();
  tiles.start();
  prepare();
  __syncthreads();
  for (; tiles.any(); tiles.next()) {
    tiles.wait();
#pragma unroll 1
    for (int r = threadIdx.x / kWarpSize * kRows; r < flat.rows; r += kFlatWarps * kRows)
      run(tiles, r);
  }
  tiles.finish();
}

// Launches a kernel of tensors and their tiles; `args` are its further arguments.
template <typename T, int kTensors, typename... Params, typename... Args>
cudaError_t launch_tiles(void (*kernel)(TileTensors<T, kTensors>, FlatRows, Params...),
                         TileTensors<T, kTensors> tensors, const FlatRows& flat,
                         cudaStream_t stream, const Args&... args) {
  tensors.lie_flat = lies_flat(tensors.written, one_stride(tensors.cols), tensors.cols);
  for (const auto& rows : tensors.read)
    tensors.lie_flat &= lies_flat(rows.data, rows.layout, tensors.cols);
  return launch(kernel, flat.blocks, kFlatThreads, {flat.shared_bytes, 1, true}, stream, tensors,
                flat, args...);
}

}  // namespace fused_norm
