// What memory_efficient keeps of columns that the output does not give back, and how the host
// learns of them. The words, the same in code, tests and docs/memory_efficient.md:
//
//   recoverable   a column whose xhat = (y - bias) / g the output gives back with a bounded error;
//                 one that is not is unrecoverable (recoverable.h)
//   precise       recoverable, and nearly as exact as from the input; the same for 16-bit outputs
//   lost          not precise
//   at risk       lost, or may be after kUpdatesAhead more updates of the parameters
//   room          how many columns a call can list; 0: none, and nothing is launched for it
//   list          the columns that a forward call keeps xhat of, ascending: as many as have room of
//                 those that are lost or, where these are more, of those that are unrecoverable
//   place         a listed column's number in the list
//   side          xhat of the listed columns, rows x room
//   overflow      the columns that are neither recoverable nor listed: their gradients are NaN
//   look          a pass over the parameters that counts such columns, mostly in a backward call
//   watch         what looks at one norm keep between calls, and where they report
//   report        a look's outcome, in memory that the host reads without waiting
//   stamp         which of the parameters' updates a report knows of (room.h)
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

struct ColumnReport {
  uint64_t report;           // pack_report() of room.h
  uint32_t overflow;         // of a backward call; sticky
  uint32_t overflow_signal;  // of the first report alone: ColumnWatch::overflow_signal
};

// Where the threads of a look add up what they found.
constexpr int kTotalsBytes = 64;

struct ColumnWatch {
  // Rows of cols, fp32 (fp64 for fp64 x), of this watch and stream alone: g at the look before and
  // how fast it moves, and with a bias the same of that. NaN at first. Null: only overflow is
  // reported.
  void* history;
  void* totals;               // kTotalsBytes zeros; zero again after the look
  ColumnReport* report;       // in mapped host memory; null: nothing is reported
  uint32_t* overflow_signal;  // in mapped host memory: set to 1 on overflow
  uint16_t stamp;
};

struct NormForwardParams;
struct NormBackwardParams;

// Fills params.list, before or after the forward kernel on the same stream: before it the columns,
// after it (`gathers`, where nothing was added) their xhat too.
cudaError_t launch_list_columns(const NormForwardParams& params, bool gathers,
                                const DeviceProperties& device, cudaStream_t stream);

// Takes a look outside of a backward call. Of `params` it needs cols, dtypes, parameters and watch.
cudaError_t launch_column_look(const NormBackwardParams& params, cudaStream_t stream);

}  // namespace fused_norm
