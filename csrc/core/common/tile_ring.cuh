// Tiles of rows that follow each other without gaps, which pass through shared memory by bulk
// copies and are changed there in place.
#pragma once

#include "core/common/bulk_copy.cuh"

namespace fused_norm {

// A persistent block's tiles: every gridDim.x-th, each in a slot of shared memory for as long as
// the block works on it; others are on their way there, or from there. One thread starts all
// copies. A tile is whole 16-byte granules, but for the last one of the tensors, whose rest that
// thread copies itself. Both tensors start on 16 bytes. Shape: `slots`, `rows` of a tile, and
// `slot_bytes`.
template <typename T, typename Shape>
class TileRing {
 public:
  // `filled` and `memory`, of so many slots, are in shared memory. A barrier of the block follows
  // start().
  __device__ __forceinline__ TileRing(const T* from, T* to, int64_t rows, int cols,
                                      const Shape& shape, CopyBarrier* filled, char* memory)
      : from_(from),
        to_(to),
        rows_(rows),
        tiles_((rows + shape.rows - 1) / shape.rows),
        tile_(blockIdx.x),
        cols_(cols),
        shape_(shape),
        filled_(filled),
        memory_(memory) {
    if (!copies()) return;
    for (int slot = 0; slot < shape.slots; ++slot) filled[slot].init();
    CopyBarrier::order_inits();
  }
  __device__ __forceinline__ void start() {
    if (!copies()) return;
    for (int slot = 0; slot < shape_.slots; ++slot) fill(slot, tile_ + slot * int64_t{gridDim.x});
  }

  // Of the tile at hand: whether there is one; its first row, and how many it has; where it lies,
  // once it is there. What follows the last rows of the tensor in their slot is anything.
  __device__ __forceinline__ bool any() const { return tile_ < tiles_; }
  __device__ __forceinline__ int64_t first_row() const { return tile_ * shape_.rows; }
  __device__ __forceinline__ int rows() const { return rows_of(tile_); }
  __device__ __forceinline__ T* wait() const {
    filled_[slot_].wait(parity_);
    return reinterpret_cast<T*>(at(slot_));
  }

  // By all threads of the block, when each is done with its part of the tile: writes it, and goes
  // on to the next.
  __device__ __forceinline__ void next() {
    CopyBarrier::order_writes();
    __syncthreads();
    const int64_t stride = gridDim.x;
    if (copies()) {
      const int bytes = bytes_of(tile_);
      char* const to = reinterpret_cast<char*>(to_ + first_row() * cols_);
      if (bytes >= kGranule) store_bulk(to, at(slot_), bytes & -kGranule);
      copy_rest(to, at(slot_), bytes);
      commit_bulk_stores();
      // The slot before this one is free when no more than this one's copy is under way.
      wait_for_bulk_reads<1>();
      if (tile_ != blockIdx.x)
        fill(slot_ > 0 ? slot_ - 1 : shape_.slots - 1, tile_ + (shape_.slots - 1) * stride);
    }
    tile_ += stride;
    if (++slot_ == shape_.slots) {
      slot_ = 0;
      parity_ ^= 1;
    }
  }
  __device__ __forceinline__ void finish() const {
    if (copies()) wait_for_bulk_reads<0>();
  }

 private:
  static constexpr int kGranule = 16;
  __device__ __forceinline__ static bool copies() { return threadIdx.x + threadIdx.y == 0; }
  __device__ __forceinline__ char* at(int slot) const { return memory_ + slot * shape_.slot_bytes; }
  __device__ __forceinline__ int rows_of(int64_t tile) const {
    return static_cast<int>(min(int64_t{shape_.rows}, rows_ - tile * shape_.rows));
  }
  __device__ __forceinline__ int bytes_of(int64_t tile) const {
    return rows_of(tile) * cols_ * static_cast<int>(sizeof(T));
  }

  __device__ __forceinline__ void fill(int slot, int64_t tile) {
    if (tile >= tiles_) return;
    const int bytes = bytes_of(tile);
    const char* const from = reinterpret_cast<const char*>(from_ + tile * shape_.rows * cols_);
    copy_rest(at(slot), from, bytes);
    filled_[slot].expect(bytes & -kGranule);
    if (bytes >= kGranule) filled_[slot].copy(at(slot), from, bytes & -kGranule);
  }
  __device__ __forceinline__ static void copy_rest(char* to, const char* from, int bytes) {
#pragma unroll 1
    for (int i = bytes & -kGranule; i < bytes; i += sizeof(T))
      *reinterpret_cast<T*>(to + i) = *reinterpret_cast<const T*>(from + i);
  }

  const T* from_;
  T* to_;
  int64_t rows_, tiles_, tile_;
  int cols_;
  const Shape& shape_;
  CopyBarrier* filled_;
  char* memory_;
  int slot_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace fused_norm
