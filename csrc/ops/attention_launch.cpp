// A call as the kernels and the CPU path take it: copies where they could not read a tensor in
// place, and the tier.
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/attention/dropout.h"
#include "core/attention/plan.h"
#include "cpu/attention.h"
#include "ops/attention.h"
#include "ops/launch.h"

#ifdef FUSED_NORM_WITH_CUDA
#include "core/attention/attention.h"
#endif

namespace fused_norm::ops {

static constexpr const char* kTierNames[] = {"auto", "plain", "portable",
                                             "hopper"};  // by AttentionTier
static std::atomic<AttentionTier> wanted_tier{AttentionTier::kAuto};

void force_attention_tier(const std::string& name) {
  wanted_tier = static_cast<AttentionTier>(tier_number(kTierNames, name));
}

namespace {

using at::Tensor;
using c10::SymInt;

// A dimension of size 1 may have any stride.
int64_t stride_of(const Tensor& t, int64_t d) { return t.size(d) == 1 ? 0 : t.stride(d); }

AttentionTensor as_tensor(const Tensor& t, bool packed) {
  void* data = const_cast<void*>(t.const_data_ptr());
  if (packed) return {data, 0, stride_of(t, 1), stride_of(t, 0)};
  return {data, stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
}

// Columns that tensor cores take: whole packs of 16 bytes of a 16-bit type.
int64_t padded(int64_t cols) { return (cols + 7) / 8 * 8; }

// A call's parameters, and the tensors that own what they point to.
struct Launch {
  AttentionParams params{};
  bool packed;
  bool aligned = false;  // tensors are as the tensor-core tiers read and write them
  QueryKeyValue qkv;
  std::vector<Tensor> owned;

  // Whether sinks and their gradients are in fp64.
  bool wide_sink() const { return params.dtype == DType::kFloat64 || qkv[0].is_cpu(); }

  // A tensor's elements next to each other, as long as this lives.
  const void* contiguous(const Tensor& t) {
    return owned.emplace_back(t.contiguous()).const_data_ptr();
  }

  void* workspace(size_t bytes) {
    if (bytes == 0) return nullptr;
    const Tensor memory = new_tensor(qkv[0], {static_cast<int64_t>(bytes)}, at::kByte);
    return owned.emplace_back(memory).mutable_data_ptr();
  }

  // The tensor as kernels read it: itself, or one copy.
  Tensor readable(const Tensor& t) const {
    if (aligned && t.size(-1) % 8 != 0) {
      return at::constant_pad_nd(t, {0, padded(t.size(-1)) - t.size(-1)});
    }
    const Tensor rows = with_dense_rows(t);
    if (!aligned || attention_is_aligned(as_tensor(rows, packed), params.dtype)) return rows;
    return rows.clone(at::MemoryFormat::Contiguous);
  }

  // A mask whose rows tensor cores read in packs of 16 bytes, the last one too: itself, or one
  // copy, of what is not broadcast. A mask of keys alone, one broadcast over them, and that of a
  // call of one tile are read in place.
  Tensor readable_mask(Tensor mask) const {
    const int64_t pack = 16 / mask.element_size(), keys = mask.size(3);
    bool fits = reinterpret_cast<uintptr_t>(mask.const_data_ptr()) % 16 == 0 &&
                mask.stride(3) == 1 && keys % pack == 0;
    for (int d = 0; d < 3; ++d) fits &= stride_of(mask, d) % pack == 0;
    if (!aligned || fits || stride_of(mask, 2) == 0 || stride_of(mask, 3) == 0 ||
        attention_is_one_tile(params))
      return mask;
    for (int d = 0; d < 3; ++d) {
      if (mask.stride(d) == 0) mask = mask.narrow(d, 0, 1);
    }
    c10::SymDimVector sizes(mask.sym_sizes());
    sizes[3] = (keys + pack - 1) / pack * pack;
    return new_tensor(mask, sizes, mask.scalar_type()).narrow(3, 0, keys).copy_(mask);
  }

  // A tensor that kernels write: `t` itself, or a wider one to be copied from.
  Tensor writable(const Tensor& t) const {
    if (!t.defined() || !aligned || t.size(-1) % 8 == 0) return t;
    c10::SymDimVector sizes(t.sym_sizes());
    sizes.back() = padded(t.size(-1));
    return new_tensor(t, sizes, t.scalar_type());
  }
};

// What writable() gave, into what was asked for.
void finish(const Tensor& written, const Tensor& t) {
  if (t.defined() && !written.is_same(t)) t.copy_(written.narrow(-1, 0, t.size(-1)));
}

int32_t narrowed(int64_t size, const char* what, int32_t most = INT32_MAX) {
  TORCH_CHECK(size <= most, what, " is ", size, "; at most ", most, " is supported");
  return static_cast<int32_t>(size);
}

int32_t limit_of(const std::optional<SymInt>& window) {
  if (!window.has_value()) return -1;
  const int64_t limit = window->expect_int();
  return limit > INT32_MAX ? -1 : static_cast<int32_t>(limit);
}

// A hint, by which kernels choose their grid: no result depends on it.
int32_t longest(const SymInt& hint, int32_t total) {
  const int64_t rows = hint.expect_int();
  return rows > 0 ? static_cast<int32_t>(std::min<int64_t>(rows, total)) : total;
}

void set_shape(const AttentionCall& call, Launch* launch) {
  AttentionParams& p = launch->params;
  const auto& [query, key, value] = launch->qkv;
  const bool packed = launch->packed;
  p.heads = narrowed(query.size(1), "the number of heads");
  p.kv_heads = narrowed(key.size(1), "the number of heads");
  p.head_dim = static_cast<int32_t>(query.size(-1));
  p.value_dim = static_cast<int32_t>(value.size(-1));
  if (packed) {
    p.query_offsets = static_cast<const int32_t*>(launch->contiguous(*call.cu_seqlens_q));
    p.key_offsets = static_cast<const int32_t*>(launch->contiguous(*call.cu_seqlens_k));
    p.batch = narrowed(call.cu_seqlens_q->size(0) - 1, "the number of sequences");
    p.total_queries = narrowed(query.size(0), "the number of queries", kMaxAttentionRows);
    p.total_keys = narrowed(key.size(0), "the number of keys", kMaxAttentionRows);
    p.queries = longest(call.max_seqlen_q, p.total_queries);
    p.keys = longest(call.max_seqlen_k, p.total_keys);
  } else {
    p.batch = narrowed(query.size(0), "the batch size");
    p.queries = narrowed(query.size(2), "the number of queries", kMaxAttentionRows);
    p.keys = narrowed(key.size(2), "the number of keys", kMaxAttentionRows);
  }
  p.query = as_tensor(query, packed);
  p.key = as_tensor(key, packed);
  p.value = as_tensor(value, packed);
}

void set_options(const AttentionCall& call, Launch* launch) {
  AttentionParams& p = launch->params;
  p.scale = call.score_scale();
  p.softcap = call.softcap;
  p.window_left = limit_of(call.window_left);
  p.window_right = limit_of(call.window_right);
  p.top_left = call.top_left;
  p.dropout_threshold = dropout_threshold(call.dropout_p);
  p.dropout_scale = dropout_scale(p.dropout_threshold);
  if (has(call.alibi_slopes)) {
    p.alibi_slopes = static_cast<const float*>(launch->contiguous(*call.alibi_slopes));
    p.alibi_batch_stride = call.alibi_slopes->dim() == 2 ? p.heads : 0;
  }
  if (has(call.sink)) {
    const Tensor sink = launch->wide_sink() ? call.sink->to(at::kDouble) : *call.sink;
    p.sink = {launch->contiguous(sink), to_dtype(sink.scalar_type())};
  }
  if (call.dropout_p > 0) p.rng = static_cast<const int64_t*>(launch->contiguous(*call.rng));
  if (has(call.attn_mask)) {
    const Tensor read =
        launch->owned.emplace_back(launch->readable_mask(of_four_dims(*call.attn_mask)));
    const Tensor mask = read.expand({p.batch, p.heads, p.queries, p.keys});
    const bool boolean = mask.scalar_type() == at::kBool;
    const DType dtype = boolean ? p.dtype : to_dtype(mask.scalar_type());
    const auto [data, batch, head, row] = as_tensor(mask, /*packed=*/false);
    p.mask = {data, boolean, dtype, batch, head, row, stride_of(mask, 3)};
  }
}

#ifdef FUSED_NORM_WITH_CUDA

// Whether a tensor-core tier takes the call once its tensors are aligned and padded. The portable
// tier takes all that Hopper's does.
bool takes_aligned(const QueryKeyValue& qkv, AttentionParams params) {
  for (const Tensor& t : {qkv[0], qkv[2]}) {
    TORCH_CHECK(t.size(-1) <= kMaxHeadDim, "query has head dim ", qkv[0].size(-1), " and value ",
                qkv[2].size(-1), "; on CUDA at most ", kMaxHeadDim, " is supported");
  }
  if (wanted_tier.load(std::memory_order_relaxed) == AttentionTier::kPlain) return false;
  params.head_dim = static_cast<int32_t>(padded(qkv[0].size(-1)));
  params.value_dim = static_cast<int32_t>(padded(qkv[2].size(-1)));
  return attention_tier_takes(AttentionTier::kPortable, params, current_device_properties());
}

AttentionTier tier_of(const AttentionParams& params) {
  const AttentionTier wanted = wanted_tier.load(std::memory_order_relaxed);
  const AttentionTier tier = attention_tier(params, current_device_properties(), wanted);
  TORCH_CHECK(wanted == AttentionTier::kAuto || tier == wanted, "tier is '",
              kTierNames[static_cast<int>(wanted)], "', which does not take this call: head dim ",
              params.head_dim, ", of values ", params.value_dim);
  return tier;
}

#endif  // FUSED_NORM_WITH_CUDA

Launch prepared(const AttentionCall& call, const QueryKeyValue& qkv) {
  Launch launch;
  launch.packed = call.is_packed();
  launch.params.dtype = to_dtype(qkv[0].scalar_type());
#ifdef FUSED_NORM_WITH_CUDA
  if (qkv[0].is_cuda()) launch.aligned = takes_aligned(qkv, launch.params);
#endif
  for (int i = 0; i < 3; ++i) launch.qkv[i] = launch.readable(qkv[i]);
  set_shape(call, &launch);
  set_options(call, &launch);
  return launch;
}

}  // namespace

void run_attention_forward(const AttentionCall& call, const QueryKeyValue& qkv, const Tensor& out,
                           const Tensor& lse) {
  const c10::DeviceGuard guard(out.device());
  Launch launch = prepared(call, qkv);
  AttentionParams& params = launch.params;
  const Tensor written = launch.writable(out);
  params.out = as_tensor(written, launch.packed);
  params.lse = lse.mutable_data_ptr();
  if (out.is_cpu()) {
    if (launch.packed) {
      out.zero_();
      lse.fill_(-std::numeric_limits<double>::infinity());
    }
    cpu::attention_forward(params);
  }
#ifdef FUSED_NORM_WITH_CUDA
  if (out.is_cuda()) {
    const AttentionTier tier = tier_of(params);
    void* const workspace = launch.workspace(attention_forward_workspace(params, tier));
    check_launch(launch_attention_forward(params, current_device_properties(), tier, workspace,
                                          at::cuda::getCurrentCUDAStream()));
  }
#endif
  finish(written, out);
}

void run_attention_backward(const AttentionBackwardCall& inputs, const QueryKeyValue& qkv,
                            const NewGradients& made) {
  const c10::DeviceGuard guard(inputs.out.device());
  Launch launch = prepared(inputs.forward, qkv);
  const Tensor out_rows = launch.readable(inputs.out), dout_rows = launch.readable(inputs.dout);
  AttentionBackwardParams params{};
  params.forward = launch.params;
  params.forward.out = as_tensor(out_rows, launch.packed);
  params.forward.lse = const_cast<void*>(launch.contiguous(inputs.lse));
  params.dout = as_tensor(dout_rows, launch.packed);
  if (has(inputs.dlse)) params.dlse = launch.contiguous(*inputs.dlse);
  QueryKeyValue written;
  AttentionTensor* const gradients[] = {&params.dquery, &params.dkey, &params.dvalue};
  for (int i = 0; i < 3; ++i) {
    written[i] = launch.writable(made.qkv[i]);
    if (written[i].defined()) *gradients[i] = as_tensor(written[i], launch.packed);
  }
  if (const Tensor& mask = made.returned[kMask]; mask.defined()) {
    params.dmask = mask.mutable_data_ptr();
    const Tensor shaped = of_four_dims(mask);
    for (int d = 0; d < 4; ++d) params.mask_shape[d] = static_cast<int32_t>(shaped.size(d));
  }
  const Tensor& sink = made.returned[kSink];
  const bool wide = sink.defined() && launch.wide_sink();
  const Tensor written_sink = wide ? sink.to(at::kDouble) : sink;  // as the launch's sink
  if (sink.defined()) params.dsink = written_sink.mutable_data_ptr();
  if (inputs.out.is_cpu()) {
    if (launch.packed) zeroed(made.returned);
    cpu::attention_backward(params);
  }
#ifdef FUSED_NORM_WITH_CUDA
  if (inputs.out.is_cuda()) {
    const AttentionTier tier = tier_of(params.forward);
    void* const workspace = launch.workspace(attention_backward_workspace(params, tier));
    check_launch(launch_attention_backward(params, current_device_properties(), tier, workspace,
                                           at::cuda::getCurrentCUDAStream()));
  }
#endif
  for (int i = 0; i < 3; ++i) finish(written[i], made.qkv[i]);
  if (!written_sink.is_same(sink)) sink.copy_(written_sink);
}

}  // namespace fused_norm::ops
