// Column parameters in shared memory, for backward kernels whose threads keep their columns.
#pragma once

#include "core/norm/backward_input.cuh"

namespace fused_norm {

// The column parameters of a thread in shared memory, as fp32; each thread has its own. Of a warp's
// part, lane l finds 4 columns of pack p at float4 index [kind][p][quarter][l], so that a warp's
// accesses are consecutive and free of bank conflicts.
//
// xhat of an output is y * scale + shift. A listed column has a scale of 0, and the row's xhat for
// a shift (listed_values.cuh). So there are shifts of several rows, in turn.
enum ParamKind { kWeight, kScale, kShift };
constexpr int param_kinds(bool from_output, int turns, ParamKind first = kWeight) {
  return (from_output ? 2 + turns : 1) - first;
}

// kShifts: else, as in RMSNorm's kernels, shifts are 0 where nothing is listed. kTurns: of how many
// rows they are. kFirst: the caller keeps the kinds before it.
template <int kPacks, int N, bool kFromOutput, bool kShifts, int kTurns, ParamKind kFirst = kWeight>
class StagedParams {
 public:
  static constexpr int kRows = kTurns;
  static constexpr int kKinds = param_kinds(kFromOutput, kTurns, kFirst);

  // `staged`: room for whole warps. `thread`: of those that have a row in common, or of the block's
  // where those have parameters of their own.
  __device__ StagedParams(float* staged, int thread) : staged_(staged), own_(own_of(thread)) {}

  // Of so many threads.
  __device__ static constexpr int floats(int threads) {
    return (threads + kWarpSize - 1) / kWarpSize * kWarpFloats * kKinds;
  }

  template <RowsLie kLie>
  using Asked = AskedParams<float, N, kFromOutput, kLie>;

  // Those of pack p, from column `col` on, dealt out among so many lanes.
  template <RowsLie kLie, typename In>
  __device__ void stage(const In& in, const Asked<kLie>& asked, int p, int col,
                        int lanes = kWarpSize) const {
    float weight[N], bias[N];
    asked.take(in, col, lanes, weight, bias);
    put(kFirst, p, weight);
    if constexpr (kFromOutput) {
      put(kBias, p, bias);
      make_scales<kLie>(in, p, p + 1, col, 0, lanes);
    }
  }
  // From the output: makes scales and shifts of packs, from pack p on, whose columns start at `col`
  // and are `step` apart. Weights are where the first kind is, biases are kBias. Without a place of
  // their own, scales take that of the weights. (Four columns at a time: what runs but once must be
  // little code, or the kernel waits for that.)
  static constexpr int kBias = kFirst == kShift ? kShift + 1 : kShift;
  template <RowsLie kLie, typename In>
  __device__ void make_scales(const In& in, int p, int end, int col, int step,
                              int lanes = kWarpSize) const {
#pragma unroll 1
    for (int four = p * (N / 4); four < end * (N / 4); ++four) {
      float4* const own = own_ + four * kWarpSize;
      float g[4], shift[4], scale[4];
      read(own[index(kFirst, 0, 0)], g);
      read(own[index(kBias, 0, 0)], shift);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scale[i] = scale_of(in.list.recoverable, g[i], shift[i]);
        if constexpr (dealt_out(kLie)) {
          const int in_pack = four % (N / 4) * 4 + i;
          if (col + four / (N / 4) * step + column_in_pack(kLie, N, in_pack, lanes) >= in.cols)
            scale[i] = 0;
        }
        if (kFused) shift[i] *= -scale[i];
      }
      own[index(kFirst == kShift ? kShift : kScale, 0, 0)] = {scale[0], scale[1], scale[2],
                                                              scale[3]};
#pragma unroll
      for (int kind = kBias; kind < param_kinds(true, kTurns); ++kind)
        own[index(kind, 0, 0)] = {shift[0], shift[1], shift[2], shift[3]};
    }
  }

  // Those of all packs, from column `col` on. If all groups of the block, whose threads of one
  // number have the same columns, have them in common, they share the packs.
  template <RowsLie kLie, typename In, typename Group>
  __device__ __forceinline__ void stage_all(const In& in, const Group& group, int col,
                                            bool in_common) const {
    const int first = in_common ? group.index() : 0, step = in_common ? group.groups() : 1;
    for (int p = first; p < kPacks; p += step) {
      const int of_pack = col + p * slice_step<N>(group);
      stage<kLie>(in, {in, of_pack, group.lanes()}, p, of_pack, group.lanes());
    }
    __syncthreads();
  }

  __device__ __forceinline__ void get(ParamKind kind, int p, float (&out)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) read(own_[index(kind, p, q)], out + 4 * q);
  }

  __device__ __forceinline__ void put(int kind, int p, const float (&values)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q)
      own_[index(kind, p, q)] = {values[4 * q], values[4 * q + 1], values[4 * q + 2],
                                 values[4 * q + 3]};
  }

  // Makes xhat of a pack of the output, in a row of that turn. lists: whether any column of the
  // block is listed.
  __device__ __forceinline__ void take_back(int p, float (&y)[N], bool lists, int turn) const {
    if (lists) {
      take_back_as<true, true>(p, y, kShift + turn);
    } else {
      take_back_as<kShifts, false>(p, y, kShift);
    }
  }
  // The same where the caller keeps the scales, and any column may be listed.
  __device__ __forceinline__ void take_back(int p, float (&y)[N], const float (&scales)[N],
                                            int turn) const {
    take_back_as<true, !kFused>(p, y, kShift + turn, scales);
  }

  // Where that kind's number of a column is, the col-th of those of threads from first_thread on,
  // so many lanes of each warp; and the number there.
  template <RowsLie kLie>
  __device__ static int find(int kind, int first_thread, int col, unsigned lanes) {
    constexpr unsigned kUnit = unit_of(kLie, N);
    const unsigned in_pack = col % (N * lanes), pack = col / (N * lanes);
    const unsigned lane = in_pack / kUnit % lanes;
    const unsigned i = in_pack / (kUnit * lanes) * kUnit + in_pack % kUnit;
    const int thread = first_thread + static_cast<int>(pack / kPacks * kWarpSize + lane);
    return 4 * (first_of(thread) + index(kind, pack % kPacks, i / 4)) + static_cast<int>(i % 4);
  }
  __device__ __forceinline__ float& at(int place) const { return staged_[place]; }
  // From there to where the next kind's is.
  static constexpr int kNextKind = kPacks * N * kWarpSize;

 private:
  // Of 16-bit rows, packs of 8, xhat is one operation: that y * scale and shift * scale, both up to
  // 2^5 times the limit of xhat's error, are of fp32 loses nothing beside the rounding of y.
  static constexpr bool kFused = N == 8;
  static constexpr int kWarpFloats = kPacks * N * kWarpSize;

  template <bool kAdds, bool kLists>
  __device__ __forceinline__ void take_back_as(int p, float (&y)[N], int shift_kind,
                                               const float* scales = nullptr) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) {  // few registers at a time
      float scale[4], shift[4];
      if constexpr (kFirst <= kScale) {
        read(own_[index(kScale, p, q)], scale);
      } else {
        memcpy(scale, scales + 4 * q, sizeof(scale));
      }
      if (kAdds) read(own_[index(shift_kind, p, q)], shift);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = y[4 * q + i];
        if (kAdds && kFused) {
          value = fmaf(value, scale[i], shift[i]);
        } else {
          value = (kAdds ? value - shift[i] : value) * scale[i];
        }
        if (kLists && scale[i] == 0) value = shift[i];  // whatever y is
      }
    }
  }

  // (Of memcpy() the compiler may not know that it is of 16 bytes on a multiple of 16.)
  __device__ __forceinline__ static void read(const float4& from, float* out) {
    out[0] = from.x, out[1] = from.y, out[2] = from.z, out[3] = from.w;
  }
  __device__ __forceinline__ static constexpr int index(int kind, int p, int q) {
    return (((kind - kFirst) * kPacks + p) * (N / 4) + q) * kWarpSize;
  }
  __device__ __forceinline__ static constexpr int first_of(int thread) {
    return thread / kWarpSize * (kKinds * kWarpFloats / 4) + thread % kWarpSize;
  }
  __device__ __forceinline__ float4* own_of(int thread) const {
    return reinterpret_cast<float4*>(staged_) + first_of(thread);
  }

  float* staged_;
  float4* own_;
};

}  // namespace fused_norm
