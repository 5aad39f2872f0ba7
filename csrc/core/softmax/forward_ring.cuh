// Forward of rows that pass through shared memory (spans.cuh).
#pragma once

#include "core/softmax/forward.cuh"
#include "core/softmax/spans.cuh"

namespace fused_norm {

template <typename X, bool kLog>
struct ExponentialSpans {
  using Element = X;
  using Sum = ExpSum<float>;
  static constexpr int kTensors = 1, kSummed = 1, N = kGranule / sizeof(X);
  static constexpr Filler kFiller = Filler::kLowest;
  struct Combine {
    __device__ Sum operator()(const Sum& a, const Sum& b) const { return Sum::merge(a, b); }
  };

  const PlainLoad<X>& load;

  __device__ SpanTensors<X> tensors() const { return {load.x, load.x}; }

  class Part {
   public:
    // (Milakov and Gimelshein, 2018)
    template <int kPacks>
    __device__ __forceinline__ void add(const Pack<X, N> (&packs)[kTensors][kPacks]) {
      const float before = sum_.max;
      sum_.max = larger_of(before, max_of_packs<float>(packs[0]));
      const float shift = shift_of(sum_.max);
      float elements[N];
      exp_sums<kPacks>(packs[0], shift, elements);
      sum_.sum = fma(sum_.sum, exp_of(before - shift), sum_of(elements));
    }
    __device__ __forceinline__ Sum sum() const { return sum_; }

   private:
    Sum sum_ = Sum::empty();
  };

  struct Results {
    float shift;
    Finish<kLog, float> finish;
    template <int kWidth, int kPacks>
    __device__ __forceinline__ void operator()(const Pack<X, kWidth> (&packs)[kTensors][kPacks],
                                               int p, float (&y)[kWidth]) const {
      outputs_of(packs[0][p], shift, finish, y);
    }
  };
  __device__ Results results_of(const Sum& row) const {
    return {shift_of(row.max), Finish<kLog, float>(row, row.max)};
  }
};

template <typename X, typename Y>
__global__ void __launch_bounds__(kMaxSpanWarps* kWarpSize, 1)
    softmax_forward_ring(const __grid_constant__ PlainLoad<X> load,
                         const __grid_constant__ RoundedStore<Y> store, bool regular, bool log,
                         int span_cols, int pieces, int slots) {
#if __CUDA_ARCH__ >= 900
  __shared__ SpanSums<ExpSum<float>>::Slots sum_slots;
  with_form<true>(regular, log, [&](auto is_regular, auto is_log) {
    walk_spans<decltype(is_regular)::value>(ExponentialSpans<X, decltype(is_log)::value>{load},
                                            store, span_cols, pieces, slots, sum_slots);
  });
#else
  __trap();  // no plan asks for it
#endif
}

}  // namespace fused_norm
