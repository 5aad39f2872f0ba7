// Slices of the next rows, on their way through shared memory: each thread copies its own packs
// there (cp.async) and takes them out itself, so that nobody waits for anybody, and what is under
// way takes no registers.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <cuda/std/tuple>

#include "core/common/row_slice.cuh"

namespace fused_norm {

// The row at hand and the next, `stride` rows on, of several tensors; regular rows only.
template <int N, int kPacks, typename Group, typename... T>
class SliceQueue {
 public:
  // `at` is where the first row starts, from the thread's first column on, of which `left` remain
  // to the row's end. `memory`: of the block, two rows' packs of each thread.
  __device__ SliceQueue(const Group& group, char* memory, int64_t rows, int64_t stride, int left,
                        const RowCursor<const T>&... at)
      : group_(group),
        rows_(rows),
        stride_(stride),
        left_(left),
        tensors_{Tensor<T>(at, memory, group)...} {}

  // Asks for a row; for none if it is past the end.
  __device__ __forceinline__ void ask_for_first(int64_t row) {
    const int left = row < rows_ ? left_ : 0, step = slice_step<N>(group_);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (p * step >= left) break;
      for_each([&](auto& tensor) {
        auto* const to = tensor.slot(turn_ ^ 1, p);
        // (16 bytes go past the first-level cache, where they would have a place while under way.)
        __pipeline_memcpy_async(to, tensor.at.at() + p * step, sizeof(*to));
      });
    }
    commit_copies();
  }

 protected:
  // Asks for the row after `row`, which is next at hand, and waits for that.
  __device__ __forceinline__ void turn_to(int64_t row) {
    const int64_t next = row + stride_;
    if (next < rows_) for_each([&](auto& tensor) { tensor.at.step(next); });
    turn_ ^= 1;
    ask_for_first(next);
    wait_for_copies<1>();
  }
  // Pack p of the row at hand, of the k-th tensor. Packs past the row's end are anything.
  template <int k>
  __device__ __forceinline__ const auto& pack(int p) const {
    return cuda::std::get<k>(tensors_).slot(turn_, p)->pack;
  }

 private:
  template <typename U>
  struct Tensor {
    __device__ Tensor(const RowCursor<const U>& from, char*& memory, const Group& group)
        : at(from),
          own(reinterpret_cast<AlignedPack<U, N>*>(memory) + group.index() * group.threads() +
              group.thread()),
          threads(group.groups() * group.threads()) {
      memory += 2 * kPacks * static_cast<int>(sizeof(*own)) * threads;
    }
    __device__ __forceinline__ AlignedPack<U, N>* slot(int turn, int p) const {
      return own + (turn * kPacks + p) * threads;
    }
    RowCursor<const U> at;
    AlignedPack<U, N>* own;
    int threads;
  };
  template <typename Run>
  __device__ __forceinline__ void for_each(Run run) {
    cuda::std::apply([&](auto&... tensor) { (run(tensor), ...); }, tensors_);
  }

  const Group& group_;
  int64_t rows_, stride_;
  int left_, turn_ = 1;  // of the row at hand
  cuda::std::tuple<Tensor<T>...> tensors_;
};

}  // namespace fused_norm
