// Bulk copies from global to shared memory, from compute capability 9.0 on: one thread asks for a
// whole slice of a row, and no thread's registers wait for it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/common/pack.cuh"

namespace fused_norm {

// A barrier in shared memory that counts the bytes of copies. Each phase: expect() by one thread,
// with copies that sum to as many bytes, then wait() by all.
class CopyBarrier {
 public:
  // By one thread, before a barrier of the block.
  __device__ void init() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address()) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __device__ void expect(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
#endif
  }
  // Both addresses and the size are multiples of 16.
  __device__ void copy(void* shared, const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
        "l"(global), "r"(bytes), "r"(address())
        : "memory");
#endif
  }
  __device__ void wait(int phase) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(address()),
        "r"(phase)
        : "memory");
#endif
  }

 private:
  __device__ uint32_t address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&state_));
  }
  uint64_t state_;
};

// Columns [begin, end) of one row in shared memory, as aligned 16-byte granules: the columns' own
// bytes, and those of neighbours that share the first and last granule. The last granule of the
// last row is not copied where memory may end before it does (see RowReader).
template <typename T, int N, bool kRegular>
class StagedSlice {
  static constexpr int kBytes = sizeof(T) * N;

 public:
  static constexpr int kSlackBytes = 32;  // beyond the slice's own

  __device__ StagedSlice(const T* row, int begin, int end, bool rows_follow)
      : start_(reinterpret_cast<const char*>(row) + begin * static_cast<int64_t>(sizeof(T))),
        bytes_(max(end - begin, 0) * static_cast<int>(sizeof(T))),
        lead_(static_cast<int>(reinterpret_cast<uintptr_t>(start_) % 16)) {
    const int wanted = lead_ + bytes_;
    copied_ = bytes_ == 0 ? 0 : (rows_follow ? wanted + 15 : wanted) / 16 * 16;
  }

  __device__ uint32_t copied() const { return copied_; }
  __device__ void copy(char* buffer, CopyBarrier& barrier) const {
    if (copied_ > 0) barrier.copy(buffer, start_ - lead_, copied_);
  }

  // The packs at slice columns col, col + step, ...; zero past the end.
  template <int kPacks>
  __device__ __forceinline__ void load(const char* buffer, Pack<T, N> (&packs)[kPacks], int col,
                                       int step) const {
    if constexpr (kRegular) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) packs[p].words = granule(buffer, lead_ + offset(col, p, step));
    } else {
      const int shift = lead_ % kBytes;
      detail::with_shift_words<kBytes>(shift, [&](auto words) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          const int at = lead_ - shift + offset(col, p, step);
          packs[p].words = detail::shifted_words<decltype(words)::value>(
              granule(buffer, at), granule(buffer, at + kBytes), shift % 4 * 8);
          keep_first(packs[p], (bytes_ - offset(col, p, step)) / static_cast<int>(sizeof(T)));
        }
      });
    }
  }

 private:
  __device__ static int offset(int col, int p, int step) {
    return (col + p * step) * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ Words<kBytes> granule(const char* buffer, int at) const {
    if (at + kBytes <= copied_) {
      return reinterpret_cast<const AlignedPack<T, N>*>(buffer + at)->pack.words;
    }
    const int left = lead_ + bytes_ - at;
    if (left <= 0) return {};
    return detail::load_elements<T, N>(start_ - lead_ + at,
                                       min(left / static_cast<int>(sizeof(T)), N));
  }

  const char* start_;
  int bytes_, lead_, copied_;
};

}  // namespace fused_norm
