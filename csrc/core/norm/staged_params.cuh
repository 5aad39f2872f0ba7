// Column parameters in shared memory, for backward kernels whose threads keep their columns.
#pragma once

#include "core/norm/backward_input.cuh"

namespace fused_norm {

// What forward kept: the input or the output.
enum class Saved { kInput, kOutput };

// The column parameters of a thread in shared memory, as fp32; each thread has its own. Of a warp's
// part, lane l finds 4 columns of pack p at float4 index [kind][p][quarter][l], so that a warp's
// accesses are consecutive and free of bank conflicts. RMSNorm's kernels have no shift.
enum ParamKind { kWeight, kScale, kShift };
constexpr int param_kinds(Saved saved, bool shifts = true) {
  return saved == Saved::kInput ? 1 : shifts ? 3 : 2;
}

template <int kPacks, int N, Saved kSaved, bool kShifts = true>
class StagedParams {
 public:
  // `staged`: room for whole warps.
  __device__ StagedParams(float* staged, int thread)
      : own_(reinterpret_cast<float4*>(staged) + thread / kWarpSize * kWarpVectors +
             thread % kWarpSize) {}

  // Those of pack p, from column `col` on.
  template <RowsLie kLie = RowsLie::kRegular, typename In>
  __device__ void stage(const In& in, int p, int col) const {
    const auto params =
        ColumnParams<float, N>::template load<kSaved != Saved::kInput, false, kLie>(in, col);
    put(kWeight, p, params.weight);
    if (kSaved == Saved::kInput) return;
    put(kScale, p, params.scale);
    if (kShifts) put(kShift, p, params.shift);
  }

  __device__ __forceinline__ void get(ParamKind kind, int p, float (&out)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) memcpy(out + 4 * q, &at(kind, p, q), sizeof(float4));
  }

  // xhat of a pack of the output.
  __device__ __forceinline__ void take_back(int p, float (&y)[N]) const {
    float param[N];
    if (kShifts) {
      get(kShift, p, param);
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] -= param[i];
    }
    get(kScale, p, param);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] *= param[i];
  }

  // From here on xhat of a column is zero, the col-th of those that threads staged from `staged`
  // on.
  template <RowsLie kLie>
  __device__ static void clear_scale(float* staged, int col) {
    constexpr int kUnit = unit_of(kLie, N), kPackCols = N * kWarpSize;
    const int in_pack = col % kPackCols, pack = col / kPackCols;
    const int lane = in_pack / kUnit % kWarpSize;
    const int i = in_pack / (kUnit * kWarpSize) * kUnit + in_pack % kUnit;
    float4* const vectors = reinterpret_cast<float4*>(staged) + pack / kPacks * kWarpVectors + lane;
    float* const four = &vectors[index(kScale, pack % kPacks, i / 4)].x;
    four[i % 4] = 0;
  }

 private:
  static constexpr int kWarpVectors = param_kinds(kSaved, kShifts) * kPacks * N / 4 * kWarpSize;

  __device__ void put(ParamKind kind, int p, const float (&values)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) memcpy(&at(kind, p, q), values + 4 * q, sizeof(float4));
  }
  __device__ __forceinline__ static constexpr int index(int kind, int p, int q) {
    return ((kind * kPacks + p) * (N / 4) + q) * kWarpSize;
  }
  __device__ __forceinline__ float4& at(ParamKind kind, int p, int q) const {
    return own_[index(kind, p, q)];
  }

  float4* own_;
};

}  // namespace fused_norm
