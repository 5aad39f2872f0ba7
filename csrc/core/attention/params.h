// What a call of attention is asked: plain C++, so that plans compile without a CUDA toolkit.
#pragma once

#include <cstdint>

#include "core/common/types.h"

#ifdef __CUDACC__
#define FUSED_NORM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FUSED_NORM_HOST_DEVICE inline
#endif

namespace fused_norm {

// A tensor of (batch, head, row, column); strides in elements, columns contiguous. A packed tensor
// (total rows, head, column) has batch stride 0 and its sequences one after the other.
struct AttentionTensor {
  void* data;
  int64_t batch_stride, head_stride, row_stride;
};

// A number of an additive mask that is at most this hides the key, as -inf does. The lowest numbers
// of fp32 and bf16 are such: times log2(e) they are infinite.
constexpr float kHidingMask = -1e38f;

// An additive or boolean mask over (batch, query head, query, key); a stride is 0 where the mask
// broadcasts. Null data: none. Aligned rows, if not all one, can be read in packs of 16 bytes, but
// for calls of one tile (plan.h).
struct AttentionMask {
  void* data;
  bool boolean;  // else of `dtype`: the query's, or fp32. True: the key takes part
  DType dtype;
  int64_t batch_stride, head_stride, row_stride, key_stride;
};

// The most queries or keys of a dense sequence, or of all packed ones: sums and differences of a
// few such numbers fit in 32 bits.
constexpr int32_t kMaxAttentionRows = 1 << 29;

// Sinks of the heads, contiguous.
struct AttentionSinks {
  const void* data;  // null: none
  DType dtype;       // the query's, or fp32 (fp64 for fp64)
  int32_t rows;      // forward: the rows of a head have so many, one each; 0: they share one

  // That of a row, which may lie past the head's last one.
  FUSED_NORM_HOST_DEVICE int place(int head, int row) const {
    return rows == 0 ? head : head * rows + (row < rows ? row : rows - 1);
  }
};

// What forward and backward share. Key and value have `kv_heads` heads; query head h reads head
// h / (heads / kv_heads) of them.
//
// The score of query i and key j of a sequence of `q` queries and `k` keys is, in this order,
//   s = (query . key) * scale
//   s = softcap * tanh(s / softcap)                     with softcap > 0
//   s -= alibi_slope * |i + k - q - j|                  with alibi_slopes
//   s += mask, or the key is hidden where it is False   with a mask
// and the key is hidden unless -window_left <= j - i - shift <= window_right, with shift = k - q,
// or 0 with `top_left`. A sink is a logit of its own per head that takes part in the denominator
// and has no value; the log-sum-exp includes it.
//
// A query that sees nothing has output 0, a log-sum-exp of -inf (or its sink), and no gradient.
struct AttentionParams {
  DType dtype;  // of query, key, value, out and their gradients
  int32_t batch, heads, kv_heads;
  int32_t queries, keys;  // of a sequence; of the longest one where sequences are packed
  int32_t head_dim, value_dim;
  // Forward: sequences of at most so many queries may have their keys in parts; 0: none. Set by
  // with_group_as_queries().
  int32_t few_queries;

  // Packed sequences: batch + 1 offsets each, on the device, and how many rows the tensors have.
  // Null: dense. Kernels clamp offsets to [0, total] and to ascending order; rows outside every
  // sequence get zeros (lse: -inf) by the kernels.
  const int32_t* query_offsets;
  const int32_t* key_offsets;
  int32_t total_queries, total_keys;
  FUSED_NORM_HOST_DEVICE bool packed() const { return query_offsets != nullptr; }

  double scale;                       // any finite number, 0 and negative ones too
  double softcap;                     // 0: none
  int32_t window_left, window_right;  // negative: no limit on that side. causal: window_right 0
  bool top_left;
  AttentionMask mask;
  const float* alibi_slopes;  // (heads) or (batch, heads); null: none
  int64_t alibi_batch_stride;
  AttentionSinks sink;
  uint32_t dropout_threshold;  // dropout.h; 0: no dropout
  double dropout_scale;        // of the probabilities that are kept
  const int64_t* rng;          // with dropout: seed and offset, on the device

  AttentionTensor query, key, value, out;
  // fp32 (fp64 for fp64), contiguous: (batch, heads, queries), packed (heads, total_queries).
  void* lse;
};

// The families of kernels. What each takes: plan.h.
enum class AttentionTier : uint8_t {
  kAuto,      // the fastest that takes the call
  kPlain,     // CUDA cores: everything
  kPortable,  // mma.sync: 16 bit, head dimensions up to 256; compute capability 8.0 on
  kHopper,    // wgmma: compute capability 9.0
};

struct AttentionBackwardParams {
  AttentionParams forward;  // out and lse hold forward's results; out is only read
  AttentionTensor dout;
  const void* dlse;  // as lse, contiguous; null: zero
  // Gradients; null data when not asked for. Every element is written, rows outside every sequence
  // with zeros.
  AttentionTensor dquery, dkey, dvalue;
  // Of an additive mask: summed over what the mask broadcasts over, in a fixed order; contiguous,
  // of the mask's dtype and of shape (mask_shape[0..3]), each the full size or 1.
  void* dmask;
  int32_t mask_shape[4];
  void* dsink;  // (heads), of the sink's dtype
};

// kAuto's choice; another tier is returned if it takes the call, else kAuto.
AttentionTier attention_tier(const AttentionParams& params, const DeviceProperties& device,
                             AttentionTier wanted);

// Whether the tensor-core tiers can read or write a tensor in place, 16 bytes at a time: its data
// and its strides are multiples of 16 bytes. Callers copy another tensor once; the plain tier takes
// any.
bool attention_is_aligned(const AttentionTensor& tensor, DType dtype);

}  // namespace fused_norm
