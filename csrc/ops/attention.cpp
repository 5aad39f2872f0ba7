#include "ops/attention.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/SymBool.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "cpu/attention.h"
#include "ops/checks.h"

#ifdef FUSED_NORM_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/constant_pad_nd.h>
#include <c10/cuda/CUDAGuard.h>

#include "core/attention/attention.h"
#include "core/attention/plan.h"
#include "ops/device.h"
#include "ops/rows.h"
#endif

namespace fused_norm::ops {
namespace {

using at::ScalarType;
using at::Tensor;
using c10::SymInt;

bool has(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

ScalarType lse_type(ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// Checks.

void check_beside(const Tensor& tensor, const char* name, const Tensor& query) {
  check_layout(tensor, name);
  TORCH_CHECK(tensor.device() == query.device(), name, " is on ", tensor.device(),
              ", but query is on ", query.device());
}

// Of an option that has the precision of query, or fp32.
void check_option_type(const Tensor& tensor, const char* name, const Tensor& query,
                       const char* or_else) {
  const ScalarType type = tensor.scalar_type();
  TORCH_CHECK(type == query.scalar_type() || type == at::kFloat, name, " must be ", or_else,
              "float32 or query's ", query.scalar_type(), ", but is ", type);
}

void check_offsets(const Tensor& offsets, const char* name, const Tensor& query) {
  check_beside(offsets, name, query);
  TORCH_CHECK(offsets.scalar_type() == at::kInt, name, " must be int32, but is ",
              offsets.scalar_type());
  TORCH_CHECK(offsets.dim() == 1, name, " must have one dimension, but has shape ",
              offsets.sym_sizes());
  TORCH_SYM_CHECK(offsets.sym_size(0).sym_ge(1), name,
                  " must hold the number of sequences and one more offsets, but is empty");
}

void check_tensors(const AttentionCall& call, const std::array<Tensor, 3>& qkv) {
  const auto& [query, key, value] = qkv;
  const char* names[] = {"query", "key", "value"};
  check_floating(query.scalar_type(), "query");
  const int64_t dims = call.is_packed() ? 3 : 4;
  for (int i = 0; i < 3; ++i) {
    check_beside(qkv[i], names[i], query);
    TORCH_CHECK(qkv[i].scalar_type() == query.scalar_type(), names[i], " is ", qkv[i].scalar_type(),
                ", but query is ", query.scalar_type(),
                ": query, key and value must have one dtype");
    TORCH_CHECK(qkv[i].dim() == dims, names[i], " must be ",
                call.is_packed() ? "(rows, heads, head dim) with cu_seqlens"
                                 : "(batch, heads, rows, head dim)",
                ", but has shape ", qkv[i].sym_sizes());
  }
  const auto q = query.sym_sizes(), k = key.sym_sizes(), v = value.sym_sizes();
  const int64_t heads = 1, rows = call.is_packed() ? 0 : 2;
  if (!call.is_packed()) {
    TORCH_SYM_CHECK(k[0].sym_eq(q[0]), "key has batch size ", k[0], ", but query has ", q[0]);
    TORCH_SYM_CHECK(v[0].sym_eq(q[0]), "value has batch size ", v[0], ", but query has ", q[0]);
  }
  TORCH_SYM_CHECK(v[heads].sym_eq(k[heads]), "value has ", v[heads], " heads, but key has ",
                  k[heads]);
  TORCH_SYM_CHECK(v[rows].sym_eq(k[rows]), "value has ", v[rows], " rows, but key has ", k[rows]);
  TORCH_SYM_CHECK(k[dims - 1].sym_eq(q[dims - 1]), "key has head dim ", k[dims - 1],
                  ", but query has ", q[dims - 1]);
  TORCH_SYM_CHECK(q[dims - 1].sym_ge(1), "query must have a head dim of at least 1, but has 0");
  TORCH_SYM_CHECK(v[dims - 1].sym_ge(1), "value must have a head dim of at least 1, but has 0");
  TORCH_SYM_CHECK(k[heads].sym_ge(1), "key must have at least one head, but has 0");
  TORCH_SYM_CHECK((q[heads] % k[heads]).sym_eq(0), "query has ", q[heads],
                  " heads, which is no multiple of key's ", k[heads]);
}

void check_mask(const Tensor& mask, const AttentionCall& call, const Tensor& query,
                const Tensor& key) {
  check_beside(mask, "attn_mask", query);
  if (mask.scalar_type() != at::kBool) check_option_type(mask, "attn_mask", query, "bool, ");
  TORCH_CHECK(!call.is_packed(), "attn_mask of shape ", mask.sym_sizes(),
              " cannot be combined with cu_seqlens");
  const SymInt full[] = {query.sym_size(0), query.sym_size(1), query.sym_size(2), key.sym_size(2)};
  const int64_t missing = 4 - mask.dim();
  bool broadcasts = missing >= 0;
  for (int64_t d = 0; broadcasts && d < mask.dim(); ++d) {
    broadcasts = mask.sym_size(d) == full[d + missing] || mask.sym_size(d) == 1;
  }
  TORCH_CHECK(broadcasts, "attn_mask has shape ", mask.sym_sizes(),
              ", which does not broadcast to (batch, heads, queries, keys) = (", full[0], ", ",
              full[1], ", ", full[2], ", ", full[3], ")");
}

void check_options(const AttentionCall& call) {
  TORCH_CHECK(std::isfinite(call.scale), "scale must be finite, but is ", call.scale);
  TORCH_CHECK(std::isfinite(call.softcap) && call.softcap >= 0,
              "softcap must be finite and not negative, but is ", call.softcap);
  TORCH_CHECK(call.dropout_p >= 0 && call.dropout_p < 1,
              "dropout_p must be at least 0 and below 1, but is ", call.dropout_p);
  if (call.window_left.has_value()) {
    TORCH_SYM_CHECK(call.window_left->sym_ge(0),
                    "window's left limit must not be negative, but is ", *call.window_left);
  }
  if (call.window_right.has_value()) {
    TORCH_SYM_CHECK(call.window_right->sym_ge(0),
                    "window's right limit must not be negative, but is ", *call.window_right);
  }
}

SymInt sequences_of(const AttentionCall& call) {
  return call.is_packed() ? call.cu_seqlens_q->sym_size(0) - 1 : call.query.sym_size(0);
}

}  // namespace

std::array<Tensor, 3> AttentionCall::apart() const {
  const int64_t dims = is_packed() ? 3 : 4;
  const auto check = [&](const Tensor& tensor, int64_t count, const char* name,
                         const char* missing) {
    TORCH_CHECK(tensor.dim() == dims + 1 && tensor.sym_size(0) == count, name, " must hold ", count,
                " tensors of ", dims, " dimensions, as there is no ", missing, ", but has shape ",
                tensor.sym_sizes());
  };
  if (!has(key)) {
    TORCH_CHECK(!has(value), "value has shape ", value->sym_sizes(), ", but there is no key");
    check(query, 3, "query", "key");
    return {query.select(0, 0), query.select(0, 1), query.select(0, 2)};
  }
  if (has(value)) return {query, *key, *value};
  check(*key, 2, "key", "value");
  return {query, key->select(0, 0), key->select(0, 1)};
}

void check_attention(const AttentionCall& call) {
  check_layout(call.query, "query");
  TORCH_CHECK(has(call.cu_seqlens_q) == has(call.cu_seqlens_k),
              "cu_seqlens_q and cu_seqlens_k must both be given, but cu_seqlens_",
              has(call.cu_seqlens_q) ? "k" : "q", " is None");
  const auto qkv = call.apart();
  const Tensor& query = qkv[0];
  check_tensors(call, qkv);
  if (call.is_packed()) {
    check_offsets(*call.cu_seqlens_q, "cu_seqlens_q", query);
    check_offsets(*call.cu_seqlens_k, "cu_seqlens_k", query);
    TORCH_SYM_CHECK(call.cu_seqlens_k->sym_size(0).sym_eq(call.cu_seqlens_q->sym_size(0)),
                    "cu_seqlens_k has ", call.cu_seqlens_k->sym_size(0),
                    " elements, but cu_seqlens_q has ", call.cu_seqlens_q->sym_size(0));
    TORCH_SYM_CHECK(call.max_seqlen_q.sym_ge(0), "max_seqlen_q must not be negative, but is ",
                    call.max_seqlen_q);
    TORCH_SYM_CHECK(call.max_seqlen_k.sym_ge(0), "max_seqlen_k must not be negative, but is ",
                    call.max_seqlen_k);
  }
  const SymInt heads = query.sym_size(1);
  if (has(call.attn_mask)) check_mask(*call.attn_mask, call, query, qkv[1]);
  if (has(call.alibi_slopes)) {
    const Tensor& slopes = *call.alibi_slopes;
    check_beside(slopes, "alibi_slopes", query);
    TORCH_CHECK(slopes.scalar_type() == at::kFloat, "alibi_slopes must be float32, but is ",
                slopes.scalar_type());
    const SymInt batch = sequences_of(call);
    const bool fits =
        (slopes.dim() == 1 && slopes.sym_size(0) == heads) ||
        (slopes.dim() == 2 && slopes.sym_size(0) == batch && slopes.sym_size(1) == heads);
    TORCH_CHECK(fits, "alibi_slopes must be (heads,) = (", heads, ",) or (batch, heads) = (", batch,
                ", ", heads, "), but has shape ", slopes.sym_sizes());
  }
  if (has(call.sink)) {
    check_beside(*call.sink, "sink", query);
    check_option_type(*call.sink, "sink", query, "");
    TORCH_CHECK(call.sink->dim() == 1 && call.sink->sym_size(0) == heads,
                "sink must be (heads,) = (", heads, ",), but has shape ", call.sink->sym_sizes());
  }
  check_options(call);
  if (call.dropout_p > 0) {
    TORCH_CHECK(has(call.rng), "rng must hold a seed and an offset with dropout_p ", call.dropout_p,
                ", but is None");
    check_beside(*call.rng, "rng", query);
    TORCH_CHECK(
        call.rng->scalar_type() == at::kLong && call.rng->dim() == 1 && call.rng->sym_size(0) == 2,
        "rng must be int64 of shape (2,), but is ", call.rng->scalar_type(), " of shape ",
        call.rng->sym_sizes());
  }
}

namespace {

// Layouts.

// Columns next to each other; one copy where they are not.
Tensor with_dense_rows(const Tensor& tensor) {
  const bool dense = tensor.sym_size(-1) == 1 || tensor.sym_stride(-1) == 1;
  return dense ? tensor : tensor.contiguous();
}

Tensor new_gradient(const Tensor& of) { return at::empty_like(with_dense_rows(of)); }

// In query's own order of strides.
Tensor new_out(const Tensor& query, const SymInt& value_dim) {
  const Tensor like = with_dense_rows(query);
  if (like.sym_size(-1) == value_dim) return at::empty_like(like);
  c10::SymDimVector sizes(like.sym_sizes());
  sizes.back() = value_dim;
  return at::empty_like(like.narrow(-1, 0, 1).expand_symint(sizes));
}

Tensor new_lse(const AttentionCall& call, const Tensor& query) {
  const auto options = query.options().dtype(lse_type(query.scalar_type()));
  if (call.is_packed()) {
    return at::empty_symint({query.sym_size(1), query.sym_size(0)}, options);
  }
  return at::empty_symint({query.sym_size(0), query.sym_size(1), query.sym_size(2)}, options);
}

// (batch, heads, rows, columns) of either form; of (heads, rows) without columns.
Tensor as_dense(const Tensor& tensor, bool packed) {
  return packed ? tensor.transpose(0, 1).unsqueeze(0) : tensor;
}

// A mask of four dimensions.
Tensor of_four_dims(Tensor mask) {
  while (mask.dim() < 4) mask = mask.unsqueeze(0);
  return mask;
}

// Where gradients are written: views of what is returned.
struct NewGradients {
  AttentionGradients returned;
  Tensor query, key, value;
};

NewGradients new_gradients(const AttentionCall& call, const std::array<bool, 5>& wanted) {
  NewGradients made;
  if (!has(call.key)) {
    if (!wanted[0]) return made;
    const Tensor& all = made.returned.query = new_gradient(call.query);
    made.query = all.select(0, 0);
    made.key = all.select(0, 1);
    made.value = all.select(0, 2);
    return made;
  }
  if (wanted[0]) made.query = made.returned.query = new_gradient(call.query);
  if (!has(call.value)) {
    if (!wanted[1]) return made;
    const Tensor& both = made.returned.key = new_gradient(*call.key);
    made.key = both.select(0, 0);
    made.value = both.select(0, 1);
    return made;
  }
  if (wanted[1]) made.key = made.returned.key = new_gradient(*call.key);
  if (wanted[2]) made.value = made.returned.value = new_gradient(*call.value);
  return made;
}

// The CPU.

// Offsets as kernels read them: within the tensor, in ascending order.
std::vector<int64_t> clamped_offsets(const Tensor& offsets, int64_t total) {
  const Tensor dense = offsets.contiguous();
  const int32_t* data = dense.const_data_ptr<int32_t>();
  std::vector<int64_t> result(data, data + dense.numel());
  int64_t last = 0;
  for (int64_t& offset : result) last = offset = std::clamp<int64_t>(offset, last, total);
  return result;
}

cpu::AttentionProblem cpu_problem(const AttentionCall& call, const std::array<Tensor, 3>& qkv) {
  const bool packed = call.is_packed();
  const auto dense = [&](const Tensor& tensor) {
    return as_dense(with_dense_rows(tensor), packed);
  };
  const auto limit = [](const std::optional<SymInt>& window) {
    constexpr int64_t kNoLimit = cpu::AttentionProblem::kNoLimit;
    return window.has_value() ? std::min(window->expect_int(), kNoLimit) : kNoLimit;
  };
  cpu::AttentionProblem problem{};
  problem.query = dense(qkv[0]);
  problem.key = dense(qkv[1]);
  problem.value = dense(qkv[2]);
  const int64_t heads = problem.query.size(1), queries = problem.query.size(2);
  int64_t batch = problem.query.size(0);
  if (packed) {
    batch = call.cu_seqlens_q->size(0) - 1;
    problem.query_offsets = clamped_offsets(*call.cu_seqlens_q, queries);
    problem.key_offsets = clamped_offsets(*call.cu_seqlens_k, problem.key.size(2));
  }
  if (has(call.attn_mask)) {
    problem.mask =
        of_four_dims(*call.attn_mask).expand({batch, heads, queries, problem.key.size(2)});
  }
  if (has(call.alibi_slopes)) problem.alibi_slopes = call.alibi_slopes->expand({batch, heads});
  if (has(call.sink)) problem.sink = call.sink->to(at::kDouble).contiguous();
  problem.scale = call.scale;
  problem.softcap = call.softcap;
  problem.window_left = limit(call.window_left);
  problem.window_right = limit(call.window_right);
  problem.top_left = call.top_left;
  problem.dropout_p = call.dropout_p;
  if (call.dropout_p > 0) {
    const Tensor rng = call.rng->contiguous();
    problem.seed = static_cast<uint64_t>(rng.const_data_ptr<int64_t>()[0]);
    problem.offset = static_cast<uint64_t>(rng.const_data_ptr<int64_t>()[1]);
  }
  return problem;
}

void cpu_backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& lse,
                  const AttentionCall& call, const std::array<Tensor, 3>& qkv,
                  const std::array<bool, 5>& wanted, NewGradients& made) {
  const bool packed = call.is_packed();
  const auto dense = [&](const Tensor& tensor) {
    return tensor.defined() ? as_dense(with_dense_rows(tensor), packed) : tensor;
  };
  const cpu::AttentionProblem problem = cpu_problem(call, qkv);
  cpu::AttentionProblemGradients gradients{dense(made.query), dense(made.key), dense(made.value)};
  Tensor dmask;
  if (wanted[3] && has(call.attn_mask)) {
    dmask = at::zeros(of_four_dims(*call.attn_mask).sizes(), lse.options());
    gradients.mask = dmask.expand(problem.mask.sizes());
  }
  if (wanted[4] && has(call.sink)) {
    gradients.sink = at::empty(call.sink->sizes(), lse.options().dtype(at::kDouble));
  }
  cpu::attention_backward(problem, lse.contiguous(), dense(dout),
                          has(dlse) ? dlse->contiguous() : Tensor(), gradients);
  if (dmask.defined()) {
    made.returned.attn_mask = dmask.to(call.attn_mask->scalar_type()).view(call.attn_mask->sizes());
  }
  if (gradients.sink.defined()) {
    made.returned.sink = gradients.sink.to(call.sink->scalar_type());
  }
}

// Of no queries, or of packed tensors without a sequence: what the kernels would write.
AttentionGradients zeroed(NewGradients made, const AttentionCall& call,
                          const std::array<bool, 5>& wanted) {
  for (Tensor* gradient : {&made.returned.query, &made.returned.key, &made.returned.value}) {
    if (gradient->defined()) gradient->zero_();
  }
  if (wanted[3] && has(call.attn_mask)) made.returned.attn_mask = at::zeros_like(*call.attn_mask);
  if (wanted[4] && has(call.sink)) made.returned.sink = at::zeros_like(*call.sink);
  return made.returned;
}

bool is_empty(const AttentionCall& call, const Tensor& out) {
  return out.numel() == 0 || (call.is_packed() && call.cu_seqlens_q->size(0) == 1);
}

#ifdef FUSED_NORM_WITH_CUDA

std::atomic<AttentionTier> wanted_tier{AttentionTier::kAuto};

const char* name_of(AttentionTier tier) {
  switch (tier) {
    case AttentionTier::kAuto:
      return "auto";
    case AttentionTier::kPlain:
      return "plain";
    case AttentionTier::kPortable:
      return "portable";
    case AttentionTier::kHopper:
      return "hopper";
  }
  return "unknown";
}

AttentionTensor as_tensor(const Tensor& t, bool packed) {
  // A dimension of size 1 may have any stride.
  const auto stride = [&](int64_t d) { return t.size(d) == 1 ? 0 : t.stride(d); };
  void* data = const_cast<void*>(t.const_data_ptr());
  if (packed) return {data, 0, stride(1), stride(0)};
  return {data, stride(0), stride(1), stride(2)};
}

// Columns that tensor cores take: whole packs of 16 bytes of a 16-bit type.
int64_t padded(int64_t cols) { return (cols + 7) / 8 * 8; }

// A call's parameters, and the tensors that own what they point to.
struct Launch {
  AttentionParams params{};
  bool packed;
  bool aligned;  // tensors are as the tensor-core tiers read and write them
  std::array<Tensor, 3> qkv;
  Tensor cu_seqlens_q, cu_seqlens_k, mask, alibi_slopes, sink, rng;

  // The tensor as kernels read it: itself, or one copy.
  Tensor readable(const Tensor& t) const {
    if (aligned && t.size(-1) % 8 != 0) {
      return at::constant_pad_nd(t, {0, padded(t.size(-1)) - t.size(-1)});
    }
    const Tensor rows = with_dense_rows(t);
    if (!aligned || attention_is_aligned(as_tensor(rows, packed), params.dtype)) return rows;
    return rows.clone(at::MemoryFormat::Contiguous);
  }

  // A tensor that kernels write: `t` itself, or a wider one to be copied from.
  Tensor writable(const Tensor& t) const {
    if (!t.defined() || !aligned || t.size(-1) % 8 == 0) return t;
    at::DimVector sizes(t.sizes());
    sizes.back() = padded(sizes.back());
    return empty_tensor(sizes, t.scalar_type());
  }
};

// What writable() gave, into what was asked for.
void finish(const Tensor& written, const Tensor& t) {
  if (t.defined() && !written.is_same(t)) t.copy_(written.narrow(-1, 0, t.size(-1)));
}

int32_t narrowed(int64_t size, const char* what) {
  TORCH_CHECK(size <= std::numeric_limits<int32_t>::max(), what, " is ", size,
              "; at most 2^31 - 1 is supported");
  return static_cast<int32_t>(size);
}

int32_t limit_of(const std::optional<SymInt>& window) {
  if (!window.has_value()) return -1;
  const int64_t limit = window->expect_int();
  return limit > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(limit);
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
    launch->cu_seqlens_q = call.cu_seqlens_q->contiguous();
    launch->cu_seqlens_k = call.cu_seqlens_k->contiguous();
    p.query_offsets = launch->cu_seqlens_q.const_data_ptr<int32_t>();
    p.key_offsets = launch->cu_seqlens_k.const_data_ptr<int32_t>();
    p.batch = narrowed(call.cu_seqlens_q->size(0) - 1, "the number of sequences");
    p.total_queries = narrowed(query.size(0), "the number of queries");
    p.total_keys = narrowed(key.size(0), "the number of keys");
    p.queries = longest(call.max_seqlen_q, p.total_queries);
    p.keys = longest(call.max_seqlen_k, p.total_keys);
  } else {
    p.batch = narrowed(query.size(0), "the batch size");
    p.queries = narrowed(query.size(2), "the number of queries");
    p.keys = narrowed(key.size(2), "the number of keys");
  }
  p.query = as_tensor(query, packed);
  p.key = as_tensor(key, packed);
  p.value = as_tensor(value, packed);
}

void set_options(const AttentionCall& call, Launch* launch) {
  AttentionParams& p = launch->params;
  p.scale = call.scale;
  p.softcap = call.softcap;
  p.window_left = limit_of(call.window_left);
  p.window_right = limit_of(call.window_right);
  p.top_left = call.top_left;
  p.dropout_p = static_cast<float>(call.dropout_p);
  if (has(call.attn_mask)) {
    launch->mask = *call.attn_mask;
    const Tensor mask = of_four_dims(launch->mask).expand({p.batch, p.heads, p.queries, p.keys});
    const bool boolean = mask.scalar_type() == at::kBool;
    p.mask = {const_cast<void*>(mask.const_data_ptr()),
              boolean,
              boolean ? p.dtype : to_dtype(mask.scalar_type()),
              mask.stride(0),
              mask.stride(1),
              mask.stride(2),
              mask.stride(3)};
  }
  if (has(call.alibi_slopes)) {
    launch->alibi_slopes = call.alibi_slopes->contiguous();
    p.alibi_slopes = launch->alibi_slopes.const_data_ptr<float>();
    p.alibi_batch_stride = launch->alibi_slopes.dim() == 2 ? p.heads : 0;
  }
  if (has(call.sink)) {
    const bool wide = p.dtype == DType::kFloat64;
    launch->sink = (wide ? call.sink->to(at::kDouble) : *call.sink).contiguous();
    p.sink = launch->sink.const_data_ptr();
    p.sink_dtype = to_dtype(launch->sink.scalar_type());
  }
  if (call.dropout_p > 0) {
    launch->rng = call.rng->contiguous();
    p.rng = launch->rng.const_data_ptr<int64_t>();
  }
}

// Whether a tensor-core tier takes the call once its tensors are aligned and padded.
bool takes_aligned(const std::array<Tensor, 3>& qkv, AttentionParams params) {
  if (wanted_tier.load(std::memory_order_relaxed) == AttentionTier::kPlain) return false;
  params.head_dim = static_cast<int32_t>(padded(qkv[0].size(-1)));
  params.value_dim = static_cast<int32_t>(padded(qkv[2].size(-1)));
  const DeviceProperties& device = current_device_properties();
  return attention_tier_takes(AttentionTier::kPortable, params, device) ||
         attention_tier_takes(AttentionTier::kHopper, params, device);
}

Launch prepared(const AttentionCall& call, const std::array<Tensor, 3>& qkv) {
  for (const Tensor& t : {qkv[0], qkv[2]}) {
    TORCH_CHECK(t.size(-1) <= kMaxHeadDim, "query has head dim ", qkv[0].size(-1), " and value ",
                qkv[2].size(-1), "; on CUDA at most ", kMaxHeadDim, " is supported");
  }
  Launch launch;
  launch.packed = call.is_packed();
  launch.params.dtype = to_dtype(qkv[0].scalar_type());
  launch.aligned = takes_aligned(qkv, launch.params);
  for (int i = 0; i < 3; ++i) launch.qkv[i] = launch.readable(qkv[i]);
  set_shape(call, &launch);
  set_options(call, &launch);
  return launch;
}

AttentionTier tier_of(const AttentionParams& params) {
  const AttentionTier wanted = wanted_tier.load(std::memory_order_relaxed);
  const AttentionTier tier = attention_tier(params, current_device_properties(), wanted);
  TORCH_CHECK(wanted == AttentionTier::kAuto || tier == wanted, "tier is '", name_of(wanted),
              "', which does not take this call: head dim ", params.head_dim, ", of values ",
              params.value_dim);
  return tier;
}

Tensor workspace_of(size_t bytes) {
  return bytes == 0 ? Tensor() : empty_tensor({static_cast<int64_t>(bytes)}, at::kByte);
}

void* data_of(const Tensor& tensor) {
  return tensor.defined() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
}

void cuda_forward(const AttentionCall& call, const std::array<Tensor, 3>& qkv, const Tensor& out,
                  const Tensor& lse) {
  const c10::cuda::CUDAGuard guard(out.device());
  Launch launch = prepared(call, qkv);
  AttentionParams& params = launch.params;
  const Tensor written = launch.writable(out);
  params.out = as_tensor(written, launch.packed);
  params.lse = lse.mutable_data_ptr();
  const DeviceProperties& device = current_device_properties();
  const AttentionTier tier = tier_of(params);
  const Tensor workspace = workspace_of(attention_forward_workspace(params, device, tier));
  check_launch(launch_attention_forward(params, device, tier, data_of(workspace),
                                        at::cuda::getCurrentCUDAStream()));
  finish(written, out);
}

void cuda_backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& out,
                   const Tensor& lse, const AttentionCall& call, const std::array<Tensor, 3>& qkv,
                   const std::array<bool, 5>& wanted, NewGradients& made) {
  const c10::cuda::CUDAGuard guard(out.device());
  const Launch launch = prepared(call, qkv);
  const auto optional_tensor = [&](const Tensor& t) {
    return t.defined() ? as_tensor(t, launch.packed) : AttentionTensor{};
  };
  const Tensor out_rows = launch.readable(out), dout_rows = launch.readable(dout);
  const Tensor lse_rows = lse.contiguous();
  const Tensor dlse_rows = has(dlse) ? dlse->contiguous() : Tensor();
  const Tensor dquery = launch.writable(made.query), dkey = launch.writable(made.key),
               dvalue = launch.writable(made.value);
  AttentionBackwardParams params{};
  params.forward = launch.params;
  params.forward.out = as_tensor(out_rows, launch.packed);
  params.forward.lse = data_of(lse_rows);
  params.dout = as_tensor(dout_rows, launch.packed);
  params.dlse = data_of(dlse_rows);
  params.dquery = optional_tensor(dquery);
  params.dkey = optional_tensor(dkey);
  params.dvalue = optional_tensor(dvalue);
  if (wanted[3] && has(call.attn_mask)) {
    made.returned.attn_mask = empty_tensor(call.attn_mask->sizes(), call.attn_mask->scalar_type());
    params.dmask = made.returned.attn_mask.mutable_data_ptr();
    const Tensor mask = of_four_dims(*call.attn_mask);
    for (int d = 0; d < 4; ++d) params.mask_shape[d] = static_cast<int32_t>(mask.size(d));
  }
  if (wanted[4] && has(call.sink)) {
    made.returned.sink = empty_tensor(launch.sink.sizes(), launch.sink.scalar_type());
    params.dsink = made.returned.sink.mutable_data_ptr();
  }
  const DeviceProperties& device = current_device_properties();
  const AttentionTier tier = tier_of(params.forward);
  const Tensor workspace = workspace_of(attention_backward_workspace(params, device, tier));
  check_launch(launch_attention_backward(params, device, tier, data_of(workspace),
                                         at::cuda::getCurrentCUDAStream()));
  finish(dquery, made.query);
  finish(dkey, made.key);
  finish(dvalue, made.value);
  if (made.returned.sink.defined()) {
    made.returned.sink = made.returned.sink.to(call.sink->scalar_type());
  }
}

#endif  // FUSED_NORM_WITH_CUDA

}  // namespace

std::pair<Tensor, Tensor> attention_forward(const AttentionCall& call) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_attention(call);
  const auto qkv = call.apart();
  const Tensor out = new_out(qkv[0], qkv[2].sym_size(-1)), lse = new_lse(call, qkv[0]);
  if (out.is_meta()) return {out, lse};
  if (is_empty(call, out)) {
    out.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    return {out, lse};
  }
  if (out.is_cpu()) {
    const bool packed = call.is_packed();
    cpu::attention_forward(cpu_problem(call, qkv), as_dense(out, packed), lse);
    return {out, lse};
  }
#ifdef FUSED_NORM_WITH_CUDA
  cuda_forward(call, qkv, out, lse);
  return {out, lse};
#else
  raise_cpu_only(out);
#endif
}

AttentionGradients attention_backward(const Tensor& dout, const OptionalTensor& dlse,
                                      const Tensor& out, const Tensor& lse,
                                      const AttentionCall& call,
                                      const std::array<bool, 5>& wanted) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_attention(call);
  for (const auto& [tensor, name] : {std::pair(dout, "dout"), std::pair(out, "out")}) {
    check_beside(tensor, name, call.query);
    TORCH_CHECK(tensor.scalar_type() == call.query.scalar_type(), name, " is ",
                tensor.scalar_type(), ", but query is ", call.query.scalar_type());
  }
  check_beside(lse, "lse", call.query);
  const auto qkv = call.apart();
  TORCH_CHECK(dout.sym_sizes() == out.sym_sizes(), "dout has shape ", dout.sym_sizes(),
              ", but out has ", out.sym_sizes());
  NewGradients made = new_gradients(call, wanted);
  if (out.is_meta()) {
    AttentionGradients& returned = made.returned;
    if (wanted[3] && has(call.attn_mask)) {
      returned.attn_mask = at::empty_symint(call.attn_mask->sym_sizes(), call.attn_mask->options());
    }
    if (wanted[4] && has(call.sink)) returned.sink = at::empty_like(*call.sink);
    return returned;
  }
  if (is_empty(call, out)) return zeroed(std::move(made), call, wanted);
  if (out.is_cpu()) {
    cpu_backward(dout, dlse, lse, call, qkv, wanted, made);
    return made.returned;
  }
#ifdef FUSED_NORM_WITH_CUDA
  cuda_backward(dout, dlse, out, lse, call, qkv, wanted, made);
  return made.returned;
#else
  raise_cpu_only(out);
#endif
}

Tensor attention_rng(const Tensor& query) {
  const Tensor rng = at::empty({2}, query.options().dtype(at::kLong));
  return rng.is_meta() ? rng : rng.random_();
}

void force_attention_tier(const std::string& name) {
#ifdef FUSED_NORM_WITH_CUDA
  for (const AttentionTier tier : {AttentionTier::kAuto, AttentionTier::kPlain,
                                   AttentionTier::kPortable, AttentionTier::kHopper}) {
    if (name != name_of(tier)) continue;
    wanted_tier = tier;
    return;
  }
#else
  if (name == "auto") return;
#endif
  TORCH_CHECK_VALUE(false,
                    "tier must be 'auto' or, of a build with CUDA, 'plain', 'portable' or "
                    "'hopper', but is '",
                    name, "'");
}

std::string attention_tier_of(const AttentionCall& call) {
  check_attention(call);
#ifdef FUSED_NORM_WITH_CUDA
  if (call.query.is_cuda()) {
    const c10::cuda::CUDAGuard guard(call.query.device());
    Launch launch = prepared(call, call.apart());
    launch.params.out = launch.params.query;
    return name_of(tier_of(launch.params));
  }
#endif
  TORCH_CHECK(false, "query is on ", call.query.device(), ": only the CUDA kernels have tiers");
}

}  // namespace fused_norm::ops
