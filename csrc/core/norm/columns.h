// Columns that are not precise (recoverable.h): a forward call lists them, or, where the room that
// it is given does not suffice, those that are not even recoverable. It keeps their xhat in `side`.
// A column that is neither recoverable nor listed makes gradients NaN.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/common/types.h"
#include "core/norm/room.h"

namespace fused_norm {

// What a forward call lists.
struct ColumnList {
  int32_t room;
  int32_t* columns;  // 1 + room: how many there are, then the first of them, ascending, then zeros
  void* side;        // rows x room, fp32 (fp64 for fp64 x): their xhat
};

// A look at a norm's parameters, so that the host learns without waiting how many columns are at
// risk of not being recoverable.
//
// `report` is the outcome in one word, written at once; counts are saturated:
//   bits 0-22   the columns that are not precise, or may no longer be after kUpdatesAhead more
//               updates of the parameters
//   bits 23-45  the columns that are not precise now
//   bits 46-61  `stamp`
//   bit 62      whether the parameters moved since the look before
//   bit 63      set
struct ColumnReport {
  uint64_t report;
  uint32_t overflow;  // of a backward call: the columns neither recoverable nor listed; sticky
  uint32_t overflow_signal;  // of the first report alone: ColumnWatch::overflow_signal
};

// Where the threads of a look add up what they found.
constexpr int kTotalsBytes = 64;

struct ColumnWatch {
  // Rows of cols, fp32 (fp64 for fp64 x), of this watch and stream alone: g at the look before and
  // how fast it moves, and with a bias the same of that. NaN at first. Null: only overflow is
  // reported.
  void* history;
  void* totals;               // kTotalsBytes zeros, likewise; null: the call finds room for them
  ColumnReport* report;       // in mapped host memory; null: nothing is reported
  uint32_t* overflow_signal;  // in mapped host memory: set to 1 on overflow
  uint16_t stamp;
};

struct NormForwardParams;

// Fills params.list, before or after the forward kernel on the same stream: before it the columns,
// after it (`gathers`, where nothing was added) their xhat too.
cudaError_t launch_list_columns(const NormForwardParams& params, bool gathers,
                                const DeviceProperties& device, cudaStream_t stream);

// Takes a look outside of a backward call.
struct ColumnLookParams {
  int32_t cols;
  DType x_dtype, y_dtype;
  double weight_offset;
  ParamVector weight, bias;
  ColumnWatch watch;
};
cudaError_t launch_column_look(const ColumnLookParams& params, cudaStream_t stream);

}  // namespace fused_norm
