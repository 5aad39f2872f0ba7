// Slices of the next rows, on their way through shared memory: each thread copies its own packs
// there (cp.async) and takes them out itself, so that nobody waits for anybody, and what is under
// way takes no registers.
#pragma once

#include "core/common/row_slice.cuh"

namespace fused_norm {

// Rows of two tensors, two at a time. They are put in and taken out in turn; regular rows only.
template <typename T, typename U, int N, int kPacks>
class SliceQueue {
 public:
  // `memory`: slice_queue_bytes() for each thread of the block.
  __device__ SliceQueue(char* memory, int thread, int threads)
      : first_(reinterpret_cast<AlignedPack<T, N>*>(memory) + thread),
        second_(reinterpret_cast<AlignedPack<U, N>*>(
                    memory + 2 * kPacks * N * static_cast<int>(sizeof(T)) * threads) +
                thread),
        threads_(threads) {}

  // Starts copies of the slices at `first` and `second`; `left` columns of the row remain from
  // there on, 0 for no row.
  template <typename Group>
  __device__ __forceinline__ void put(const T* first, const U* second, int left,
                                      const Group& group) {
    const int step = slice_step<N>(group);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * step >= left) break;
      detail::copy_async<sizeof(T) * N>(first_ + place(put_, p), first + p * step);
      detail::copy_async<sizeof(U) * N>(second_ + place(put_, p), second + p * step);
    }
    detail::commit_copies();
    put_ ^= 1;
  }

  // Until all but the row put in last are there. Packs past the row's end are anything.
  __device__ __forceinline__ void wait() const { detail::wait_for_copies<1>(); }
  // Calls put(p, first pack, second pack) for the row next in turn.
  template <typename Put>
  __device__ __forceinline__ void take(Put put) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
      put(p, first_[place(taken_, p)].pack, second_[place(taken_, p)].pack);
    taken_ ^= 1;
  }

 private:
  __device__ __forceinline__ int place(int slot, int p) const {
    return (slot * kPacks + p) * threads_;
  }

  AlignedPack<T, N>* first_;
  AlignedPack<U, N>* second_;
  int threads_, put_ = 0, taken_ = 0;
};

}  // namespace fused_norm
