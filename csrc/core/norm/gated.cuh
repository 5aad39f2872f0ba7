// The policies of gated RMSNorm (struct Gate in norm.h): how forward and backward kernels read a
// gate beside the input. All is fp32 within, and rounded once.
#pragma once

#include "core/norm/backward_rows.cuh"
#include "core/norm/norm.h"

namespace fused_norm {

// For 16-bit gates exp as the hardware has it suffices.
template <typename T>
__device__ __forceinline__ float sigmoid(float z) {
  if constexpr (sizeof(T) == 2) return __fdividef(1.0f, 1.0f + __expf(-z));
  return 1.0f / (1.0f + expf(-z));
}

// Multiplies the values of a pack by act(gate).
template <typename T, int N>
__device__ __forceinline__ void apply_gate(GateForm form, const Pack<T, N>& gate,
                                           float (&values)[N]) {
  float z[N];
  unpack(gate, z);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] *= sigmoid<T>(z[i]) * (form.silu ? z[i] : 1.0f);
}

// Rows of x and of the gate: one more tensor read, and the registers of a second row in flight.
template <typename X>
struct GatedLoad {
  using Input = float;  // x * act(gate) is not rounded before it is normalized
  static constexpr bool kAdds = true, kGates = true;
  InputLoad<X> x, gate;
  GateForm form;
  int64_t rows;
  int cols;

  // Where a row's parameters start.
  __device__ int first_param(int64_t row) const { return form.group_of(row) * cols; }

  template <int N, RowsLie kLie, int kPacks>
  class Slice {
   public:
    __device__ Slice(const GatedLoad& load, int64_t row, int col)
        : form_(load.form), x_(load.x, row, col), gate_(load.gate, row, col) {}

    template <typename Group>
    __device__ __forceinline__ void fetch(const Group& group) {
      x_.fetch(group);
      gate_.fetch(group);
    }
    template <typename Group, typename Put>
    __device__ __forceinline__ void extract(const Group& group, Put put) {
      gate_.extract(group, [&](int p, const Pack<X, N>& pack) { gates_[p] = pack; });
      x_.extract(group, [&](int p, const Pack<X, N>& pack) {
        float values[N];
        unpack(pack, values);
        if (!form_.norm_first) apply_gate(form_, gates_[p], values);
        Pack<float, N> exact;
        round_to(exact, values);
        put(p, exact);
      });
    }
    // Of what is normalized makes what the weight multiplies.
    __device__ __forceinline__ void finish(int p, float (&xhat)[N]) const {
      if (form_.norm_first) apply_gate(form_, gates_[p], xhat);
    }

   private:
    GateForm form_;
    typename InputLoad<X>::template Slice<N, kLie, kPacks> x_, gate_;
    Pack<X, N> gates_[kPacks];
  };
};

template <typename X>
struct GatedInput : BackwardInput<X, X, float> {
  static constexpr bool kGates = true;
  const X* gate;
  RowLayout gate_layout;
  X* dgate;
  GateForm form;
};

// Each thread copies its own packs of the next row of x, dy and the gate to shared memory, where
// they stay until the one after is asked for; regular rows.
template <typename X, int N, int kPacks, typename Group>
class GatedRows : public SliceQueue<N, kPacks, Group, X, X, X> {
 public:
  // `memory`: of the block, 2 * 3 * kPacks packs for each thread.
  __device__ GatedRows(const GatedInput<X>& in, const Group& group, int col, int64_t row,
                       int64_t stride, char* memory)
      : SliceQueue<N, kPacks, Group, X, X, X>(
            group, memory, in.rows, stride, in.cols - col,
            {in.saved, in.saved_layout, min(row, in.rows - 1), stride, col},
            {in.dy, in.dy_layout, min(row, in.rows - 1), stride, col},
            {in.gate, in.gate_layout, min(row, in.rows - 1), stride, col}),
        in_(in) {}

  // Gives what is normalized, and the gradient of what comes of that. Asks for the next row.
  __device__ __forceinline__ void take(int64_t row, float (&x)[kPacks][N], float (&dy)[kPacks][N]) {
    this->turn_to(row);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      unpack(this->template pack<kX>(p), x[p]);
      unpack(this->template pack<kDy>(p), dy[p]);
      const Pack<X, N> gate = this->template pack<kGate>(p);
      in_.form.norm_first ? apply_gate(in_.form, gate, dy[p]) : apply_gate(in_.form, gate, x[p]);
    }
  }

  // Of the gradient of what is normalized makes that of x, and writes the gate's, from element `to`
  // on: dy * xhat * weight * act'(gate), or x * gradient * act'(gate).
  __device__ __forceinline__ void finish(int p, int64_t to, const float (&weight)[N],
                                         const float (&xhat)[N], float (&gradient)[N]) const {
    const GateForm form = in_.form;
    float z[N], other[N];
    unpack(this->template pack<kGate>(p), z);
    unpack(form.norm_first ? this->template pack<kDy>(p) : this->template pack<kX>(p), other);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = sigmoid<X>(z[i]);
      const float slope = s * (form.silu ? fmaf(z[i], 1.0f - s, 1.0f) : 1.0f - s);
      const float of_act = other[i] * (form.norm_first ? xhat[i] * weight[i] : gradient[i]);
      if (!form.norm_first) gradient[i] *= form.silu ? z[i] * s : s;
      z[i] = of_act * slope;
    }
    Pack<X, N> pack;
    round_to(pack, z);
    store_streamed<sizeof(X) * N>(in_.dgate + to, pack.words);
  }

 private:
  enum { kX, kDy, kGate };
  const GatedInput<X>& in_;
};

}  // namespace fused_norm
