// Few queries and many keys, as when a model writes text: the time is that of reading the keys.
// Keys are the rows of products here, and up to eight queries their columns. A sequence's keys come
// in parts. Of a part a warp has every kFewWarps-th slice, and copies it through a ring of its own:
// no warp waits for another until the end. What a warp has of the parts is added up in their order,
// then what the warps have.
//
// If there are blocks enough, one goes through all parts. Else each part has a block, whose warps
// leave their sums in scratch memory, and a second kernel adds them up. The bits are the same.
#include "core/attention/plan.h"
#include "core/attention/portable.cuh"
#include "core/common/overlap.cuh"

namespace fused_norm {
namespace portable {

// A slice has kKeys keys. kThreads: of a warp, as it copies for itself.
template <typename T_, int kIndex>
struct FewShape {
  using T = T_;
  static constexpr int kDim = 64 << kIndex, kKeys = kDim == 256 ? 16 : 32;
  static constexpr int kFragments = kKeys / 16, kThreads = kWarpSize, kSlots = 3;
  static constexpr int kSlotBytes = kKeys * kDim * 2, kRingBytes = kSlots * kSlotBytes;
  static constexpr int kPitch = kDim + 4;  // floats of a row of sums, which lie in the ring
  static_assert(4 * kFewRows * kPitch <= kRingBytes);
  // Of products with keys, and with values: a thread's elements are those of two queries.
  using Scores = mma::Accumulators<kFragments, 1>;
  using Out = float[kDim / 16][4];
};

// The sum over some keys of a query's row, or of columns of it, as an online softmax has it.
struct PartSum {
  float base = -FLT_MAX, total = 0;

  // Adds another. Returns what columns of the sum, and of the other, are multiplied by.
  __device__ __forceinline__ float2 add(float other_base, float other_total) {
    const float most = fmaxf(base, other_base);
    const float2 by = {exp2_fast(base - most), exp2_fast(other_base - most)};
    base = most;
    total = fmaf(other_total, by.y, total * by.x);
    return by;
  }
};

__device__ __forceinline__ void add_columns(PartSum& sum, float4& to, const PartSum& other,
                                            const float4& from) {
  const float2 by = sum.add(other.base, other.total);
  to.x = fmaf(from.x, by.y, to.x * by.x), to.y = fmaf(from.y, by.y, to.y * by.x);
  to.z = fmaf(from.z, by.y, to.z * by.x), to.w = fmaf(from.w, by.y, to.w * by.x);
}

// Where parts leave their sums: of each warp kFewRows rows.
struct FewSums {
  float4* columns;
  PartSum* sums;
  int parts;  // that have a block each; 1: all have one
  int tiles;

  __device__ __forceinline__ int parts_of(const AttentionParams& params, int keys) const {
    const int all = few_parts(keys, params.kv_heads);
    return parts == 1 ? all : min(all, parts);
  }
  __device__ __forceinline__ int64_t row(const AttentionParams& params, int batch, int head,
                                         int query, int part, int warp) const {
    const int64_t tile = (int64_t{batch} * params.heads + head) * tiles + query / kFewRows;
    return ((tile * parts + part) * kFewWarps + warp) * kFewRows + query % kFewRows;
  }
};

// Eight queries as the right factor of products; zeros outside.
template <typename S>
__device__ __forceinline__ void load_queries(uint32_t (&to)[S::kDim / 16][2],
                                             const AttentionParams& params, const Sequence& s,
                                             int head, int query) {
  using T = typename S::T;
  const int lane = threadIdx.x % kWarpSize, row = query + lane / 4;
  const T* from = row_of<const T>(params.query, s.batch, head, s.query_begin + row);
#pragma unroll
  for (int i = 0; i < S::kDim / 8; ++i) {
    const int col = 8 * i + lane % 4 * 2;
    const bool inside = row < s.queries && col < params.head_dim;
    to[i / 2][i % 2] = inside ? *reinterpret_cast<const uint32_t*>(from + col) : 0;
  }
}

// Sets values to zero to which no query gives weight: hidden keys may hold a NaN. By a warp.
template <typename S>
__device__ __forceinline__ void clear_unseen(char* values, const typename S::Scores& weights) {
  uint32_t seen = 0;
  const int first = threadIdx.x % kWarpSize / 4;
  mma::for_elements<S::kFragments, 1>([&](int m, int n, int e, int row, int) {
    if (!(weights[m][n][e] == 0)) seen |= 1u << (first + row);
  });
  seen = __reduce_or_sync(~0u, seen);
  if (seen == ~0u >> (32 - S::kKeys)) return;
  constexpr int kChunks = mma::Tile<S::kDim>::kChunks;
  for (int at = threadIdx.x % kWarpSize; at < S::kKeys * kChunks; at += kWarpSize) {
    if (!(seen >> at / kChunks & 1)) reinterpret_cast<uint4*>(values)[at] = uint4{};
  }
  __syncwarp();
}

// Turns a slice's products with the queries into weights, and rescales what was summed before.
template <typename S>
__device__ __forceinline__ void weigh(typename S::Scores& scores, const ScoreRules<float>& rules,
                                      bool plain, const TilePlace<true>& place, bool hides,
                                      const Band& band, RowState& rows, typename S::Out& out) {
  constexpr int kM = S::kFragments;
  float unit = static_cast<float>(rules.params.scale * 1.4426950408889634);  // as that of one tile
  if (!plain) unit = apply_options<typename S::T, true, kM, 1>(scores, nullptr, rules, place);
  if (hides) hide_outside(scores, band, place);
  // In the order of softmax_step(): a query's elements two by two.
  float weights[4 * kM], rescale[2];
  const auto in_order = [](int m, int e) { return 4 * m + e % 2 * 2 + e / 2; };
  mma::for_elements<kM, 1>(
      [&](int m, int, int e, int, int) { weights[in_order(m, e)] = scores[m][0][e]; });
  if (softmax_step<Moves::kByFloats, true>(weights, rows, unit, rescale)) {
#pragma unroll
    for (auto& fragment : out) {
#pragma unroll
      for (int e = 0; e < 4; ++e) fragment[e] *= rescale[e % 2];
    }
  }
  mma::for_elements<kM, 1>(
      [&](int m, int, int e, int, int) { scores[m][0][e] = weights[in_order(m, e)]; });
}

// out += values^T x weights.
template <typename S>
__device__ __forceinline__ void add_values(typename S::Out& out, const typename S::Scores& weights,
                                           const mma::LaneRow<S::kDim>& values) {
  using T = typename S::T;
#pragma unroll
  for (int m = 0; m < S::kFragments; ++m) {
    const float(&w)[4] = weights[m][0];
    const uint32_t first = mma::transpose(round_pair(w[0], w[1], T()));
    const uint32_t second = mma::transpose(round_pair(w[2], w[3], T()));
#pragma unroll
    for (int i = 0; i < S::kDim / 16; ++i) {
      uint32_t a[4];
      mma::load_transposed(a, values.at(i, 16 * m));
      mma::multiply(out[i], a, first, second, T());
    }
  }
}

// Adds a part to `sums` and `out`; what is kept of the part is zero again.
template <typename S>
__device__ __forceinline__ void add_part(PartSum (&sums)[2], typename S::Out& out, RowState& rows,
                                         typename S::Out& of_part) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float2 by = sums[r].add(rows.base[r], column_sum(rows.sum[r]));
#pragma unroll
    for (int i = 0; i < S::kDim / 16; ++i) {
#pragma unroll
      for (int e = r; e < 4; e += 2) {
        out[i][e] = fmaf(of_part[i][e], by.y, out[i][e] * by.x);
        of_part[i][e] = 0;
      }
    }
  }
  rows = RowState();
}

// A warp's slices of parts [begin, end) of so many. `sums`, `out`: what they give for the thread's
// two queries.
template <typename S>
__device__ __forceinline__ void walk_parts(const AttentionParams& params, int parts, int begin,
                                           int end, char* ring, const Sequence& s, int head,
                                           int query, bool plain, PartSum (&sums)[2],
                                           typename S::Out& out) {
  using T = typename S::T;
  const Band band = band_of(params, s);
  const int kv_head = head / (params.heads / params.kv_heads);
  const int query_end = min(query + kFewRows, s.queries);
  const Range seen = band.keys_of(query, query_end, s.keys);
  // A part has as many slices for each warp: so a warp goes from one to the next by the same step.
  const int first_key = seen.begin / S::kKeys * S::kKeys;
  const int slices = max(seen.end - first_key + S::kKeys - 1, 0) / S::kKeys;
  const int part_slices = (slices + parts * kFewWarps - 1) / (parts * kFewWarps) * kFewWarps;
  const int first = begin * part_slices + threadIdx.x / kWarpSize,
            last = min(end * part_slices, slices);
  const ScoreRules<float> rules(params, s, head);
  int slice = first, ahead = first, slot = 0;
  // Keys and values have slots by turns. Into the slot at hand go those that are two ahead.
  const auto copy = [&](const AttentionTensor& tensor, int cols) {
    if (ahead < last) {
      copy_rows<S, S::kKeys>(shared_address(ring) + slot * S::kSlotBytes,
                             row_of<const T>(tensor, s.batch, kv_head, s.key_begin),
                             tensor.row_stride, first_key + ahead * S::kKeys, seen, cols);
    }
    commit_copies();
    slot = slot == S::kSlots - 1 ? 0 : slot + 1;
  };
  const auto next_slot = [&] {
    wait_for_copies<S::kSlots - 1>();
    __syncwarp();
    return shared_address(ring) + slot * S::kSlotBytes;
  };
  copy(params.key, params.head_dim);
  copy(params.value, params.value_dim);
  ahead += kFewWarps;
  copy(params.key, params.head_dim);
  uint32_t queries[S::kDim / 16][2];
  load_queries<S>(queries, params, s, head, query);
  RowState rows;
  typename S::Out of_part{};
  while (slice < last) {
    const int key = first_key + slice * S::kKeys;
    typename S::Scores scores;
    mma::clear(scores);
    const auto key_rows = mma::left_rows<S::kDim>(next_slot(), 0);
#pragma unroll
    for (int k = 0; k < S::kDim / 16; ++k) {
#pragma unroll
      for (int m = 0; m < S::kFragments; ++m) {
        uint32_t a[4];
        mma::load_matrices(a, key_rows.at(k, 16 * m));
        mma::multiply(scores[m][0], a, queries[k][0], queries[k][1], T());
      }
    }
    __syncwarp();
    copy(params.value, params.value_dim);
    ahead += kFewWarps;

    const bool hides = key < seen.begin || key + S::kKeys > s.keys ||
                       !band.sees_all(query, query_end, key, key + S::kKeys);
    weigh<S>(scores, rules, plain, TilePlace<true>(s, query, key, 0), hides, band, rows, of_part);

    const uint32_t values = next_slot();
    if (rules.mask != nullptr) clear_unseen<S>(ring + slot * S::kSlotBytes, scores);
    add_values<S>(of_part, scores, mma::right_rows<S::kDim>(values));
    __syncwarp();
    copy(params.key, params.head_dim);
    slice += kFewWarps;
    if ((slice - first) % part_slices == 0 || slice >= last) add_part<S>(sums, out, rows, of_part);
  }
  wait_for_copies<0>();
}

// Divides by the sum, with the sink, and stores four columns of a row.
template <typename T>
__device__ __forceinline__ void store_columns(const AttentionParams& params, const Sequence& s,
                                              int head, int row, int col, const PartSum& sum,
                                              const float4& columns) {
  float factor, lse;
  softmax_end(sum.base, sum.total, read_sink<float>(params, s, head, row), factor, lse);
  T* const to = row_of<T>(params.out, s.batch, head, s.query_begin + row) + col;
  *reinterpret_cast<uint2*>(to) = uint2{round_pair(columns.x * factor, columns.y * factor, T()),
                                        round_pair(columns.z * factor, columns.w * factor, T())};
  if (col == 0) static_cast<float*>(params.lse)[first_lse(params, s, head) + row] = lse;
}

// A tile of a head's queries, and all parts of its keys or one.
template <typename S>
__device__ __forceinline__ void attend(const AttentionParams& params, const FewSums& scratch,
                                       char* shared, const Sequence& s, int head, int query,
                                       int parts, int part, bool plain) {
  constexpr int kPacks = S::kDim / 4;
  __shared__ PartSum of_warps[kFewWarps][kFewRows];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int count = min(kFewRows, s.queries - query);
  const bool alone = scratch.parts == 1;
  char* const ring = shared + warp * S::kRingBytes;
  PartSum sums[2];
  typename S::Out out{};
  walk_parts<S>(params, parts, part, alone ? parts : part + 1, ring, s, head, query, plain, sums,
                out);
  __syncwarp();
  auto* const rows = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane % 4 * 2 + r;
    if (lane < 4) of_warps[warp][row] = sums[r];
#pragma unroll
    for (int i = 0; i < S::kDim / 8; ++i)
      rows[row * S::kPitch + 8 * i + lane / 4] = out[i / 2][i % 2 * 2 + r];
  }
  const auto columns_of = [&](int w, int row, int col) {
    const auto* from = reinterpret_cast<const float*>(shared + w * S::kRingBytes);
    return *reinterpret_cast<const float4*>(from + row * S::kPitch + col);
  };
  if (!alone) {
    __syncwarp();
    const int64_t first = scratch.row(params, s.batch, head, query, part, warp);
    if (lane < count) scratch.sums[first + lane] = of_warps[warp][lane];
    for (int at = lane; at < count * kPacks; at += kWarpSize)
      scratch.columns[first * kPacks + at] = columns_of(warp, at / kPacks, at % kPacks * 4);
    __syncwarp();
    return;
  }
  __syncthreads();
  for (int at = threadIdx.x; at < count * kPacks; at += kWarpSize * kFewWarps) {
    const int row = at / kPacks, col = at % kPacks * 4;
    if (col >= params.value_dim) continue;
    PartSum sum;
    float4 columns{};
    for (int w = 0; w < kFewWarps; ++w)
      add_columns(sum, columns, of_warps[w][row], columns_of(w, row, col));
    store_columns<typename S::T>(params, s, head, query + row, col, sum, columns);
  }
  __syncthreads();
}

// A block has a tile of queries of a head, and all parts of their keys or one, of every `splits`-th
// sequence.
template <int kIndex>
__global__ void __launch_bounds__(kWarpSize* kFewWarps)
    attention_few_queries(const __grid_constant__ AttentionParams params,
                          const __grid_constant__ FewSums scratch, int splits, bool plain) {
  extern __shared__ __align__(1024) char shared[];
  if (scratch.parts > 1) launch_dependents();
  const int part = blockIdx.x % scratch.parts, tile = blockIdx.x / scratch.parts % scratch.tiles;
  const int pair = blockIdx.x / scratch.parts / scratch.tiles, head = pair % params.heads;
  for (int first = pair / params.heads; first < params.batch; first += kWarpSize * splits) {
    // A lane looks at a sequence.
    const int own = first + threadIdx.x % kWarpSize * splits;
    bool takes = false;
    if (own < params.batch) {
      const Sequence s = sequence_of(params, own);
      takes = params.is_few(s.queries, s.keys) && kFewRows * tile < s.queries &&
              part < scratch.parts_of(params, s.keys);
    }
    for (uint32_t left = __ballot_sync(~0u, takes); left != 0; left &= left - 1) {
      const Sequence s = sequence_of(params, first + (__ffs(left) - 1) * splits);
      const auto run = [&](auto zero) {
        attend<FewShape<decltype(zero), kIndex>>(params, scratch, shared, s, head, kFewRows * tile,
                                                 scratch.parts_of(params, s.keys), part, plain);
      };
      params.dtype == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
    }
  }
}

// Adds up what parts have left. A block has a row of a head of a sequence; a thread four columns of
// what one warp of each part has.
__global__ void __launch_bounds__(kFewWarps * 64)
    attention_join_parts(const __grid_constant__ AttentionParams params,
                         const __grid_constant__ FewSums scratch) {
  __shared__ PartSum sums[kFewWarps * 64];
  __shared__ float4 columns[kFewWarps * 64];
  meet_previous_kernel();
  const int head = blockIdx.x % params.heads, row = blockIdx.y, packs = blockDim.x / kFewWarps;
  const int pack = threadIdx.x % packs, warp = threadIdx.x / packs;
  const Sequence s = sequence_of(params, blockIdx.x / params.heads);
  if (!params.is_few(s.queries, s.keys) || row >= s.queries) return;
  const int parts = scratch.parts_of(params, s.keys);
  PartSum sum;
  float4 of_columns{};
#pragma unroll 4
  for (int part = 0; part < parts; ++part) {
    const int64_t at = scratch.row(params, s.batch, head, row, part, warp);
    add_columns(sum, of_columns, scratch.sums[at], scratch.columns[at * packs + pack]);
  }
  sums[threadIdx.x] = sum;
  columns[threadIdx.x] = of_columns;
  __syncthreads();
  if (warp != 0 || 4 * pack >= params.value_dim) return;
  sum = {};
  of_columns = {};
  for (int w = 0; w < kFewWarps; ++w)
    add_columns(sum, of_columns, sums[w * packs + pack], columns[w * packs + pack]);
  const auto store = [&](auto zero) {
    store_columns<decltype(zero)>(params, s, head, row, 4 * pack, sum, of_columns);
  };
  params.dtype == DType::kFloat16 ? store(__half()) : store(__nv_bfloat16());
}

}  // namespace portable

cudaError_t attention_forward_few(const AttentionParams& params, const DeviceProperties& device,
                                  void* scratch, cudaStream_t stream) {
  using namespace portable;
  const FewPlan plan = few_plan(params, device);
  auto* const sums = reinterpret_cast<PartSum*>(static_cast<char*>(scratch) + plan.column_bytes);
  const FewSums of_parts{static_cast<float4*>(scratch), sums, plan.parts, plan.tiles};
  const auto run = [&](auto kernel, auto shape) {
    using S = decltype(shape);
    const auto pairs = static_cast<unsigned>(plan.tiles * params.heads * plan.splits);
    const cudaError_t error = launch(kernel, dim3(plan.parts * pairs), dim3(kWarpSize * kFewWarps),
                                     {kFewWarps * S::kRingBytes}, stream, params, of_parts,
                                     plan.splits, attention_scores_are_plain(params));
    if (error != cudaSuccess || plan.parts == 1) return error;
    const dim3 rows(params.batch * params.heads, kFewRows * plan.tiles);
    return launch(attention_join_parts, rows, dim3(kFewWarps * S::kDim / 4),
                  {0, 1, /*overlaps_previous=*/device.max_cluster_blocks > 1}, stream, params,
                  of_parts);
  };
  const int index = attention_tiles_index(params.head_dim, params.value_dim);
  return index == 0   ? run(attention_few_queries<0>, FewShape<__half, 0>())
         : index == 1 ? run(attention_few_queries<1>, FewShape<__half, 1>())
                      : run(attention_few_queries<2>, FewShape<__half, 2>());
}

}  // namespace fused_norm
