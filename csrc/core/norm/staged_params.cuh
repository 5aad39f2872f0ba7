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

// The shift of a column from the output: RMSNorm's kernels have none, and where weight and bias are
// both of a 16-bit type and nothing is added to the weight, they may share the 32 bits of a weight.
enum class Shifts { kNone, kApart, kPaired };
constexpr int param_kinds(Saved saved, Shifts shifts = Shifts::kApart) {
  return saved == Saved::kInput ? 1 : shifts == Shifts::kApart ? 3 : 2;
}
constexpr Shifts shifts_of(bool rms) { return rms ? Shifts::kNone : Shifts::kApart; }

// P: the type of paired parameters.
template <int kPacks, int N, Saved kSaved, Shifts kShifts = Shifts::kApart, typename P = void>
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
    if constexpr (kSaved == Saved::kOutput && kShifts == Shifts::kPaired) {
      float pairs[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const uint32_t pair = detail::round_pair(params.weight[i], params.shift[i], P());
        pairs[i] = __uint_as_float(pair);
      }
      put(kWeight, p, pairs);
    } else {
      put(kWeight, p, params.weight);
    }
    if (kSaved == Saved::kInput) return;
    put(kScale, p, params.scale);
    if (kShifts == Shifts::kApart) put(kShift, p, params.shift);
  }

  __device__ __forceinline__ void get(ParamKind kind, int p, float (&out)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) memcpy(out + 4 * q, &at(kind, p, q), sizeof(float4));
  }

  // xhat of a pack of the output.
  __device__ __forceinline__ void take_back(int p, float (&y)[N]) const {
    float shift[N];
    if (kShifts == Shifts::kApart) get(kShift, p, shift);
    shift_and_scale(p, shift, y);
  }
  // The same and the pack's weights.
  __device__ __forceinline__ void take_back(int p, float (&y)[N], float (&weight)[N]) const {
    float shift[N];
    get(kWeight, p, weight);
    if constexpr (kShifts == Shifts::kPaired) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float both[2];
        unpack_pair(weight[i], both);
        weight[i] = both[0];
        shift[i] = both[1];
      }
    } else if (kShifts == Shifts::kApart) {
      get(kShift, p, shift);
    }
    shift_and_scale(p, shift, y);
  }

  // The parameters of any column, the col-th of those that threads staged from `staged` on.
  template <RowsLie kLie>
  __device__ static float weight_of(float* staged, int col) {
    const float weight = *find<kLie>(staged, kWeight, col);
    if constexpr (kShifts != Shifts::kPaired) return weight;
    float both[2];
    unpack_pair(weight, both);
    return both[0];
  }
  // From here on its xhat is zero.
  template <RowsLie kLie>
  __device__ static void clear_scale(float* staged, int col) {
    *find<kLie>(staged, kScale, col) = 0;
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
  __device__ __forceinline__ static void unpack_pair(float pair, float (&both)[2]) {
    Pack<P, 2> pack;
    pack.words.at[0] = __float_as_uint(pair);
    unpack(pack, both);
  }

  static constexpr int kWarpVectors = param_kinds(kSaved, kShifts) * kPacks * N / 4 * kWarpSize;

  __device__ __forceinline__ void shift_and_scale(int p, const float (&shift)[N],
                                                  float (&y)[N]) const {
    float scale[N];
    get(kScale, p, scale);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = (kShifts == Shifts::kNone ? y[i] : y[i] - shift[i]) * scale[i];
  }

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
