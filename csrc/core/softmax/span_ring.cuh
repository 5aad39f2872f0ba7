// Long rows on their way through shared memory. Each warp has a span of the row's columns, which
// comes by bulk copies in pieces, some packs a lane, of which the last may be smaller; a ring of
// slots holds the pieces of a row, and as many of the next one as there is room for.
#pragma once

#include "core/common/bulk_copy.cuh"
#include "core/common/types.h"
#include "core/softmax/plan.h"
#include "core/softmax/policies.cuh"

namespace fused_norm {

// One tensor or two of the same shape, by reference: kernel parameters take no registers.
template <typename T>
struct SpanTensors {
  const Rows<T>&first, &last;
  __device__ __forceinline__ const Rows<T>& at(int t) const { return t == 0 ? first : last; }
};

// A warp's ring, of tensors with the same columns. A span starts in the first of the granules that
// are copied, and what it shares with the next one, up to N - 1 columns and the rest of their
// granule, comes as an edge after its last piece.
template <typename T, int kTensors, bool kRegular>
class SpanRing {
  static constexpr int N = kGranule / sizeof(T);
  static constexpr int kPieceGranules = span_piece_packs(kTensors) * kWarpSize;
  static constexpr int kPieceBytes = kPieceGranules * kGranule;
  static_assert(kTensors * kPieceBytes == kSpanSlotBytes);

 public:
  static constexpr int kPiecePacks = span_piece_packs(kTensors), kPieceCols = kPieceGranules * N;

  // `memory` is the warp's own, span_ring_bytes(kTensors, pieces, slots). The spans are `span_cols`
  // columns, at most, from `first_col` on, of every `stride`-th row from `first_row` on. Whole
  // warps construct theirs; a barrier of the block follows, and start().
  __device__ SpanRing(char* memory, const SpanTensors<T>& tensors, int first_col, int span_cols,
                      int64_t first_row, int stride, int pieces, int slots)
      : tensors_(tensors),
        memory_(memory),
        edges_(memory + slots * kTensors * kPieceBytes),
        filled_(reinterpret_cast<CopyBarrier*>(edges_ + span_edge_sets(pieces, slots) * kTensors *
                                                            kSpanEdgeBytes)),
        first_col_(first_col),
        span_cols_(span_cols),
        pieces_(pieces),
        slots_(slots),
        stride_(stride),
        row_(first_row) {
    for (int s = lane(); s < slots; s += kWarpSize) filled_[s].init();
    CopyBarrier::order_inits();
  }

  __device__ __forceinline__ void start() {
    open();
#pragma unroll 1
    for (int s = 0; s < slots_; ++s) fill();
  }

  // A piece that has been copied: where its granules are in each tensor's slot, and those that
  // follow.
  struct Piece {
    const char *at[kTensors], *next[kTensors];
  };

  // Piece `number` of row `turn` of these, at `at`; moves on. Waits for it and, where the rows are
  // irregular, for what follows.
  __device__ __forceinline__ Piece wait(int number, int turn, RingSlot& at) const {
    Piece piece;
    filled_[at.number].wait(at.parity);
#pragma unroll
    for (int t = 0; t < kTensors; ++t) piece.at[t] = slot(at.number, t);
    at.next(slots_);
    if constexpr (!kRegular) {
      const bool last = number + 1 == pieces_;
      if (!last) filled_[at.number].wait(at.parity);
#pragma unroll
      for (int t = 0; t < kTensors; ++t) piece.next[t] = last ? edge(turn, t) : slot(at.number, t);
    }
    return piece;
  }

  // By how many bytes the spans of a row miss a granule boundary.
  __device__ __forceinline__ int shift(int t, int64_t row) const {
    if constexpr (kRegular) return 0;
    const T* const start = row_start(tensors_.at(t).data, tensors_.at(t).layout, row);
    return static_cast<int>(reinterpret_cast<uintptr_t>(start) % kGranule);
  }

  // The lane's packs of a piece, of which the first lane's first one starts `offset` bytes into the
  // piece, less than two granules.
  __device__ __forceinline__ static void read(const Piece& piece, int t, int offset,
                                              Pack<T, N> (&packs)[kPiecePacks]) {
    if constexpr (kRegular) {
#pragma unroll
      for (int p = 0; p < kPiecePacks; ++p)
        packs[p].words = load(piece.at[t] + (p * kWarpSize + lane()) * kGranule);
    } else {
      const int first = lane() + offset / kGranule, rest = offset % kGranule;
#pragma unroll
      for (int p = 0; p < kPiecePacks; ++p)
        packs[p].words = load(granule(piece, t, first + p * kWarpSize));
      if (rest == 0) return;
#pragma unroll
      for (int p = 0; p < kPiecePacks; ++p) {
        const Words<kGranule> high = load(granule(piece, t, first + p * kWarpSize + 1));
        packs[p].words = shifted_bytes<kGranule>(packs[p].words, high, rest);
      }
    }
  }

  // One element of the row, `index` past the start of a piece whose rows have this shift; both
  // within its first two granules.
  __device__ __forceinline__ static Pack<T, 1> read_element(const Piece& piece, int t, int shift,
                                                            int index) {
    return bit_copy<Pack<T, 1>>(
        *reinterpret_cast<const Bits<T>*>(piece.at[t] + shift + index * sizeof(T)));
  }

  // The lane is done with the oldest piece, which makes room for another. All lanes of the warp.
  __device__ __forceinline__ void release() {
    __syncwarp();
    fill();
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpSize; }
  __device__ __forceinline__ char* slot(int s, int t) const {
    return memory_ + (kTensors * s + t) * kPieceBytes;
  }
  // The row of turn `turn` and the one after, if that has pieces here too, have edges of their own.
  __device__ __forceinline__ char* edge(int turn, int t) const {
    const int set = span_edge_sets(pieces_, slots_) > 1 ? turn & 1 : 0;
    return edges_ + (kTensors * set + t) * kSpanEdgeBytes;
  }
  __device__ __forceinline__ static const char* granule(const Piece& piece, int t, int number) {
    return number < kPieceGranules ? piece.at[t] + number * kGranule
                                   : piece.next[t] + (number - kPieceGranules) * kGranule;
  }
  __device__ __forceinline__ static Words<kGranule> load(const char* at) {
    return bit_copy<Words<kGranule>>(*reinterpret_cast<const uint4*>(at));
  }

  // What is copied of a row of one tensor: whole granules, and then `rest` bytes of one that would
  // reach past the tensor's end.
  struct Source {
    const char* from;
    int bytes, rest;
  };

  // Finds what there is to copy of the next row.
  __device__ __forceinline__ void open() {
    if (row_ >= tensors_.first.rows || lane() != 0) return;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      const Rows<T>& tensor = tensors_.at(t);
      const int most = span_cols_ + (kRegular ? 0 : N - 1);
      const int used = max(0, min(tensor.cols - first_col_, most)) * static_cast<int>(sizeof(T));
      const T* const start = row_start(tensor.data, tensor.layout, row_) + first_col_;
      Source& source = sources_[t];
      const int shift =
          kRegular ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(start) % kGranule);
      source = {reinterpret_cast<const char*>(start) - shift,
                used == 0 ? 0 : (shift + used + kGranule - 1) / kGranule * kGranule, 0};
      if constexpr (!kRegular) {
        const T* const end = row_start(tensor.data, tensor.layout, tensor.rows - 1) + tensor.cols;
        if (used > 0 && source.from + source.bytes > reinterpret_cast<const char*>(end)) {
          source.bytes -= kGranule;
          source.rest = shift + used - source.bytes;
        }
      }
    }
  }

  // Starts the copies of the next piece, if there is one, to the oldest slot.
  __device__ __forceinline__ void fill() {
    if (row_ >= tensors_.first.rows) return;
    const bool last = piece_ + 1 == pieces_;
    if (lane() == 0) {
      CopyBarrier& filled = filled_[slot_];
      const int at = piece_ * kPieceBytes, end = pieces_ * kPieceBytes;
      int bytes[kTensors], edge_bytes[kTensors], expected = 0;
#pragma unroll
      for (int t = 0; t < kTensors; ++t) {
        const Source& source = sources_[t];
        bytes[t] = max(0, min(source.bytes - at, kPieceBytes));
        edge_bytes[t] = !kRegular && last ? max(0, source.bytes - end) : 0;
        if (!kRegular && source.rest > 0 && source.bytes >= at &&
            (last || source.bytes < at + kPieceBytes)) {
          char* const to = source.bytes < end ? slot(slot_, t) + (source.bytes - at)
                                              : edge(turn_, t) + (source.bytes - end);
          copy_rest<T>(to, source.from + source.bytes, 0, source.rest);
          CopyBarrier::order_writes();
        }
        expected += bytes[t] + edge_bytes[t];
      }
      filled.expect(expected);
#pragma unroll
      for (int t = 0; t < kTensors; ++t) {
        if (bytes[t] > 0) filled.copy(slot(slot_, t), sources_[t].from + at, bytes[t]);
        if (edge_bytes[t] > 0) filled.copy(edge(turn_, t), sources_[t].from + end, edge_bytes[t]);
      }
    }
    if (++slot_ == slots_) slot_ = 0;
    ++piece_;
    if (last) {
      piece_ = 0;
      ++turn_;
      row_ += stride_;
      open();
    }
  }

  const SpanTensors<T> tensors_;
  char *const memory_, *const edges_;
  CopyBarrier* const filled_;
  const int first_col_, span_cols_, pieces_, slots_, stride_;

  // The next piece to copy. `sources_` is lane 0's.
  int64_t row_;
  int turn_ = 0, piece_ = 0, slot_ = 0;
  Source sources_[kTensors];
};

}  // namespace fused_norm
