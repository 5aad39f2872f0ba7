// Rows on their way through shared memory: a ring of stages, filled by bulk copies.
#pragma once

#include "core/common/bulk_copy.cuh"
#include "core/common/row_access.cuh"
#include "core/common/types.h"
#include "core/norm/plan.h"

namespace fused_norm {

// The part of a tensor's rows that a block works on: `cols` columns, from `base` on in row 0. It
// may be empty in the last blocks of a cluster.
template <typename T>
struct RingTensor {
  const T* base;
  const RowLayout& layout;
  int cols;
  const char* end;  // of the tensor's memory: that of its last row

  // The whole 16-byte granules in which a row's part lies, as far as they lie in the tensor, and
  // where the part starts in them. kWhole: it is whole granules.
  struct Span {
    const char* start;
    int shift, bytes;
  };
  template <bool kWhole>
  __device__ __forceinline__ Span span(int64_t row) const {
    const char* const from = reinterpret_cast<const char*>(row_start(base, layout, row));
    if (kWhole) return {from, 0, used()};
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from) % kGranule);
    int bytes = cols > 0 ? (shift + used() + kGranule - 1) / kGranule * kGranule : 0;
    if (bytes > 0 && from - shift + bytes > end) bytes -= kGranule;
    return {from - shift, shift, bytes};
  }
  // Copies what a span left out of a row, less than 16 bytes at the tensor's end.
  __device__ __forceinline__ void copy_end(const Span& span, char* to) const {
    if (cols == 0 || span.bytes >= span.shift + used()) return;
    copy_rest<T>(to, span.start, span.bytes, span.shift + used());
    CopyBarrier::order_writes();
  }
  __device__ __forceinline__ int used() const { return cols * static_cast<int>(sizeof(T)); }
};

// Of each stage: its barrier, and where in its slots the parts of both rows start.
struct RingStages {
  CopyBarrier filled[kMaxRingStages];
  int shift[kMaxRingStages][2];
};

// A stage that is in use: its number, where in the ring it starts, and the parity of its barrier's
// phase.
struct RingStage {
  int number = 0, at = 0;
  uint32_t parity = 0;
};

// Each stage holds a row of two tensors. One thread fills it, all read it. kWholeT, kWholeU: the
// block's part of a row is whole 16-byte granules of memory.
template <typename T, typename U, bool kWholeT, bool kWholeU>
class RowRing {
 public:
  __device__ RowRing(char* memory, RingStages& stages, const RingTensor<T>& first,
                     const RingTensor<U>& second, int count)
      : memory_(memory),
        stages_(stages),
        first_(first),
        second_(second),
        second_at_(ring_slot(first.used())),
        size_(second_at_ + ring_slot(second.used())),
        count_(count) {}

  __device__ __forceinline__ RingStage after(const RingStage& stage) const {
    if (stage.number + 1 == count_) return {0, 0, stage.parity ^ 1};
    return {stage.number + 1, stage.at + size_, stage.parity};
  }

  // By the thread that fills the stages.
  __device__ __forceinline__ void init() {
    for (int s = 0; s < count_; ++s) stages_.filled[s].init();
    CopyBarrier::order_inits();
  }
  // Likewise. Nobody reads the stage any more.
  __device__ __forceinline__ void fill(const RingStage& stage, int64_t row) {
    CopyBarrier& filled = stages_.filled[stage.number];
    char *const first = memory_ + stage.at, *const second = first + second_at_;
    const auto a = first_.template span<kWholeT>(row);
    const auto b = second_.template span<kWholeU>(row);
    if (!kWholeT) first_.copy_end(a, first);
    if (!kWholeU) second_.copy_end(b, second);
    if (!kWholeT || !kWholeU) {
      stages_.shift[stage.number][0] = a.shift;
      stages_.shift[stage.number][1] = b.shift;
    }
    filled.expect(a.bytes + b.bytes);
    if (a.bytes > 0) filled.copy(first, a.start, a.bytes);
    if (b.bytes > 0) filled.copy(second, b.start, b.bytes);
  }

  // Until the stage is filled.
  __device__ __forceinline__ void wait(const RingStage& stage) const {
    stages_.filled[stage.number].wait(stage.parity);
  }
  // Where the block's columns start in a stage.
  __device__ __forceinline__ const T* first(const RingStage& stage) const {
    const char* const start = memory_ + stage.at;
    return reinterpret_cast<const T*>(start + (kWholeT ? 0 : stages_.shift[stage.number][0]));
  }
  __device__ __forceinline__ const U* second(const RingStage& stage) const {
    const char* const start = memory_ + stage.at + second_at_;
    return reinterpret_cast<const U*>(start + (kWholeU ? 0 : stages_.shift[stage.number][1]));
  }

 private:
  char* memory_;
  RingStages& stages_;
  RingTensor<T> first_;
  RingTensor<U> second_;
  int second_at_, size_;  // of a stage
  int count_;
};

}  // namespace fused_norm
