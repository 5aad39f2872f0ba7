// Forward on Hopper: a block has a warpgroup that copies tiles of keys and values into shared
// memory, and two or three that multiply, 64 queries each. A multiplying warpgroup starts the
// scores of a tile, then the product of the tile before with its values, and takes the exponentials
// of the first while the second runs. Blocks stay, and take tiles of queries until none is left.
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "core/attention/attention.h"
#include "core/attention/hopper_ptx.cuh"

namespace fused_norm::hopper {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// What the kernel is told. Tensor maps have dimensions (column, row, head, batch).
struct ForwardArgs {
  CUtensorMap query, key, value;
  int32_t batch, heads, heads_per_kv, queries, keys;
  const int32_t *query_offsets, *key_offsets;  // null: dense
  int32_t total_queries, total_keys;

  int32_t query_tiles;  // of a dense sequence
  int32_t section;      // so many (batch, head) pairs share the second-level cache
  bool longest_first;
  uint32_t* ticket;  // 0 at first: tiles are handed out as blocks come; null: in turn

  float scale;     // of scores, before all else; kGeneral only
  float exponent;  // of scores in the softmax: exp2(exponent * score); positive
  float softcap;
  int32_t window_left, window_right;  // at most kNoLimit
  bool top_left;
  AttentionMask mask;
  const float* alibi_slopes;
  int64_t alibi_batch_stride;
  const void* sink;
  DType sink_dtype;

  void* out;
  int64_t out_batch_stride, out_head_stride, out_row_stride;
  int32_t value_dim;
  float* lse;
};

constexpr int32_t kNoLimit = 1 << 29;

// A form of the kernel. kGeneral: scores pass through scale, softcap, slopes and mask. kTurns: two
// warpgroups start their products in turn.
template <typename T_, int kDim_, int kKeys_, int kGroups_, int kStages_, int kQueryStages_,
          bool kGeneral_, bool kTurns_>
struct ForwardForm {
  using T = T_;
  static constexpr int kDim = kDim_, kKeys = kKeys_, kGroups = kGroups_, kStages = kStages_;
  static constexpr bool kGeneral = kGeneral_, kTurns = kTurns_;
  static constexpr int kQueryStages = kQueryStages_;
  static constexpr int kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  // What a thread of either kind has. The launch gives all the same, 168 or 128, and takes no more
  // from the 65536 of the chip than that: a warpgroup that asks for more in sum waits for ever.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kGroups == 3 ? 160 : 232;
  static_assert(kProducerRegisters + kGroups * kConsumerRegisters <=
                (kGroups + 1) * kLaunchRegisters);
  using QueryTile = SharedTile<kRows, kDim>;
  using KeyTile = SharedTile<kKeys, kDim>;
  static_assert(!kTurns || kGroups == 2);
  static_assert(!kGeneral || kQueryStages == 1);  // a tile with a mask may be done twice
};

// A tile of queries, and the tiles of keys that one of them sees.
struct WorkTile {
  int32_t sequence;  // -1: there is none left
  int32_t head, kv_head, batch;
  int32_t first;                 // query of the tile, counted in its sequence
  int32_t query_begin, queries;  // the sequence's rows in the tensor
  int32_t key_begin, keys;
  int32_t first_tile, end_tile;
};

// The first of the 32 packed sequences that were looked at last, and the tiles before it.
struct ListPlace {
  int32_t sequence;
  uint32_t tiles_before;
};

template <typename Form>
struct ForwardMemory {
  alignas(1024) char query[Form::kQueryStages][Form::QueryTile::kBytes];
  alignas(1024) char key[Form::kStages][Form::KeyTile::kBytes];
  alignas(1024) char value[Form::kStages][Form::KeyTile::kBytes];
  CopyBarrier query_full[Form::kQueryStages], query_empty[Form::kQueryStages];
  CopyBarrier key_full[Form::kStages], key_empty[Form::kStages];
  CopyBarrier value_full[Form::kStages], value_empty[Form::kStages];
  // The block's tiles of queries in turn: the producer fills one while consumers may still finish
  // the one before those whose queries are here.
  static constexpr int kWorks = Form::kQueryStages + 2;
  WorkTile work[kWorks];
  ListPlace place;
  // With a mask: whether the tile has to be done again (see mend), and which keys some query sees.
  CopyBarrier verdict;
  int spoiled;
  bool seen[Form::kKeys];
};

// Where a ring of kStages slots stands.
template <int kStages>
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// j - i of the keys j that query i of the tile's sequence sees: [-left, right], without the ends of
// the sequence.
struct Band {
  int left, right;
};
__device__ __forceinline__ Band band_of(const ForwardArgs& args, const WorkTile& work) {
  const int shift = args.top_left ? 0 : work.keys - work.queries;
  return {args.window_left - shift, args.window_right + shift};
}

// The work -------------------------------------------------------------------------------------

template <typename Form>
class WorkList {
 public:
  // `place` lies in shared memory, zeros at first.
  __device__ WorkList(const ForwardArgs& args, ListPlace* place) : args_(args), place_(place) {}

  // Says in shared memory what tile `index` is, which grows from call to call; false: there is
  // none. By all threads of a warp, of which the first writes.
  __device__ bool tile(uint32_t index, WorkTile* work) {
    const bool found = args_.query_offsets == nullptr ? dense(index, work) : packed(index, work);
    if (threadIdx.x % 32 != 0) return found;
    if (!found) {
      work->sequence = -1;
      return false;
    }
    work->kv_head = work->head / args_.heads_per_kv;
    const Band band = band_of(args_, *work);
    const int last = min(work->first + Form::kRows, work->queries) - 1;
    const int end = min(work->keys, last + band.right + 1);
    const int begin = max(0, work->first - band.left);
    work->first_tile = begin / Form::kKeys;
    work->end_tile = end > begin ? (end + Form::kKeys - 1) / Form::kKeys : 0;
    return true;
  }

 private:
  __device__ bool dense(uint32_t index, WorkTile* work) const {
    const uint32_t pairs = args_.heads * args_.batch, tiles = args_.query_tiles;
    if (index >= pairs * tiles) return false;
    if (threadIdx.x % 32 != 0) return true;
    const uint32_t first_pair = index / (args_.section * tiles) * args_.section;
    const uint32_t rest = index - first_pair * tiles;
    const uint32_t width = min(static_cast<uint32_t>(args_.section), pairs - first_pair);
    const uint32_t tile = rest / width, pair = first_pair + rest % width;
    work->first = (args_.longest_first ? tiles - 1 - tile : tile) * Form::kRows;
    work->sequence = work->batch = pair / args_.heads;
    work->head = pair % args_.heads;
    work->query_begin = work->key_begin = 0;
    work->queries = args_.queries;
    work->keys = args_.keys;
    return true;
  }

  // Offset `i`, within the tensor.
  static __device__ int offset(const int32_t* offsets, int i, int total) {
    return min(max(offsets[i], 0), total);
  }

  // Sequences are counted from 1. Numbers 0 and batch + 1 are the rows before and behind all, which
  // see no keys.
  __device__ bool packed(uint32_t index, WorkTile* work) {
    const int lane = threadIdx.x % 32;
    int first_sequence = place_->sequence;
    uint32_t tiles_before = place_->tiles_before;
    while (first_sequence <= args_.batch + 1) {
      const int number = first_sequence + lane;
      int begin = 0, end = 0;
      if (number <= args_.batch + 1) {
        begin = number == 0 ? 0 : offset(args_.query_offsets, number - 1, args_.total_queries);
        end = number > args_.batch ? args_.total_queries
                                   : offset(args_.query_offsets, number, args_.total_queries);
        end = max(end, begin);
      }
      const uint32_t tiles = (end - begin + Form::kRows - 1) / Form::kRows * args_.heads;
      uint32_t sum = tiles;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
      }
      const uint32_t here = __ballot_sync(~0u, index < tiles_before + sum);
      if (here == 0) {
        tiles_before += __shfl_sync(~0u, sum, 31);
        first_sequence += 32;
        *place_ = {first_sequence, tiles_before};
        continue;
      }
      const int from = __ffs(here) - 1;
      const uint32_t rest = index - tiles_before - __shfl_sync(~0u, sum - tiles, from);
      begin = __shfl_sync(~0u, begin, from);
      end = __shfl_sync(~0u, end, from);
      if (lane != 0) return true;
      const int found = first_sequence + from;
      const uint32_t count = (end - begin + Form::kRows - 1) / Form::kRows;
      uint32_t tile;
      if (args_.longest_first) {
        tile = count - 1 - rest / args_.heads;
        work->head = rest % args_.heads;
      } else {
        tile = rest % count;
        work->head = rest / count;
      }
      work->first = tile * Form::kRows;
      work->sequence = min(max(found - 1, 0), args_.batch - 1);
      work->batch = 0;
      work->query_begin = begin;
      work->queries = end - begin;
      work->key_begin = work->keys = 0;
      if (found >= 1 && found <= args_.batch) {
        work->key_begin = offset(args_.key_offsets, found - 1, args_.total_keys);
        work->keys = max(offset(args_.key_offsets, found, args_.total_keys) - work->key_begin, 0);
      }
      return true;
    }
    return false;
  }

  const ForwardArgs& args_;
  ListPlace* place_;
};

// The producer ---------------------------------------------------------------------------------

// One warp: copies the tiles of queries, keys and values in the order in which they are used.
template <typename Form>
__device__ __forceinline__ void produce(const ForwardArgs& args, ForwardMemory<Form>& memory) {
  using KeyTile = typename Form::KeyTile;
  const bool leader = threadIdx.x % 32 == 0;
  WorkList<Form> list(args, &memory.place);
  RingPlace<Form::kStages> key_place, value_place;
  RingPlace<Form::kQueryStages> query_place;
  RingPlace<ForwardMemory<Form>::kWorks> work_place;
  uint32_t verdict_parity = 0;

  const auto load = [&](const CUtensorMap* map, char* to, CopyBarrier& full, CopyBarrier& empty,
                        uint32_t parity, const WorkTile& work, int tile) {
    wait(empty, parity ^ 1);
    full.expect(KeyTile::kBytes);
    load_tile<KeyTile>(shared_address(to), map, full, work.key_begin + tile * Form::kKeys,
                       work.kv_head, work.batch);
  };
  const auto load_key = [&](const WorkTile& work, int tile) {
    load(&args.key, memory.key[key_place.slot], memory.key_full[key_place.slot],
         memory.key_empty[key_place.slot], key_place.parity, work, tile);
    key_place.advance();
  };
  const auto load_value = [&](const WorkTile& work, int tile) {
    load(&args.value, memory.value[value_place.slot], memory.value_full[value_place.slot],
         memory.value_empty[value_place.slot], value_place.parity, work, tile);
    value_place.advance();
  };

  const auto load_rest = [&](const WorkTile& work) {
#pragma unroll 1
    for (int tile = work.end_tile - 2; tile >= work.first_tile; --tile) {
      load_key(work, tile);
      load_value(work, tile + 1);
    }
    load_value(work, work.first_tile);
  };

  uint32_t index = blockIdx.x;
  while (true) {
    WorkTile& work = memory.work[work_place.slot];
    work_place.advance();
    const bool found = list.tile(index, &work);
    uint32_t next = index + gridDim.x;
    if (leader) {
      if (args.ticket != nullptr) next = gridDim.x + atomicAdd(args.ticket, 1);
      const bool any = found && work.first_tile < work.end_tile;
      if (any) load_key(work, work.end_tile - 1);
      CopyBarrier& full = memory.query_full[query_place.slot];
      wait(memory.query_empty[query_place.slot], query_place.parity ^ 1);
      if (any) {
        full.expect(Form::QueryTile::kBytes);
        load_tile<typename Form::QueryTile>(shared_address(memory.query[query_place.slot]),
                                            &args.query, full, work.query_begin + work.first,
                                            work.head, work.batch);
        load_rest(work);
        if constexpr (Form::kGeneral) {
          if (args.mask.data != nullptr) {
            wait(memory.verdict, verdict_parity);
            verdict_parity ^= 1;
            if (memory.spoiled) {
              memory.spoiled = 0;
              load_key(work, work.end_tile - 1);
              load_rest(work);
            }
          }
        }
      } else {
        arrive(full);
      }
    }
    query_place.advance();
    if (!found) return;
    index = __shfl_sync(~0u, next, 0);
  }
}

// The consumers --------------------------------------------------------------------------------

// Two rows of a thread: largest score so far, and the sum over the thread's own columns.
struct RowState {
  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Scores become exp2(exponent (score - largest)); what was summed so far is to be multiplied by
// `rescale`. Columns of -inf alone give zeros.
template <int kCount>
__device__ __forceinline__ void softmax_step(float (&scores)[kCount], RowState& rows,
                                             float exponent, float (&rescale)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float a = rows.largest[row], b = scores[2 * row];
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      a = fmaxf(a, scores[i + 2 * row]);
      b = fmaxf(b, scores[i + 2 * row + 1]);
    }
    const float largest = quad_max(fmaxf(a, b));
    const float base = largest == -INFINITY ? 0.f : largest * exponent;
    rescale[row] = exp2_fast(fmaf(rows.largest[row], exponent, -base));
    rows.largest[row] = largest;
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float& first = scores[i + 2 * row];
      float& second = scores[i + 2 * row + 1];
      first = exp2_fast(fmaf(first, exponent, -base));
      second = exp2_fast(fmaf(second, exponent, -base));
      even += first;
      odd += second;
    }
    rows.sum[row] = fmaf(rows.sum[row], rescale[row], even + odd);
  }
}

// Hides the scores outside [first, end) of each of the two rows, columns counted from the thread's
// own first one.
template <int kCount>
__device__ __forceinline__ void hide_after(float (&scores)[kCount], const int (&end)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (8 * (i / 4) + i % 2 >= end[i / 2 % 2]) scores[i] = -INFINITY;
  }
}
template <int kCount>
__device__ __forceinline__ void hide_before(float (&scores)[kCount], const int (&first)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (8 * (i / 4) + i % 2 < first[i / 2 % 2]) scores[i] = -INFINITY;
  }
}

template <typename T>
__device__ __forceinline__ float mask_value(const AttentionMask& mask, int64_t at) {
  if (mask.boolean) return static_cast<const bool*>(mask.data)[at] ? 0.f : -INFINITY;
  if (mask.dtype == DType::kFloat32) return static_cast<const float*>(mask.data)[at];
  return static_cast<float>(static_cast<const T*>(mask.data)[at]);
}

// scale, softcap, slopes and mask. `row`: the thread's first query, `column`: its first key.
template <typename T, int kCount>
__device__ __forceinline__ void general_scores(const ForwardArgs& args, const WorkTile& work,
                                               float (&scores)[kCount], int row, int column) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] *= args.scale;
  if (args.softcap > 0) {
    // tanh(x) = 1 - 2 / (1 + exp(2 x)).
    const float in = 2 * kLog2E / args.softcap;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float e = 1 + exp2_fast(scores[i] * in);
      float inverse;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(e));
      scores[i] = fmaf(-2 * args.softcap, inverse, args.softcap);
    }
  }
  if (args.alibi_slopes != nullptr) {
    const float slope = args.alibi_slopes[work.sequence * args.alibi_batch_stride + work.head];
    const int ahead = row + work.keys - work.queries - column;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int distance = ahead + 8 * (i / 2 % 2) - (8 * (i / 4) + i % 2);
      scores[i] = fmaf(-slope, fabsf(static_cast<float>(distance)), scores[i]);
    }
  }
  if (args.mask.data != nullptr) {
    const AttentionMask& mask = args.mask;
    const int64_t corner = work.sequence * mask.batch_stride + work.head * mask.head_stride;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = min(row + 8 * r, work.queries - 1);
      const int64_t at = corner + query * mask.row_stride;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i / 2 % 2 != r) continue;
        const int key = column + 8 * (i / 4) + i % 2;
        if (key >= work.keys) continue;
        const float value = mask_value<T>(mask, at + key * mask.key_stride);
        scores[i] = value == -INFINITY ? -INFINITY : scores[i] + value;
      }
    }
  }
}

// Rows of a tile of values for which hidden(row) become zeros, whatever they were: a NaN there
// would survive its weight of 0. By a warpgroup, before its own products and a barrier of its
// threads; others may do the same at the same time.
template <typename Form, typename Hidden>
__device__ __forceinline__ void clear_values(char* tile, Hidden hidden) {
  using Tile = typename Form::KeyTile;
  constexpr int kParts = Tile::kRowBytes / 16;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < Tile::kRows * kParts * Tile::kPanels; i += 128) {
    if (hidden(i / kParts % Tile::kRows)) reinterpret_cast<int4*>(tile)[i] = make_int4(0, 0, 0, 0);
  }
  CopyBarrier::order_writes();
}

// Thirty-two columns at a time, the four threads of a row give each other parts, so that each
// stores 16 bytes in a row.
template <typename T, int kCount>
__device__ __forceinline__ void store_row(const float (&values)[kCount], int row, float factor,
                                          T* out, int columns) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int block = 0; block < kCount / 16; ++block) {
    uint32_t parts[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 16 * block + 4 * i + 2 * row;
      parts[i] = pack_two<T>(values[at] * factor, values[at + 1] * factor);
    }
    // Part i of thread t goes to thread i, as its t-th.
    const bool odd = lane & 1, high = lane & 2;
    uint32_t a = __shfl_xor_sync(~0u, odd ? parts[0] : parts[1], 1);
    uint32_t b = __shfl_xor_sync(~0u, odd ? parts[2] : parts[3], 1);
    const uint32_t low0 = odd ? a : parts[0], low1 = odd ? parts[1] : a;
    const uint32_t high0 = odd ? b : parts[2], high1 = odd ? parts[3] : b;
    a = __shfl_xor_sync(~0u, high ? low0 : high0, 2);
    b = __shfl_xor_sync(~0u, high ? low1 : high1, 2);
    const uint4 pack = high ? make_uint4(a, b, high0, high1) : make_uint4(low0, low1, a, b);
    const int column = 32 * block + 8 * lane;
    if (out != nullptr && column < columns) *reinterpret_cast<uint4*>(out + column) = pack;
  }
}

template <typename Form>
__device__ __forceinline__ float sink_of(const ForwardArgs& args, int head) {
  if (args.sink == nullptr) return -INFINITY;
  return args.sink_dtype == DType::kFloat32
             ? static_cast<const float*>(args.sink)[head]
             : static_cast<float>(static_cast<const typename Form::T*>(args.sink)[head]);
}

// Divides by the sums, and writes the rows of out and lse.
template <typename Form>
__device__ __forceinline__ void finish(const ForwardArgs& args, const WorkTile& work,
                                       const float (&values)[Form::kDim / 2], RowState& rows,
                                       int row) {
  using T = typename Form::T;
  const float sink = sink_of<Form>(args, work.head) * kLog2E;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows.sum[r]);
    const float largest =
        rows.largest[r] == -INFINITY ? -INFINITY : rows.largest[r] * args.exponent;
    const float base = fmaxf(largest, sink);
    const float shrink = largest == base ? 1.f : exp2_fast(largest - base);
    const float total = sum * shrink + (sink == -INFINITY ? 0.f : exp2_fast(sink - base));
    const bool empty = sum == 0;
    const int query = row + 8 * r;
    const bool stores = query < work.queries;
    T* out = static_cast<T*>(args.out) + work.batch * args.out_batch_stride +
             work.head * args.out_head_stride +
             int64_t{work.query_begin + query} * args.out_row_stride;
    store_row<T>(values, r, empty ? 0.f : shrink / total, stores ? out : nullptr, args.value_dim);
    if (stores && threadIdx.x % 4 == 0) {
      const int64_t at =
          args.query_offsets == nullptr
              ? (int64_t{work.sequence} * args.heads + work.head) * args.queries + query
              : int64_t{work.head} * args.total_queries + work.query_begin + query;
      args.lse[at] = total == 0 ? -INFINITY : (base + log2f(total)) * kLn2;
    }
  }
}

template <typename Form>
__device__ __forceinline__ void consume(const ForwardArgs& args, ForwardMemory<Form>& memory,
                                        int group) {
  using T = typename Form::T;
  using QueryTile = typename Form::QueryTile;
  using KeyTile = typename Form::KeyTile;
  constexpr int kKeys = Form::kKeys, kDim = Form::kDim;
  const int lane = threadIdx.x % 32;
  const int thread_row = 64 * group + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const uint64_t query_operand = QueryTile::along_rows(shared_address(memory.query), 64 * group);
  const uint64_t key_operand = KeyTile::along_rows(shared_address(memory.key[0]), 0);
  const uint64_t value_operand = KeyTile::down_columns(shared_address(memory.value[0]));
  RingPlace<Form::kStages> key_place, value_place;
  RingPlace<Form::kQueryStages> query_place;
  RingPlace<ForwardMemory<Form>::kWorks> work_place;
  constexpr bool kEarly = Form::kQueryStages == 2;
  float scores[kKeys / 2], rescale[2];
  // Barriers: 1 and 2 for the turns, 4 and on for a warpgroup's own.
  if (Form::kTurns && group == 1) named_arrive(1, 256);

  const auto multiply_keys = [&](float(&scores)[kKeys / 2]) {
    uint64_t queries = query_operand + query_place.slot * (QueryTile::kBytes / 16);
    if constexpr (Form::kGeneral) asm volatile("" : "+l"(queries));  // no steps kept in registers
    const uint64_t keys = key_operand + key_place.slot * (KeyTile::kBytes / 16);
    fence_products();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      Product<kKeys>::template shared<T, false>(scores, queries + QueryTile::row_step(step),
                                                keys + KeyTile::row_step(step), step > 0);
    }
    commit_products();
  };
  // Whether the next tile sees keys.
  const auto next_has_scores = [&] {
    wait(memory.query_full[query_place.slot], query_place.parity);
    const WorkTile& work = memory.work[work_place.slot];
    return work.sequence >= 0 && work.first_tile < work.end_tile;
  };
  const auto start_scores = [&] {
    wait(memory.key_full[key_place.slot], key_place.parity);
    if constexpr (Form::kTurns) named_sync(1 + group, 256);
    multiply_keys(scores);
    if constexpr (Form::kTurns) named_arrive(2 - group, 256);
  };
  if (kEarly && next_has_scores()) {
    start_scores();
    wait_products<0>();
    hold(scores);
  }

  while (true) {
    if (!kEarly) wait(memory.query_full[query_place.slot], query_place.parity);
    const WorkTile& work = memory.work[work_place.slot];
    work_place.advance();
    if (work.sequence < 0) return;
    const Band band = band_of(args, work);
    const int row = work.first + thread_row;  // the thread's first query; its second is 8 later
    const int group_first = work.first + 64 * group;
    const int group_last = min(group_first + 64, work.queries) - 1;
    // Tiles from `hides_from` on or below `hides_below` have keys that one of the warpgroup's
    // queries does not see. Those from `clears_from` on or below `clears_below` have keys that no
    // query of the sequence sees (seen: [seen_first, seen_end)) and that the copy did not make
    // zero.
    const int hides_from = max(min(work.keys, group_first + band.right + 1), 0) / kKeys;
    const int hides_below = (max(group_last - band.left, 0) + kKeys - 1) / kKeys;
    const int seen_first = max(0, -band.left);
    const int seen_end = min(work.keys, work.queries + band.right);
    const int clears_from = args.query_offsets != nullptr || seen_end < work.keys
                                ? max(seen_end, 0) / kKeys
                                : INT32_MAX;
    const int clears_below = (seen_first + kKeys - 1) / kKeys;

    float values[kDim / 2];
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) values[i] = 0;
    RowState rows;

    const auto multiply_values = [&](const uint32_t(&weights)[kKeys / 4]) {
      const uint64_t from = value_operand + value_place.slot * (KeyTile::kBytes / 16);
      fence_products();
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        Product<kDim>::template registers<T, true>(values, weights + 4 * step,
                                                   from + KeyTile::column_step(step));
      }
      commit_products();
    };
    const auto hide = [&](float(&scores)[kKeys / 2], int tile) {
      const int begin = tile * kKeys, column = begin + lane % 4 * 2;
      if constexpr (Form::kGeneral) general_scores<T>(args, work, scores, row, column);
      if (tile >= hides_from) {
        const int end[2] = {min(work.keys, row + band.right + 1) - column,
                            min(work.keys, row + 8 + band.right + 1) - column};
        hide_after(scores, end);
      }
      if (tile < hides_below) {
        const int first[2] = {row - band.left - column, row + 8 - band.left - column};
        hide_before(scores, first);
      }
    };
    const auto clear = [&](int tile) {
      if (tile >= clears_from || tile < clears_below) {
        clear_values<Form>(memory.value[value_place.slot], [&](int key) {
          return tile * kKeys + key < seen_first || tile * kKeys + key >= seen_end;
        });
        named_sync(4 + group, 128);
      }
    };
    const auto round = [&](const float(&scores)[kKeys / 2], uint32_t(&weights)[kKeys / 4]) {
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i)
        weights[i] = pack_two<T>(scores[2 * i], scores[2 * i + 1]);
    };
    const auto release = [&](CopyBarrier& barrier) {
      if (lane == 0) arrive(barrier);
    };

    // A NaN or Inf in a value that the mask hides from every query spoils the sums, as it survives
    // its weight of 0. If a sum is one, the tile is done again, step by step, without the values of
    // keys that none of the block's queries sees.
    const auto mend = [&] {
      constexpr int kBarrier = 3, kConsumers = 128 * Form::kGroups;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) sum = fmaf(values[i], 0.f, sum);
      if (sum != 0) memory.spoiled = 1;
      named_sync(kBarrier, kConsumers);
      const bool spoiled = memory.spoiled;
      __syncwarp();
      release(memory.verdict);
      if (!spoiled) return;
      rows = RowState();
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) values[i] = 0;
#pragma unroll 1
      for (int tile = work.end_tile - 1; tile >= work.first_tile; --tile) {
        uint32_t weights[kKeys / 4];
        wait(memory.key_full[key_place.slot], key_place.parity);
        multiply_keys(scores);
        wait_products<0>();
        hold(scores);
        release(memory.key_empty[key_place.slot]);
        key_place.advance();
        hide(scores, tile);
        for (int i = threadIdx.x - 128; i < kKeys; i += kConsumers) memory.seen[i] = false;
        named_sync(kBarrier, kConsumers);
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          if (scores[i] != -INFINITY) memory.seen[8 * (i / 4) + lane % 4 * 2 + i % 2] = true;
        }
        softmax_step(scores, rows, args.exponent, rescale);
        round(scores, weights);
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) values[i] *= rescale[i / 2 % 2];
        named_sync(kBarrier, kConsumers);
        wait(memory.value_full[value_place.slot], value_place.parity);
        clear_values<Form>(memory.value[value_place.slot],
                           [&](int key) { return !memory.seen[key]; });
        named_sync(kBarrier, kConsumers);
        multiply_values(weights);
        wait_products<0>();
        hold(values);
        release(memory.value_empty[value_place.slot]);
        value_place.advance();
      }
    };

    if (work.first_tile < work.end_tile) {
      uint32_t weights[kKeys / 4];
      if constexpr (!kEarly) {
        // They need no value, but registers of none until here.
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) scores[i] = 0;
        start_scores();
        wait_products<0>();
        hold(scores);
      }
      release(memory.key_empty[key_place.slot]);
      key_place.advance();
      hide(scores, work.end_tile - 1);
      softmax_step(scores, rows, args.exponent, rescale);
      round(scores, weights);

      for (int tile = work.end_tile - 2; tile >= work.first_tile; --tile) {
        wait(memory.key_full[key_place.slot], key_place.parity);
        if constexpr (Form::kTurns) named_sync(1 + group, 256);
        multiply_keys(scores);
        wait(memory.value_full[value_place.slot], value_place.parity);
        clear(tile + 1);
        multiply_values(weights);
        if constexpr (Form::kTurns) named_arrive(2 - group, 256);
        wait_products<1>();
        hold(scores);
        release(memory.key_empty[key_place.slot]);
        key_place.advance();
        hide(scores, tile);
        softmax_step(scores, rows, args.exponent, rescale);
        // The compiler would wait before it takes the exponentials, as nothing orders the two: so
        // here is something that never happens and needs their sums.
        if (rows.sum[0] < 0 || rows.sum[1] < 0) asm volatile("nanosleep.u32 1;" ::: "memory");
        wait_products<0>();
        hold(values);
        release(memory.value_empty[value_place.slot]);
        value_place.advance();
        round(scores, weights);
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) values[i] *= rescale[i / 2 % 2];
      }
      release(memory.query_empty[query_place.slot]);
      query_place.advance();
      wait(memory.value_full[value_place.slot], value_place.parity);
      clear(work.first_tile);
      multiply_values(weights);
      // The next tile's first scores are started before this tile is finished.
      if (kEarly && next_has_scores()) {
        start_scores();
        wait_products<1>();
        hold(values);
        release(memory.value_empty[value_place.slot]);
        value_place.advance();
        finish<Form>(args, work, values, rows, row);
        wait_products<0>();
        hold(scores);
        continue;
      }
      wait_products<0>();
      hold(values);
      release(memory.value_empty[value_place.slot]);
      value_place.advance();
    } else {
      release(memory.query_empty[query_place.slot]);
      query_place.advance();
      if (kEarly && next_has_scores()) {
        start_scores();
        wait_products<0>();
        hold(scores);
      }
    }
    if constexpr (Form::kGeneral) {
      if (args.mask.data != nullptr && work.first_tile < work.end_tile) mend();
    }
    finish<Form>(args, work, values, rows, row);
  }
}

template <typename Form>
__global__ void __launch_bounds__(Form::kThreads, 1)
    attention_forward_hopper(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(1024) char shared[];
  auto& memory = *reinterpret_cast<ForwardMemory<Form>*>(shared);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be the warp's
  if (threadIdx.x == 0) {
    prefetch_map(&args.query);
    prefetch_map(&args.key);
    prefetch_map(&args.value);
    // A warp of a consumer arrives once.
    constexpr int kWarps = 4 * Form::kGroups;
    for (int slot = 0; slot < Form::kQueryStages; ++slot) {
      memory.query_full[slot].init();
      memory.query_empty[slot].init(kWarps);
    }
    memory.verdict.init(kWarps);
    memory.spoiled = 0;
    memory.place = {};
    for (int slot = 0; slot < Form::kStages; ++slot) {
      memory.key_full[slot].init();
      memory.value_full[slot].init();
      memory.key_empty[slot].init(kWarps);
      memory.value_empty[slot].init(kWarps);
    }
    CopyBarrier::order_inits();
  }
  __syncthreads();
  if (group == 0) {
    shrink_registers<Form::kProducerRegisters>();
    if (threadIdx.x < 32) produce(args, memory);
  } else {
    grow_registers<Form::kConsumerRegisters>();
    consume(args, memory, group - 1);
  }
}

}  // namespace fused_norm::hopper
