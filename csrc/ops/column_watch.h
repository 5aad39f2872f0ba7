// What the host knows of the columns of memory_efficient norms: how many a call must list. See
// column_watch.cpp for how it knows.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "ops/norm.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <cuda_runtime_api.h>

#include "core/norm/columns.h"
#endif

namespace fused_norm::ops {

constexpr int64_t kMostRoom = int64_t{1} << 24;  // kernels keep places in the list as fp32
constexpr int64_t kSaveInput = -1;
constexpr int64_t kOverflowPending = -2;

// The parameters of a norm and what decides which of its columns are recoverable.
struct NormColumns {
  at::Tensor weight, bias;  // undefined when absent
  double weight_offset;
  int64_t cols;
  at::ScalarType x_dtype, y_dtype;
};

// The room for listed columns that a call should have: 0 when no column is at risk, kSaveInput when
// the input should be saved instead. kOverflowPending: an earlier call's gradients are NaN for want
// of room, and take_overflow() says whose. Looks at the parameters, and waits for the answer, when
// they changed in a way that is new.
int64_t choose_room(const NormColumns& norm);

// The room of a call that cannot ask: traced, or captured.
int64_t fixed_room(int64_t cols);

// Some optimizer has changed its parameters. Other changes are events, at which to look.
void note_optimizer_step();

// A backward call that made gradients NaN.
struct Overflow {
  const void* weight;       // the TensorImpl of its weight, or of its bias if it has no weight; may
                            // be gone. Null when unknown
  std::string description;  // of its parameters
  int64_t columns;          // how many had no room
};
std::optional<Overflow> take_overflow();
void check_overflow();  // throws for it

// Notes an overflow that happened on the CPU.
void report_overflow(const NormColumns& norm, int64_t columns);

#ifdef FUSED_NORM_WITH_CUDA
// For a backward call about to be launched.
ColumnWatch watch_backward(const NormColumns& norm, bool from_output, cudaStream_t stream);
#endif

}  // namespace fused_norm::ops
