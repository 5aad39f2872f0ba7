// What the host knows of the columns of memory_efficient norms: how many a call must list, and
// whether gradients became NaN for want of room. The rules are in core/norm/room.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "core/norm/room.h"
#include "ops/norm.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <cuda_runtime_api.h>

#include "core/norm/columns.h"
#endif

namespace fused_norm::ops {

// The parameters of a norm and what decides which of its columns are recoverable.
struct NormColumns {
  at::Tensor weight, bias;  // undefined when absent
  double weight_offset;
  int64_t cols;
  at::ScalarType x_dtype, y_dtype;
};

// The room for listed columns that an eager call should have: 0 when no column is at risk,
// kSaveInput when the input should be saved instead. Looks at the parameters, and waits for the
// answer, when they changed in a way that is new.
int64_t choose_room(const NormColumns& norm);

// The room of a call that is being traced, of fixed_room(); generations count from the first in
// which the weight was traced. Looks at the parameters if it `looks`; else 0, or kSaveInput where
// no look can change that any more.
int64_t traced_room(const NormColumns& norm, int generation, bool looks);

// While one exists, its thread's calls have the room that choose_room() gave.
struct EagerCall {
  EagerCall();
  ~EagerCall();
};
// A forward call that lists columns; `listed` of them on a CPU, else -1.
void note_listing(const NormColumns& norm, int64_t room, int64_t listed);

// Before and after a step of any optimizer. The first waits for the reports of this step's backward
// calls where the last ones came near the room, or may not cover what happened, and throws where
// gradients are NaN for want of room. Whether compiled calls should be compiled anew, with more.
bool before_optimizer_step();
void after_optimizer_step();

// A backward call that made gradients NaN.
struct Overflow {
  const void* weight;       // the TensorImpl of its weight, or of its bias if it has no weight; may
                            // be gone. Null when unknown
  std::string description;  // of its parameters
  int64_t columns;          // how many had no room
};
void check_overflow();  // throws for all that are pending
[[noreturn]] void raise_overflow(const std::vector<Overflow>& overflows);
Overflow overflow_of(const NormColumns& norm, int64_t columns);
// Makes a message of overflows. Called without a lock.
void set_overflow_message(std::function<std::string(const std::vector<Overflow>&)> message);

#ifdef FUSED_NORM_WITH_CUDA
// For a backward call about to be launched, with so much room.
ColumnWatch watch_backward(const NormColumns& norm, bool from_output, int64_t room,
                           cudaStream_t stream);
#endif

}  // namespace fused_norm::ops
