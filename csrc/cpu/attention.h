// Attention on the CPU, by blocks of query rows: the scores of a block are in memory, those of a
// call never. Arguments are already checked; all memory is the CPU's. Arithmetic is in fp32 (fp64
// for fp64). What a sequence gives depends on that sequence and the options alone.
#pragma once

#include "core/attention/params.h"

namespace fused_norm::cpu {

// Write all of out and lse, and of the gradients that are asked for; but rows outside every packed
// sequence are not written. Sinks and dsink are in fp64.
void attention_forward(const AttentionParams& params);
void attention_backward(const AttentionBackwardParams& params);

}  // namespace fused_norm::cpu
