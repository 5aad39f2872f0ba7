// Which calls attention's kernels for Hopper (compute capability 9.0) take, and in what form. Where
// the kernels were not compiled, they take none.
#pragma once

#include <cstddef>

#include "core/attention/params.h"

namespace fused_norm {

// Columns of a tile: of the head dimensions up to that.
constexpr int kHopperDims[] = {64, 96, 128, 192, 256};
constexpr int hopper_dim_index(int dim) {
  int index = 0;
  while (kHopperDims[index] < dim) ++index;
  return index;
}

// Tiles by kHopperDims, as large as registers and shared memory allow: for plain scores, and for
// others. Forward: a block has 64 queries for each of its `groups` warpgroups, three where two
// exponentiate too slowly for the tensor cores. `query_stages`: tiles of queries in shared memory.
// in_turns: two warpgroups start their products in turn.
struct HopperForwardTiles {
  int keys, groups, query_stages;
  bool in_turns;
};
constexpr HopperForwardTiles kHopperForwardTiles[2][5] = {
    {{128, 3, 2, false},
     {96, 3, 2, false},
     {128, 2, 2, false},
     {112, 2, 1, true},
     {80, 2, 1, false}},
    {{128, 2, 1, false},
     {112, 2, 1, false},
     {112, 2, 1, false},
     {80, 2, 1, false},
     {64, 2, 1, false}},
};
// Backward: 128 rows of one side, its own, against tiles of `others`; how many tiles of the own
// side shared memory has, of query or key, and of dout or value.
struct HopperBackwardTiles {
  int others, own_stages, first_stages, second_stages;
};
constexpr HopperBackwardTiles kHopperQueryGradientTiles[] = {
    {128, 2, 3, 3}, {128, 2, 2, 2}, {128, 1, 2, 2}, {64, 1, 2, 2}, {64, 1, 2, 1}};
constexpr HopperBackwardTiles kHopperKeyGradientTiles[2][5] = {
    {{128, 2, 3, 3}, {96, 2, 2, 2}, {64, 2, 3, 3}, {64, 1, 2, 2}, {64, 1, 2, 1}},
    {{112, 2, 3, 3}, {96, 2, 2, 2}, {64, 2, 3, 3}, {64, 1, 2, 2}, {64, 1, 2, 1}},
};
// dkey and dvalue are made together where a warpgroup's registers hold both, else the latter with:
constexpr bool hopper_makes_both(int dim) { return dim <= 128; }
constexpr HopperBackwardTiles kHopperValueGradientTiles[] = {
    {}, {}, {}, {96, 1, 2, 2}, {64, 1, 2, 2}};

// How a forward call runs. Everything that a row's bits depend on, dim to general, is a function of
// the call's options alone; the rest is the order of the work.
struct HopperForwardPlan {
  int dim;           // columns of a tile: both head dimensions, rounded up
  int queries;       // rows of a tile of queries
  int keys;          // rows of a tile of keys
  bool general;      // scores need more than a positive scale and a band
  bool in_order;     // tiles take unlike times: longest first, to the next block that is free
  int section;       // (batch, head) pairs whose keys and values share the second-level cache
  bool batch_first;  // pairs of a head follow each other, else those of a sequence
};
HopperForwardPlan hopper_forward_plan(const AttentionParams& params);

// Dense and packed, 16 bit, head dimensions that are multiples of 8 up to 256, without dropout;
// whatever the tensors' alignment (attention_is_aligned()).
bool hopper_takes_forward(const AttentionParams& params, const DeviceProperties& device);

size_t hopper_forward_workspace(const AttentionParams& params);

// The same of a backward call: a kernel for dquery, and one or two for dkey and dvalue.
struct HopperBackwardPlan {
  int dim;
  bool general;
  bool in_order;
  int query_section,
      key_section;  // (batch, head) pairs, of queries' heads or of keys'
};
HopperBackwardPlan hopper_backward_plan(const AttentionParams& params);

// What the forward pass takes, but of masks those of 16 bit and booleans up to this head dimension:
// shared memory has no room for others.
constexpr int kMaxMaskedBackwardDim = 192;
bool hopper_takes_backward(const AttentionParams& params, const DeviceProperties& device);

size_t hopper_backward_workspace(const AttentionParams& params);

}  // namespace fused_norm
