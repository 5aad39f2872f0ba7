// Softmax over another dimension than the last: tensors are [outer, cols, inner], contiguous. A
// thread walks down the columns of N neighbours, `splits` threads share these columns, and
// consecutive threads have consecutive neighbours, so that accesses are coalesced over inner. What
// a thread sums depends on cols and the dtypes alone.

#include "core/common/launch.cuh"
#include "core/common/pack.cuh"
#include "core/common/statistics.cuh"
#include "core/softmax/exp_sum.cuh"
#include "core/softmax/plan.h"
#include "core/softmax/softmax.h"

namespace fused_norm {

struct ColumnsShape {
  int64_t groups;       // of N neighbours: outer * inner / N
  int64_t inner_packs;  // inner / N
  int cols;
};

// A thread's way down its columns, in turns of kItems packs.
template <int N, int kItems>
class ColumnWalk {
 public:
  __device__ explicit ColumnWalk(const ColumnsShape& shape) : inner_(shape.inner_packs * N) {
    const int64_t group = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    cols_ = group < shape.groups ? shape.cols : 0;
    const int64_t outer = group / shape.inner_packs;
    start_ = outer * shape.cols * inner_ + (group - outer * shape.inner_packs) * N;
    turns_ = (shape.cols + turn_cols() - 1) / turn_cols();
  }

  __device__ int turns() const { return turns_; }

  // Columns past the end are left as they are.
  template <typename T>
  __device__ __forceinline__ void load(const T* data, int turn, Pack<T, N> (&packs)[kItems]) const {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!holds(turn, k)) continue;
      packs[k].words = load_words<sizeof(T) * N>(data + start_ + col(turn, k) * inner_);
    }
  }
  template <typename T>
  __device__ __forceinline__ void store(T* data, int turn, int k, const Pack<T, N>& pack) const {
    if (!holds(turn, k)) return;
    store_words<sizeof(T) * N>(data + start_ + col(turn, k) * inner_, pack.words);
  }
  __device__ bool holds(int turn, int k) const { return col(turn, k) < cols_; }

  // Where item k of a turn is kept in shared memory, among one tensor's.
  __device__ int slot(int turn, int k) const {
    return col(turn, k) * static_cast<int>(blockDim.x) + threadIdx.x;
  }
  __device__ int slots() const { return turns_ * turn_cols() * blockDim.x; }

 private:
  __device__ int turn_cols() const { return kItems * blockDim.y; }
  __device__ int col(int turn, int k) const {
    return (turn * kItems + k) * blockDim.y + threadIdx.y;
  }

  int64_t inner_, start_;
  int cols_, turns_;
};

// Combines what the threads of equal threadIdx.x hold. `slots` is shared memory, one for each
// thread of the block and value.
template <typename V, int N, typename Combine>
__device__ __forceinline__ void combine_splits(V (&values)[N], V (*slots)[kColumnThreads],
                                               Combine combine) {
  if (blockDim.y == 1) return;
  const int own = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < N; ++i) slots[i][own] = values[i];
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      slots[i][own] = combine(slots[i][own], slots[i][own + half * blockDim.x]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = slots[i][threadIdx.x];
}

// The columns that fit one turn stay in registers, others in shared memory where the launch gave
// enough of it (cached); else they are read twice.
template <typename X, typename Y, int N>
__global__ void __launch_bounds__(kColumnThreads)
    softmax_columns_forward(const X* x, Y* y, ColumnsShape shape, bool log, bool cached) {
  using A = Accumulator<X>;
  constexpr int kItems = kForwardColumnItems;
  __shared__ ExpSum<A> slots[N][kColumnThreads];
  extern __shared__ __align__(16) char cache_bytes[];
  auto* const cache = reinterpret_cast<AlignedPack<X, N>*>(cache_bytes);

  const ColumnWalk<N, kItems> walk(shape);
  ExpSum<A> sums[N];
  A lost[N] = {};  // what rounding took from the sums (Kahan, 1965): long columns are long chains
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i] = ExpSum<A>::empty();
  Pack<X, N> packs[kItems];
  for (int turn = 0; turn < walk.turns(); ++turn) {
    walk.load(x, turn, packs);
    A tops[N], parts[N] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) tops[i] = sums[i].max;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!walk.holds(turn, k)) continue;
      if (cached) cache[walk.slot(turn, k)] = {packs[k]};
      A values[N];
      unpack(packs[k], values);
#pragma unroll
      for (int i = 0; i < N; ++i) tops[i] = larger_of(tops[i], values[i]);
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!walk.holds(turn, k)) continue;
      A values[N];
      unpack(packs[k], values);
#pragma unroll
      for (int i = 0; i < N; ++i) parts[i] += exp_of(values[i] - shift_of(tops[i]));
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A scale = exp_of(sums[i].max - shift_of(tops[i]));
      const A part = fma(-lost[i], scale, parts[i]);
      const A sum = fma(sums[i].sum, scale, part);
      lost[i] = fma(-sums[i].sum, scale, sum) - part;
      sums[i] = {tops[i], sum};
    }
  }
  combine_splits(sums, slots, ExpSum<A>::merge);

  // y = (x - shift) + offset, or exp(x - shift) * factor.
  A shifts[N], finishes[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    shifts[i] = shift_of(sums[i].max);
    finishes[i] = log ? -log_of(sums[i].sum) : reciprocal(sums[i].sum);
  }
  for (int turn = walk.turns() - 1; turn >= 0; --turn) {
    if (!cached && walk.turns() > 1) walk.load(x, turn, packs);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!walk.holds(turn, k)) continue;
      if (cached) packs[k] = cache[walk.slot(turn, k)].pack;
      A values[N];
      unpack(packs[k], values);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A difference = values[i] - shifts[i];
        values[i] = log ? difference + finishes[i] : exp_of(difference) * finishes[i];
      }
      Pack<Y, N> out;
      round_to(out, values);
      walk.store(y, turn, k, out);
    }
  }
}

template <typename X, typename Y, int N>
__global__ void __launch_bounds__(kColumnThreads)
    softmax_columns_backward(const Y* dy, const Y* y, X* dx, ColumnsShape shape, bool log,
                             bool cached) {
  using A = Accumulator<Y>;
  constexpr int kItems = kBackwardColumnItems;
  __shared__ A slots[N][kColumnThreads];
  extern __shared__ __align__(16) char cache_bytes[];

  const ColumnWalk<N, kItems> walk(shape);
  auto* const dy_cache = reinterpret_cast<AlignedPack<Y, N>*>(cache_bytes);
  auto* const y_cache = dy_cache + walk.slots();
  A sums[N] = {}, group[N] = {};
  Pack<Y, N> dy_packs[kItems], y_packs[kItems];
  for (int turn = 0; turn < walk.turns(); ++turn) {
    walk.load(dy, turn, dy_packs);
    walk.load(y, turn, y_packs);
    A parts[N] = {};
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!walk.holds(turn, k)) continue;
      if (cached) {
        dy_cache[walk.slot(turn, k)] = {dy_packs[k]};
        y_cache[walk.slot(turn, k)] = {y_packs[k]};
      }
      A dy_values[N], y_values[N];
      unpack(dy_packs[k], dy_values);
      unpack(y_packs[k], y_values);
#pragma unroll
      for (int i = 0; i < N; ++i) parts[i] = fma(dy_values[i], log ? A(1) : y_values[i], parts[i]);
    }
    // A long column is summed in two levels, as one chain of thousands of terms would lose digits.
    constexpr int kGroup = 32;
    const bool ends_group = turn % kGroup == kGroup - 1 || turn + 1 == walk.turns();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      group[i] += parts[i];
      if (ends_group) sums[i] += group[i], group[i] = A(0);
    }
  }
  combine_splits(sums, slots, SumOf());

  for (int turn = walk.turns() - 1; turn >= 0; --turn) {
    if (!cached && walk.turns() > 1) {
      walk.load(dy, turn, dy_packs);
      walk.load(y, turn, y_packs);
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!walk.holds(turn, k)) continue;
      if (cached) {
        dy_packs[k] = dy_cache[walk.slot(turn, k)].pack;
        y_packs[k] = y_cache[walk.slot(turn, k)].pack;
      }
      A dy_values[N], y_values[N], dx_values[N];
      unpack(dy_packs[k], dy_values);
      unpack(y_packs[k], y_values);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        dx_values[i] = log ? fma(-exp_of(y_values[i]), sums[i], dy_values[i])
                           : (dy_values[i] - sums[i]) * y_values[i];
      }
      Pack<X, N> out;
      round_to(out, dx_values);
      walk.store(dx, turn, k, out);
    }
  }
}

namespace {

template <typename X, typename Y, int N>
cudaError_t run(const SoftmaxColumnsParams& params, const SoftmaxColumnsPlan& plan,
                const ColumnsShape& shape, cudaStream_t stream) {
  auto start = [&](auto kernel, auto... tensors) {
    return launch(kernel, plan.blocks, dim3(plan.lanes, plan.splits), {plan.shared_bytes}, stream,
                  tensors..., shape, params.log, plan.shared_bytes > 0);
  };
  if (params.backward)
    return start(softmax_columns_backward<X, Y, N>, static_cast<const Y*>(params.read[0]),
                 static_cast<const Y*>(params.read[1]), static_cast<X*>(params.written));
  return start(softmax_columns_forward<X, Y, N>, static_cast<const X*>(params.read[0]),
               static_cast<Y*>(params.written));
}

// Whether packs of all tensors can be read and written as such.
bool has_packs(const SoftmaxColumnsParams& params) {
  const int pack = pack_elements(params.x_dtype, params.y_dtype);
  auto is_aligned = [&](const void* data, bool is_x) {
    const int bytes = pack * size_of(is_x ? params.x_dtype : params.y_dtype);
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
  };
  return params.x_dtype != DType::kFloat64 && params.inner % pack == 0 &&
         is_aligned(params.read[0], !params.backward) &&
         is_aligned(params.read[1], !params.backward) &&
         is_aligned(params.written, params.backward);
}

}  // namespace

cudaError_t launch_softmax_columns(const SoftmaxColumnsParams& params,
                                   const DeviceProperties& device, cudaStream_t stream) {
  const bool vectorized = has_packs(params);
  const SoftmaxColumnsPlan plan =
      plan_softmax_columns(params.backward, vectorized, params.outer, params.cols, params.inner,
                           params.x_dtype, params.y_dtype, device);
  const int64_t inner_packs = params.inner / plan.pack;
  const ColumnsShape shape{params.outer * inner_packs, inner_packs, params.cols};
  if (params.x_dtype == DType::kFloat64) return run<double, double, 1>(params, plan, shape, stream);
  return with_dtype<__half, __nv_bfloat16, float>(params.x_dtype, [&](auto x) {
    using X = decltype(x);
    return with_dtype<X, float>(params.y_dtype, [&](auto y) {
      using Y = decltype(y);
      return vectorized ? run<X, Y, kPackElements<X, Y>>(params, plan, shape, stream)
                        : run<X, Y, 1>(params, plan, shape, stream);
    });
  });
}

}  // namespace fused_norm
