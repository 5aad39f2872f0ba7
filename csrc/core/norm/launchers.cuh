// Who runs a plan, and what a backward call's launches share.
#pragma once

#include "core/norm/columns.cuh"
#include "core/norm/norm.h"
#include "core/norm/plan.h"

namespace fused_norm {

using RunNormForward = cudaError_t(const NormForwardParams&, const NormForwardPlan&, cudaStream_t);
using RunNormBackward = cudaError_t(const NormBackwardParams&, const NormBackwardPlan&,
                                    cudaStream_t);

// Rows that are not streamed, without gate; forward also without addend, and with an output of x's
// dtype or fp32. One of these for each dtype of x but fp64: f16.cu, bf16.cu and f32.cu.
template <typename X>
struct NormOf {
  static RunNormForward forward;
  static RunNormBackward backward;
};
// With an addend, and of fp32 rows with a 16-bit output: add.cu.
RunNormForward norm_add_forward;
// With a gate: gated.cu.
RunNormForward norm_gated_forward;
RunNormBackward norm_gated_backward;
// Of Tier::kStreaming: streaming.cu.
RunNormForward norm_stream_forward;
RunNormBackward norm_stream_backward;
// In tiles: flat.cu.
RunNormForward norm_flat_forward;

// What a backward call's workspace holds: partial rows, and what Tier::kStreaming needs beside.
// Null: not asked for.
template <typename A>
struct BackwardWorkspace {
  A* dweight;
  A* dbias;
  A* rest;

  BackwardWorkspace(const NormBackwardParams& params, const NormBackwardPlan& plan) {
    A* const partials = static_cast<A*>(params.workspace);
    const int64_t size = int64_t{plan.partials} * params.cols;
    dweight = params.dweight ? partials : nullptr;
    dbias = params.dbias ? partials + size : nullptr;
    rest = partials + 2 * size;
  }
};

template <typename A>
ColumnLook<A> column_look_of(const NormBackwardParams& params) {
  return {params.cols,
          params.weight,
          params.bias,
          static_cast<A>(params.weight_offset),
          {recoverable_limits<A>(params.y_dtype), precise_limits<A>(params.y_dtype),
           params.list.room, params.list.columns, static_cast<const A*>(params.list.side)},
          params.from_output,
          params.watch};
}

// Sums of the partial rows, if there are, and the look at the parameters: second_stage.cu.
template <typename A>
cudaError_t norm_second_stage(const NormBackwardParams& params, const NormBackwardPlan& plan,
                              const BackwardWorkspace<A>& workspace, const ColumnLook<A>& look,
                              cudaStream_t stream);

}  // namespace fused_norm
