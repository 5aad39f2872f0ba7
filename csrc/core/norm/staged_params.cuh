// Column parameters in shared memory, for backward kernels whose threads keep their columns.
#pragma once

#include "core/norm/backward_input.cuh"

namespace fused_norm {

// What forward kept: the input or the output.
enum class Saved { kInput, kOutput };

// The column parameters of a thread in shared memory, as fp32; each thread has its own. Of a warp's
// part, lane l finds 4 columns of pack p at float4 index [kind][p][quarter][l], so that a warp's
// accesses are consecutive and free of bank conflicts.
enum ParamKind { kWeight, kScale, kShift };
constexpr int param_kinds(Saved saved, bool shifts = true, bool weights = true) {
  return weights + (saved == Saved::kInput ? 0 : 1 + shifts);
}

// kShifts: not in RMSNorm's kernels, which have no bias. kWeights: not where the caller keeps them.
template <int kPacks, int N, Saved kSaved, bool kShifts = true, bool kWeights = true>
class StagedParams {
 public:
  // `staged`: room for whole warps.
  __device__ StagedParams(float* staged, int thread)
      : own_(reinterpret_cast<float4*>(staged) + thread / kWarpSize * kWarpVectors +
             thread % kWarpSize) {}

  // Of so many threads, whole warps.
  __device__ static constexpr int floats(int threads) {
    return param_kinds(kSaved, kShifts, kWeights) * threads * kPacks * N;
  }

  // Those of pack p, from column `col` on. Returns the parameters as they are.
  template <RowsLie kLie = RowsLie::kRegular, typename In>
  __device__ ColumnParams<float, N> stage(const In& in, int p, int col) const {
    const auto params =
        ColumnParams<float, N>::template load<kSaved != Saved::kInput, false, kLie>(in, col);
    if constexpr (kWeights) put(kWeight, p, params.weight);
    if constexpr (kSaved != Saved::kInput) put(kScale, p, params.scale);
    if constexpr (kSaved != Saved::kInput && kShifts) {
      float shift[N];
#pragma unroll
      for (int i = 0; i < N; ++i)
        shift[i] = kFused ? -params.shift[i] * params.scale[i] : params.shift[i];
      put(kShift, p, shift);
    }
    return params;
  }

  // Those of all packs, from column `col` on, by all groups of the block, whose threads of one
  // number have the same columns.
  template <RowsLie kLie, typename In, typename Group>
  __device__ __forceinline__ void stage_all(const In& in, const Group& group, int col) const {
    for (int p = group.index(); p < kPacks; p += group.groups())
      stage<kLie>(in, p, col + p * kSliceStep<N>);
    __syncthreads();
  }

  __device__ __forceinline__ void get(ParamKind kind, int p, float (&out)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) memcpy(out + 4 * q, &at(kind, p, q), sizeof(float4));
  }

  // xhat of a pack of the output.
  __device__ __forceinline__ void take_back(int p, float (&y)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) {  // few registers at a time
      float scale[4], shift[4];
      memcpy(scale, &at(kScale, p, q), sizeof(float4));
      if (kShifts) memcpy(shift, &at(kShift, p, q), sizeof(float4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = y[4 * q + i];
        if (kShifts && kFused) {
          value = fmaf(value, scale[i], shift[i]);
        } else {
          value = (kShifts ? value - shift[i] : value) * scale[i];
        }
      }
    }
  }

  // The weight of any column, the col-th of those that threads staged from `staged` on.
  template <RowsLie kLie, typename In>
  __device__ static float weight_of(const In& in, float* staged, int first_col, int col) {
    if constexpr (kWeights) return *find<kLie>(staged, kWeight, col - first_col);
    return ColumnAffine<float>{in.weight, in.bias, in.weight_offset}.g(col);
  }
  // From here on its xhat is zero.
  template <RowsLie kLie>
  __device__ static void clear(float* staged, int col) {
    *find<kLie>(staged, kScale, col) = 0;
    if (kShifts) *find<kLie>(staged, kShift, col) = 0;
  }

 private:
  template <RowsLie kLie>
  __device__ static float* find(float* staged, ParamKind kind, int col) {
    constexpr unsigned kUnit = unit_of(kLie, N), kPackCols = N * kWarpSize;
    const unsigned in_pack = col % kPackCols, pack = col / kPackCols;
    const unsigned lane = in_pack / kUnit % kWarpSize;
    const unsigned i = in_pack / (kUnit * kWarpSize) * kUnit + in_pack % kUnit;
    float4* const vectors = reinterpret_cast<float4*>(staged) + pack / kPacks * kWarpVectors + lane;
    return &vectors[index(kind, pack % kPacks, i / 4)].x + i % 4;
  }
  // Of 16-bit rows, packs of 8, xhat is one operation: that y * scale and shift * scale, both up to
  // 2^5 times the limit of xhat's error, are of fp32 loses nothing beside the rounding of y.
  static constexpr bool kFused = N == 8;
  static constexpr int kWarpVectors =
      param_kinds(kSaved, kShifts, kWeights) * kPacks * N / 4 * kWarpSize;

  __device__ void put(ParamKind kind, int p, const float (&values)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) memcpy(&at(kind, p, q), values + 4 * q, sizeof(float4));
  }
  __device__ __forceinline__ static constexpr int index(int kind, int p, int q) {
    return (((kind - !kWeights) * kPacks + p) * (N / 4) + q) * kWarpSize;
  }
  __device__ __forceinline__ float4& at(ParamKind kind, int p, int q) const {
    return own_[index(kind, p, q)];
  }

  float4* own_;
};

}  // namespace fused_norm
