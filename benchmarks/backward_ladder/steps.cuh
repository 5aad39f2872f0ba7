// Five ways to write the backward pass of LayerNorm in fp32, each faster than the one before or
// meant to be. Read from top to bottom. With xhat = (x - mean) * rstd and w = dy * weight:
//   dx = rstd * (w - mean(w) - xhat * mean(w * xhat)), dweight = sum of dy * xhat over the rows,
//   dbias = sum of dy over the rows.
// All five add to dweight and dbias with float atomics, so that these must be zero beforehand, and
// their last bits differ from run to run.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace backward_ladder {

struct Backward {
  int64_t rows;
  int cols;
  const float *x, *dy, *weight, *mean, *rstd;
  float* dx;
  float* dweight;
  float* dbias;  // follows dweight
};

constexpr int kWarp = 32;

// What the steps share: the arithmetic of one element, and of a row's two sums.

struct Element {
  float dy, xhat, w;
};

struct RowSums {
  float w = 0, wx = 0;

  __device__ void add(const Element& e) {
    w += e.w;
    wx += e.w * e.xhat;
  }
  __device__ RowSums mean(int cols) const { return {w / cols, wx / cols}; }
};

// A row of x and of what is saved about it.
struct Row {
  int64_t start;  // of its elements
  float mean, rstd;

  __device__ Row(const Backward& b, int64_t row)
      : start(row * b.cols), mean(__ldg(b.mean + row)), rstd(__ldg(b.rstd + row)) {}

  __device__ Element element(const Backward& b, int col, float dy) const {
    return {dy, (__ldg(b.x + start + col) - mean) * rstd, dy * __ldg(b.weight + col)};
  }
  __device__ Element element(const Backward& b, int col) const {
    return element(b, col, __ldg(b.dy + start + col));
  }
  __device__ void store_dx(const Backward& b, int col, const Element& e,
                           const RowSums& means) const {
    b.dx[start + col] = rstd * (e.w - means.w - e.xhat * means.wx);
  }
};

__device__ inline void add_to_columns(const Backward& b, int col, const Element& e) {
  atomicAdd(b.dweight + col, e.dy * e.xhat);
  atomicAdd(b.dbias + col, e.dy);
}

__device__ inline RowSums sum_over_warp(RowSums sums) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sums.w += __shfl_xor_sync(~0u, sums.w, offset);
    sums.wx += __shfl_xor_sync(~0u, sums.wx, offset);
  }
  return sums;
}

// v1: a thread a row. The CPU's loop, with the rows spread over threads.
//
// Slow for three reasons. Threads of a warp read addresses a whole row apart, so that each of their
// loads is 32 transactions of 32 bytes. They stand at the same column at the same time, so that
// their atomics all want the same word, and wait in line. And 1024 rows are but 1024 threads: four
// blocks, on as many multiprocessors.
__global__ void v1_thread_a_row(Backward b) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= b.rows) return;
  const Row row(b, at);
  RowSums sums;
  for (int col = 0; col < b.cols; ++col) sums.add(row.element(b, col));
  const RowSums means = sums.mean(b.cols);
  for (int col = 0; col < b.cols; ++col) {
    const Element e = row.element(b, col);
    row.store_dx(b, col, e, means);
    add_to_columns(b, col, e);
  }
}

// v2: a warp a row, and a block a warp.
//
// Faster: the lanes of a warp read 32 columns next to each other, in four transactions instead of
// 32, and their atomics go to 32 words. A row's sums take five shuffles. There are 32 times as many
// threads.
// The cost: a multiprocessor holds 32 blocks at most, here half of the warps it could, and a warp
// has 64 turns to take for 2048 columns, of which few are in flight. The second loop reads the row
// again, from a cache.
__global__ void v2_warp_a_row(Backward b) {
  const Row row(b, blockIdx.x);
  RowSums sums;
  for (int col = threadIdx.x; col < b.cols; col += kWarp) sums.add(row.element(b, col));
  const RowSums means = sum_over_warp(sums).mean(b.cols);
  for (int col = threadIdx.x; col < b.cols; col += kWarp) {
    const Element e = row.element(b, col);
    row.store_dx(b, col, e, means);
    add_to_columns(b, col, e);
  }
}

// v3: v2 with dy staged in shared memory, a barrier an iteration.
//
// Meant to be faster: the second loop finds dy on chip. But the caches held it anyway, and a
// barrier keeps the loads of the next iteration from starting early. The cost: a row's worth of
// shared memory for every warp; of long rows fewer are at work at a time.
__global__ void v3_staged(Backward b) {
  extern __shared__ float staged[];
  const Row row(b, blockIdx.x);
  RowSums sums;
  for (int first = 0; first < b.cols; first += kWarp) {
    const int col = first + threadIdx.x;
    if (col < b.cols) staged[col] = __ldg(b.dy + row.start + col);
    __syncthreads();
    if (col < b.cols) sums.add(row.element(b, col, staged[col]));
  }
  const RowSums means = sum_over_warp(sums).mean(b.cols);
  for (int col = threadIdx.x; col < b.cols; col += kWarp) {
    const Element e = row.element(b, col, staged[col]);
    row.store_dx(b, col, e, means);
    add_to_columns(b, col, e);
  }
}

// v4: 1024 threads a row.
//
// Faster: a thread has two columns of 2048 in place of 64, so that a row's loads are in flight all
// at once, and a multiprocessor is full with two rows (32 registers a thread, without spills as
// long as no more than two columns are unrolled). The cost: a row's sums now cross warps, through
// shared memory and a barrier. The atomics are as many as ever, two an element, and have become
// what the kernel waits for.
constexpr int kBlock = 1024;
constexpr int kBlockWarps = kBlock / kWarp;

// The barrier of a call does not protect `slots` from the writes of the next: take two in turn.
__device__ inline RowSums sum_over_block(RowSums sums, RowSums (&slots)[kBlockWarps]) {
  sums = sum_over_warp(sums);
  if (threadIdx.x % kWarp == 0) slots[threadIdx.x / kWarp] = sums;
  __syncthreads();
  return sum_over_warp(slots[threadIdx.x % kWarp]);
}

__global__ void __launch_bounds__(kBlock, 2) v4_block_a_row(Backward b) {
  __shared__ RowSums slots[kBlockWarps];
  const Row row(b, blockIdx.x);
  RowSums sums;
#pragma unroll 2
  for (int col = threadIdx.x; col < b.cols; col += kBlock) sums.add(row.element(b, col));
  const RowSums means = sum_over_block(sums, slots).mean(b.cols);
#pragma unroll 2
  for (int col = threadIdx.x; col < b.cols; col += kBlock) {
    const Element e = row.element(b, col);
    row.store_dx(b, col, e, means);
    add_to_columns(b, col, e);
  }
}

// v5: several rows a block, dweight and dbias summed in registers.
//
// Faster: the grid is what the chip holds at once, and each block walks over rows. A thread has the
// same columns in all of them, so that it adds up their dweight and dbias in registers, and atomics
// come once a block, not once a row. Its elements stay in registers between the two loops: each is
// read once.
// The cost: registers, in proportion to the columns, which are a compile-time bound.
template <int kColumns>
__global__ void __launch_bounds__(kBlock) v5_rows_a_block(Backward b) {
  __shared__ RowSums slots[2][kBlockWarps];
  float dweight[kColumns] = {}, dbias[kColumns] = {};
  int turn = 0;
  for (int64_t at = blockIdx.x; at < b.rows; at += gridDim.x, turn ^= 1) {
    const Row row(b, at);
    Element elements[kColumns];
    RowSums sums;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int col = threadIdx.x + i * kBlock;
      if (col < b.cols) sums.add(elements[i] = row.element(b, col));
    }
    const RowSums means = sum_over_block(sums, slots[turn]).mean(b.cols);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int col = threadIdx.x + i * kBlock;
      if (col >= b.cols) break;
      row.store_dx(b, col, elements[i], means);
      dweight[i] += elements[i].dy * elements[i].xhat;
      dbias[i] += elements[i].dy;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int col = threadIdx.x + i * kBlock;
    if (col >= b.cols) break;
    atomicAdd(b.dweight + col, dweight[i]);
    atomicAdd(b.dbias + col, dbias[i]);
  }
}

// Launching them. Each zeroes dweight and dbias first: the price of atomics is part of a step.

constexpr int kMaxCols = 4 * kBlock;  // v5's bound, the lowest of all

inline cudaError_t launch(void (*kernel)(Backward), int64_t blocks, int threads, int shared_bytes,
                          const Backward& b, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(b.dweight, 0, 2 * b.cols * sizeof(float), stream);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(b);
  return cudaGetLastError();
}

inline cudaError_t launch_v1(const Backward& b, cudaStream_t stream) {
  constexpr int kThreads = 256;
  return launch(v1_thread_a_row, (b.rows + kThreads - 1) / kThreads, kThreads, 0, b, stream);
}

inline cudaError_t launch_v2(const Backward& b, cudaStream_t stream) {
  return launch(v2_warp_a_row, b.rows, kWarp, 0, b, stream);
}

inline cudaError_t launch_v3(const Backward& b, cudaStream_t stream) {
  return launch(v3_staged, b.rows, kWarp, b.cols * sizeof(float), b, stream);
}

inline cudaError_t launch_v4(const Backward& b, cudaStream_t stream) {
  return launch(v4_block_a_row, b.rows, kBlock, 0, b, stream);
}

inline cudaError_t launch_v5(const Backward& b, cudaStream_t stream) {
  if (b.cols > kMaxCols) return cudaErrorInvalidValue;
  const auto kernel = b.cols <= 2 * kBlock ? v5_rows_a_block<2> : v5_rows_a_block<4>;
  int device = 0, multiprocessors = 0, resident = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kBlock, 0);
  }
  if (error != cudaSuccess) return error;
  return launch(kernel, std::min<int64_t>(b.rows, multiprocessors * resident), kBlock, 0, b,
                stream);
}

}  // namespace backward_ladder
