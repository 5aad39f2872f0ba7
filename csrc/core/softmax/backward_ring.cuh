// Backward of rows that pass through shared memory (spans.cuh).
#pragma once

#include "core/softmax/backward.cuh"
#include "core/softmax/spans.cuh"

namespace fused_norm {

template <typename Y, bool kLog>
struct GradientSpans {
  using Element = Y;
  using Sum = float;
  using Combine = SumOf;
  static constexpr int kTensors = 2, kSummed = kLog ? 1 : 2, N = kGranule / sizeof(Y);
  static constexpr Filler kFiller = Filler::kZero;

  const GradientLoad<Y>& load;

  __device__ SpanTensors<Y> tensors() const { return {load.dy, load.y}; }

  class Part {
   public:
    template <int kPacks>
    __device__ __forceinline__ void add(const Pack<Y, N> (&packs)[kTensors][kPacks]) {
      float added[N];
      gradient_sums<kLog>(packs[0], packs[1], added);
#pragma unroll
      for (int i = 0; i < N; ++i) elements_[i] += added[i];
    }
    __device__ __forceinline__ float sum() const { return sum_of(elements_); }

   private:
    float elements_[N] = {};
  };

  struct Results {
    float sum, scale;
    template <int kWidth, int kPacks>
    __device__ __forceinline__ void operator()(const Pack<Y, kWidth> (&packs)[kTensors][kPacks],
                                               int p, float (&dx)[kWidth]) const {
      gradient<kLog>(packs[0][p], packs[1][p], sum, scale, dx);
    }
  };
  __device__ Results results_of(float sum) const { return {sum, load.scale}; }
};

template <typename Y, typename X>
__global__ void __launch_bounds__(kMaxSpanWarps* kWarpSize, 1)
    softmax_backward_ring(const __grid_constant__ GradientLoad<Y> load,
                          const __grid_constant__ RoundedStore<X> store, bool regular, bool log,
                          int span_cols, int pieces, int slots) {
#if __CUDA_ARCH__ >= 900
  __shared__ SpanSums<float>::Slots sum_slots;
  with_form<true>(regular, log, [&](auto is_regular, auto is_log) {
    walk_spans<decltype(is_regular)::value>(GradientSpans<Y, decltype(is_log)::value>{load}, store,
                                            span_cols, pieces, slots, sum_slots);
  });
#else
  __trap();  // no plan asks for it
#endif
}

}  // namespace fused_norm
