// Column parameters that a thread reads but once.
#pragma once

#include "core/common/pack.cuh"
#include "core/common/row_columns.cuh"

namespace fused_norm {

// The parameters of a pack's columns, on their way: a thread asks for all that it needs before it
// waits for any. Of columns from `col` on, dealt out among so many lanes; kBias: of the bias too.
template <typename A, int N, bool kBias, RowsLie kLie>
class AskedParams {
 public:
  AskedParams() = default;
  template <typename In>
  __device__ __forceinline__ AskedParams(const In& in, int col, int lanes = kWarpSize) {
    ask(in.weight, col, in.cols, lanes, weight_);
    if (kBias) ask(in.bias, col, in.cols, lanes, bias_);
  }
  // Gives weight + offset, and the bias. Past the row's end those dealt out are zeros, others
  // anything.
  template <typename In>
  __device__ __forceinline__ void take(const In& in, int col, int lanes, A (&weights)[N],
                                       A (&biases)[N]) const {
    take(in.weight, weight_, A(1), weights);
    take(kBias ? in.bias : ParamVector{}, bias_, A(0), biases);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (in.weight.data) weights[i] += static_cast<A>(in.weight_offset);
      if (dealt_out(kLie) && col + column_in_pack(kLie, N, i, lanes) >= in.cols)
        weights[i] = biases[i] = A(0);
    }
  }

 private:
  // As they lie in memory: what an access brings starts in the word of its first column.
  using Word = std::conditional_t<std::is_same_v<A, double>, uint64_t, uint32_t>;
  using Words = Word[N];
  template <typename T>
  static constexpr int kAccess = dealt_out(kLie)      ? 1
                                 : sizeof(T) * N > 16 ? 16 / sizeof(T)
                                                      : N;

  __device__ static void ask(const ParamVector& params, int col, int cols, int lanes,
                             Words& words) {
    if (params.data == nullptr) return;
    with_param_type<A>(params.dtype, [&](auto type) {
      using T = decltype(type);
      constexpr int kBytes = kAccess<T> * sizeof(T);
      constexpr int kWords = (kBytes + sizeof(Word) - 1) / sizeof(Word);
#pragma unroll
      for (int i = 0; i < N; i += kAccess<T>) {
        const int at = min(col + column_in_pack(kLie, N, i, lanes), cols - kAccess<T>);
        const auto loaded = load_words<kBytes>(static_cast<const T*>(params.data) + at);
        Word whole[kWords] = {};
        memcpy(whole, &loaded, kBytes);
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[i + w] = whole[w];
      }
    });
  }
  __device__ static void take(const ParamVector& params, const Words& words, A absent,
                              A (&out)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = absent;
    if (params.data == nullptr) return;
    with_param_type<A>(params.dtype, [&](auto type) {
      using T = decltype(type);
#pragma unroll
      for (int i = 0; i < N; i += kAccess<T>) {
        Pack<T, kAccess<T>> pack;
        memcpy(&pack, words + i, sizeof(pack));
        Accumulator<T> values[kAccess<T>];
        unpack(pack, values);
#pragma unroll
        for (int e = 0; e < kAccess<T>; ++e) out[i + e] = static_cast<A>(values[e]);
      }
    });
  }

  Words weight_, bias_;
};

}  // namespace fused_norm
