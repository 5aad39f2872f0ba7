// Columns that are not precise (recoverable.h): a forward call lists them, or, where the room that
// it is given does not suffice, those that are not even recoverable. It keeps their xhat in `side`.
// A column that is neither recoverable nor listed makes gradients NaN.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/common/types.h"

namespace fused_norm {

// What a forward call lists.
struct ColumnList {
  int32_t room;
  int32_t* columns;  // 1 + room: how many there are, then the first of them, ascending
  void* side;        // rows x room, fp32 (fp64 for fp64 x): their xhat
};

// A look at a norm's parameters, so that the host learns without waiting how many columns are at
// risk of not being recoverable.
//
// `report` is the outcome in one word, written at once:
//   bits 0-44   three counts of 15 bits, saturated: the columns that are not precise, or may no
//               longer be after the next 2, 4 and 16 updates of the parameters
//   bits 45-60  `stamp`
//   bit 61      whether the parameters moved since the look before
//   bit 62      set
// `lost` is how many columns are not precise now.
struct ColumnReport {
  uint64_t report;
  uint32_t lost;
  uint32_t overflow;  // columns of a backward call that were neither recoverable nor listed; sticky
};

constexpr int kHorizons = 3;
constexpr int horizon(int index) { return index == 0 ? 2 : index == 1 ? 4 : 16; }
constexpr int kCountBits = 15;
constexpr int kStampBits = 16;

// Where the threads of a look add up what they found.
constexpr int kTotalsBytes = 64;

struct ColumnWatch {
  // Rows of cols, fp32 (fp64 for fp64 x), of this watch alone: g at the look before and how fast
  // it moves, and with a bias the same of that. NaN at first. Null: only overflow is reported.
  void* history;
  void* totals;               // kTotalsBytes zeros, likewise; null: the call finds room for them
  ColumnReport* report;       // in mapped host memory; null: nothing is reported
  uint32_t* overflow_signal;  // in mapped host memory: set to `signal` on overflow
  uint32_t signal;
  uint16_t stamp;
};

struct NormForwardParams;

// Fills params.list; after the forward kernel, on the same stream.
cudaError_t launch_list_columns(const NormForwardParams& params, const DeviceProperties& device,
                                cudaStream_t stream);

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
