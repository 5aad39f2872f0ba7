// Column parameters in shared memory, for backward kernels whose threads keep their columns.
#pragma once

#include "core/norm/backward_input.cuh"

namespace fused_norm {

// What forward kept: the input, the output, or that and the list of columns that it does not hold.
enum class Saved { kInput, kOutput, kOutputAndList };

// Calls run(saved) with what was kept in the end: a call with room for listed columns mostly lists
// none, and is then one without.
template <Saved kSaved, typename In, typename Run>
__device__ __forceinline__ void with_saved(const In& in, Run run) {
  if constexpr (kSaved == Saved::kOutputAndList) {
    wait_for_prerequisites();
    if (*in.list.columns == 0) return run(std::integral_constant<Saved, Saved::kOutput>());
  }
  run(std::integral_constant<Saved, kSaved>());
}

// The column parameters of a thread in shared memory, as fp32; each thread has its own. Of a warp's
// part, lane l finds 4 columns of pack p at float4 index [kind][p][quarter][l], so that a warp's
// accesses are consecutive and free of bank conflicts.
enum ParamKind { kWeight, kShift, kScale };
constexpr int param_kinds(Saved saved) { return saved == Saved::kInput ? 1 : 3; }

template <int kPacks, int N, Saved kSaved>
class StagedParams {
 public:
  // `staged`: room for whole warps.
  __device__ StagedParams(float* staged, int thread)
      : own_(reinterpret_cast<float4*>(staged) +
             thread / kWarpSize * (kKinds * kPacks * N / 4 * kWarpSize) + thread % kWarpSize) {}

  // Those of pack p, from column `col` on.
  template <RowsLie kLie = RowsLie::kRegular, typename In>
  __device__ void stage(const In& in, int p, int col) const {
    const auto params =
        ColumnParams<float, N>::template load<kSaved != Saved::kInput,
                                              kSaved == Saved::kOutputAndList, kLie>(in, col);
    put(kWeight, p, params.weight);
    if (kSaved == Saved::kInput) return;
    put(kShift, p, params.shift);
    put(kScale, p, params.scale);
  }

  __device__ __forceinline__ void get(ParamKind kind, int p, float (&out)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) memcpy(out + 4 * q, &at(kind, p, q), sizeof(float4));
  }

  // The listed columns of a thread, a bit for each; pack p from bit p * N on. `left`: columns of
  // the row from this thread's first on.
  template <RowsLie kLie>
  __device__ uint32_t listed(int left) const {
    static_assert(kPacks * N <= 32);
    uint32_t bits = 0;
    for (int p = 0; p < kPacks; ++p) {
      float scale[N];
      get(kScale, p, scale);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const bool inside = p * kSliceStep<N> + column_in_pack(kLie, N, i) < left;
        bits |= static_cast<uint32_t>(inside && scale[i] == 0.0f) << (p * N + i);
      }
    }
    return bits;
  }

  // Puts those of pack p, `bits`, in a row's xhat.
  __device__ __forceinline__ void take_listed(const ListedColumns<float>& list, uint32_t bits,
                                              int p, int64_t row, float (&xhat)[N]) const {
    if (!any_listed(bits, p)) return;
    float place[N];
    get(kShift, p, place);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (bits >> (p * N + i) & 1) xhat[i] = list.xhat(row, static_cast<int>(place[i]));
    }
  }

  // Brings a row's of all packs near: those of a pack follow each other in the list.
  __device__ __forceinline__ void prefetch_listed(const ListedColumns<float>& list, uint32_t bits,
                                                  int64_t row) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (any_listed(bits, p)) list.prefetch(row, first_place(bits, p));
    }
  }

  // Where a thread takes its rows one by one, and a pack's columns follow each other, their listed
  // xhat pass through its own slots of `shift` and `scale`, in turn, which listed columns do not
  // need. Asks for those of a row; `places`: of the first in each pack, from first_places().
  __device__ __forceinline__ void ask_for_listed(const ListedColumns<float>& list, uint32_t bits,
                                                 const int (&places)[kPacks], int64_t row,
                                                 int turn) const {
    if (bits == 0) return;
    const float* const from = list.side + row * list.room;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      int place = places[p];
      for (uint32_t rest = bits >> p * N & ((1u << N) - 1); rest != 0; rest &= rest - 1)
        detail::copy_async<4>(slot(turn, p, __ffs(rest) - 1), from + place++);
    }
  }
  __device__ __forceinline__ void first_places(uint32_t bits, int (&places)[kPacks]) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) places[p] = any_listed(bits, p) ? first_place(bits, p) : 0;
  }
  __device__ __forceinline__ static void wait_for_listed() {
    detail::commit_copies();
    detail::wait_for_copies<0>();
  }
  // Puts what was asked for in xhat, once it is there: wait_for_listed().
  __device__ __forceinline__ void take_asked_for(uint32_t bits, int p, int turn,
                                                 float (&xhat)[N]) const {
    if (!any_listed(bits, p)) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (bits >> (p * N + i) & 1) xhat[i] = *slot(turn, p, i);
    }
  }

  // xhat of a pack of the output.
  __device__ __forceinline__ void take_back(int p, float (&y)[N]) const {
    float param[N];
    get(kShift, p, param);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] -= param[i];
    get(kScale, p, param);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] *= param[i];
  }

 private:
  static constexpr int kKinds = param_kinds(kSaved);

  __device__ __forceinline__ static bool any_listed(uint32_t bits, int p) {
    return (bits >> p * N & ((1u << N) - 1)) != 0;
  }
  __device__ __forceinline__ float* slot(int turn, int p, int i) const {
    return &at(turn % 2 ? kScale : kShift, p, i / 4).x + i % 4;
  }
  __device__ __forceinline__ int first_place(uint32_t bits, int p) const {
    const int first = __ffs(bits >> p * N) - 1;
    return static_cast<int>(*(&at(kShift, p, first / 4).x + first % 4));
  }
  __device__ void put(ParamKind kind, int p, const float (&values)[N]) const {
#pragma unroll
    for (int q = 0; q < N / 4; ++q) memcpy(&at(kind, p, q), values + 4 * q, sizeof(float4));
  }
  __device__ __forceinline__ float4& at(ParamKind kind, int p, int q) const {
    return own_[((kind * kPacks + p) * (N / 4) + q) * kWarpSize];
  }

  float4* own_;
};

}  // namespace fused_norm
