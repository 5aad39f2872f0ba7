// What every tier's backward pass needs first: delta and exponents, and the gradient of the sinks.
#include "core/attention/tiles.cuh"

namespace fused_norm {
namespace {

constexpr int kThreads = 256, kRows = 64;

// The sum of products of kPlainDepth columns of two rows from `col` on, in the plain tier's order.
template <typename A, typename T>
__device__ __forceinline__ A multiply_part(const T* a, const T* b, int col, int cols) {
  const bool aligned = (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) % 16 == 0;
  constexpr int kPack = 16 / sizeof(T);
  A sum = 0;
#pragma unroll
  for (int at = col; at < col + kPlainDepth; at += kPack) {
    alignas(16) T left[kPack] = {}, right[kPack] = {};
    if (aligned && at + kPack <= cols) {
      *reinterpret_cast<uint4*>(left) = *reinterpret_cast<const uint4*>(a + at);
      *reinterpret_cast<uint4*>(right) = *reinterpret_cast<const uint4*>(b + at);
    } else {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if (at + i < cols) left[i] = a[at + i], right[i] = b[at + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      sum = fma(static_cast<A>(left[i]), static_cast<A>(right[i]), sum);
  }
  return sum;
}

// AttentionGradient's delta and exponents. A lane has kPlainDepth columns of a row and `lanes` of
// them, a power of 2, the row. The order of the sum is that of the plain tier's dout . value, so
// that the gradient of a query with one key is zero to the bit.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    attention_delta(const __grid_constant__ AttentionGradient g, int tiles, int parts) {
  const AttentionParams& params = g.params.forward;
  const int cols = params.value_dim, lanes = 1 << (32 - __clz((cols - 1) / kPlainDepth));
  const int lane = threadIdx.x % lanes;
  for_tiles<kRows, false>(params, tiles, parts, [&](const Sequence& s, int head, int query, int) {
    for (int row = query + threadIdx.x / lanes; row < query + kRows; row += kThreads / lanes) {
      A part = 0, sum = 0;
      if (row < s.queries) {
        with_storage<A>(params.dtype, [&](auto t) {
          using T = decltype(t);
          const int at = s.query_begin + row;
          part =
              multiply_part<A>(row_of<T>(g.params.dout, s.batch, head, at),
                               row_of<T>(params.out, s.batch, head, at), lane * kPlainDepth, cols);
        });
      }
      __syncwarp();
      for (int c = 0; c < ceil_div(cols, kPlainDepth); ++c) {
        sum += __shfl_sync(0xffffffffu, part, c, lanes);
      }
      if (lane != 0 || row >= s.queries) continue;
      const int64_t at = first_lse(params, s, head) + row;
      if (g.params.dlse != nullptr) sum -= static_cast<const A*>(g.params.dlse)[at];
      static_cast<A*>(g.delta)[at] = sum;
      const A lse = static_cast<const A*>(params.lse)[at];
      static_cast<A*>(g.exponents)[at] =
          lse == -INFINITY ? INFINITY : lse * static_cast<A>(1.4426950408889634);
    }
  });
}

// dsink = -sum over queries of exp(sink - lse) * delta; a block a head.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    attention_sinks(const __grid_constant__ AttentionGradient g) {
  const AttentionParams& params = g.params.forward;
  const int head = blockIdx.x;
  const A sink = read_sink<A>(params, head);
  // Packed sequences are one for the log-sum-exp.
  const bool packed = params.query_offsets != nullptr;
  const int64_t rows = packed ? params.total_queries : params.queries;
  const int64_t all = packed ? rows : params.batch * rows;
  A sum = 0;
#pragma unroll 4
  for (int64_t row = threadIdx.x; row < all; row += kThreads) {
    const int64_t at = row + (row / rows * (params.heads - 1) + head) * rows;
    const A lse = static_cast<const A*>(params.lse)[at];
    // A query outside every sequence has no delta.
    if (lse != -INFINITY && sink != -INFINITY) {
      sum -= exp(sink - lse) * static_cast<const A*>(g.delta)[at];
    }
  }
  __shared__ A of_thread[kThreads];
  of_thread[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) of_thread[threadIdx.x] += of_thread[threadIdx.x + half];
  }
  if (threadIdx.x == 0) {
    with_option_storage<A>(params.sink_dtype, [&](auto t) {
      using T = decltype(t);
      static_cast<T*>(g.params.dsink)[head] = static_cast<T>(of_thread[0]);
    });
  }
}

}  // namespace

cudaError_t attention_delta_gradient(const AttentionGradient& g, cudaStream_t stream) {
  return with_arithmetic(g.params.forward.dtype, [&](auto a) {
    return launch_tiles(Kernel::kForward, attention_delta<decltype(a)>, g, kRows, 0, 1, kThreads, 0,
                        stream);
  });
}

cudaError_t attention_sink_gradient(const AttentionGradient& g, cudaStream_t stream) {
  const dim3 heads(g.params.forward.heads);
  return with_arithmetic(g.params.forward.dtype, [&](auto a) {
    return detail::launch(attention_sinks<decltype(a)>, heads, dim3(kThreads), {}, stream, g);
  });
}

}  // namespace fused_norm
