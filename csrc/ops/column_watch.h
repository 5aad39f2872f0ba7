// What the host knows of the columns of memory_efficient norms: how many a call must list, and
// whether gradients became NaN for want of room. The rules are in core/norm/room.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "core/norm/room.h"
#include "cpu/norm.h"
#include "ops/checks.h"

#ifdef FUSED_NORM_WITH_CUDA
#include "core/norm/columns.h"
#endif

namespace fused_norm::ops {

// The room for listed columns of a call with parameters: 0 when no column is at risk, kSaveInput
// when the input is to be saved. Looks at the parameters, and waits for the answer, where no report
// covers them. `generation`: of the code that is being traced; -1 of an eager call.
int64_t choose_room(const NormColumns& norm, int generation = -1);

// Of a call that is being traced, with parameters or without. Unless it `looks` it is 0, or
// kSaveInput where no look can change that any more.
int64_t traced_room(const OptionalTensor& weight, const OptionalTensor& bias, double weight_offset,
                    at::ScalarType x_dtype, at::ScalarType y_dtype, int generation, bool looks);

// A call on a CPU lists so many columns: code that was compiled with this room may need more.
void note_listing(const NormColumns& norm, int64_t listed, int64_t room);

// Before and after a step of any optimizer. The first waits for the reports of this step's backward
// calls where those that are known do not cover the parameters or come near the room, and throws
// where gradients are NaN. Whether code should be compiled anew, with more room. `changed_unseen`:
// parameters were changed where norms do not see it, in the shards that theirs are gathered from.
bool before_optimizer_step(bool changed_unseen);
void after_optimizer_step();

// A backward call that made gradients NaN: the TensorImpl of its weight, or of its bias if it has
// no weight, which may be gone, or 0 when unknown; what its parameters are; and how many columns
// had no room.
using Overflow = std::tuple<uintptr_t, std::string, int64_t>;
void check_overflow();  // throws for all that are pending
[[noreturn]] void raise_overflow(const std::vector<Overflow>& overflows);
Overflow overflow_of(const NormColumns& norm, int64_t columns);
// Makes a message of overflows. Called without a lock.
void set_overflow_message(std::function<std::string(const std::vector<Overflow>&)> message);

#ifdef FUSED_NORM_WITH_CUDA
// For a backward call about to be launched on the current stream, with so much room.
ColumnWatch watch_backward(const NormColumns& norm, bool from_output, int64_t room);
// Gives a look totals where it may not have its watch's; to be kept until the launch.
at::Tensor set_totals(const NormColumns& norm, ColumnWatch* watch);
#endif

}  // namespace fused_norm::ops
