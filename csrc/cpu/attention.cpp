// A block of queries, of all heads that share a key head, meets the keys that one of them sees: two
// matrix products of ATen, and between them rows of scores while they are in cache. Each block is
// the work of one thread, in buffers of its own: its bits depend neither on the other blocks nor on
// strides.
#include "cpu/attention.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/alignment.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "core/attention/dropout.h"
#include "cpu/exponential.h"
#include "cpu/rows.h"

namespace fused_norm::cpu {
namespace {

using at::Tensor;

// Rows of a block: enough for the products to run at full speed, few enough for a row of a few
// thousand scores each to stay in the second-level cache.
constexpr int64_t kBlockRows = 64;

struct Sequence {
  int64_t index, batch, first_query, queries, first_key, keys;
};

// Within the tensor, in ascending order.
std::vector<int64_t> clamped(const int32_t* offsets, int32_t sequences, int64_t total) {
  std::vector<int64_t> result(offsets, offsets + sequences + 1);
  int64_t last = 0;
  for (int64_t& offset : result) last = offset = std::clamp(offset, last, total);
  return result;
}

std::vector<Sequence> sequences_of(const AttentionParams& p) {
  std::vector<Sequence> sequences;
  if (p.query_offsets == nullptr) {
    for (int64_t i = 0; i < p.batch; ++i) sequences.push_back({i, i, 0, p.queries, 0, p.keys});
    return sequences;
  }
  const auto queries = clamped(p.query_offsets, p.batch, p.total_queries);
  const auto keys = clamped(p.key_offsets, p.batch, p.total_keys);
  for (int64_t i = 0; i < p.batch; ++i) {
    sequences.push_back(
        {i, 0, queries[i], queries[i + 1] - queries[i], keys[i], keys[i + 1] - keys[i]});
  }
  return sequences;
}

// Runs function(first, last) over [0, count) on ATen's threads. A single task runs beside an empty
// one: alone it would not be on a thread of its own, and its matrix products would use several.
template <typename Function>
void in_parallel(int64_t count, const Function& function) {
  at::parallel_for(0, std::max<int64_t>(count, 2), 1, [&](int64_t first, int64_t last) {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (first < count) function(first, std::min(last, count));
  });
}

template <typename Acc>
class Buffer {
 public:
  Acc* at_least(int64_t n) {
    if (!memory_.defined() || memory_.numel() < n) {
      memory_ = at::empty({n}, at::TensorOptions().dtype(kType<Acc>));
    }
    return memory_.template mutable_data_ptr<Acc>();
  }

 private:
  Tensor memory_;
};

template <typename Acc>
Tensor matrix(Acc* data, int64_t rows, int64_t cols) {
  return at::from_blob(data, {rows, cols}, at::TensorOptions().dtype(kType<Acc>));
}

// to = a b or to += a b, of (rows, inner) and (inner, cols), where a factor may lie transposed. The
// tensors of a call serve the next one if addresses and sizes are the same: to make them takes
// longer than the product of a short sequence.
template <typename Acc>
class Product {
 public:
  enum Form { kPlain, kTransposedB, kAddTransposedA };
  explicit Product(Form form) : form_(form) {}

  void operator()(Acc* a, Acc* b, Acc* to, int64_t rows, int64_t cols, int64_t inner) {
    const auto made_for = std::make_tuple(a, b, to, rows, cols, inner);
    const bool adds = form_ == kAddTransposedA;
    if (made_for != made_for_) {
      a_ = adds ? matrix(a, inner, rows).t() : matrix(a, rows, inner);
      b_ = form_ == kTransposedB ? matrix(b, cols, inner).t() : matrix(b, inner, cols);
      to_ = matrix(to, rows, cols);
      made_for_ = made_for;
    }
    adds ? to_.addmm_(a_, b_) : at::mm_out(to_, a_, b_);
  }

 private:
  Form form_;
  std::tuple<Acc*, Acc*, Acc*, int64_t, int64_t, int64_t> made_for_{};
  Tensor a_, b_, to_;
};

// By DType.
constexpr at::ScalarType kTypes[] = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
at::ScalarType type_of(DType dtype) { return kTypes[static_cast<int>(dtype)]; }

// A tensor (batch, heads, rows, columns), and rows of it.
struct Part {
  AttentionTensor tensor;
  DType dtype;
  int64_t cols, batch, head, heads, row, rows;
};

// Calls function(elements, values, columns) for the rows of a part, whose values lie one after the
// other. Views and copies of ATen take longer than the products of a short sequence.
template <typename Acc, typename Function>
void each_row(const Part& part, Acc* values, const Function& function) {
  const AttentionTensor& t = part.tensor;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type_of(part.dtype), "attention", [&] {
    for (int64_t i = 0; i < part.heads * part.rows; ++i) {
      const int64_t head = part.head + i / part.rows, row = part.row + i % part.rows;
      const int64_t at = part.batch * t.batch_stride + head * t.head_stride + row * t.row_stride;
      function(static_cast<scalar_t*>(t.data) + at, values + i * part.cols, part.cols);
    }
  });
}

template <typename Acc>
void load(const Part& from, Acc* to) {
  each_row(from, to, [](const auto* row, Acc* x, int64_t n) { convert(row, x, n); });
}

template <typename Acc>
void store(Acc* from, const Part& to) {
  each_row(to, from, [](auto* row, const Acc* x, int64_t n) { convert(x, row, n); });
}

template <typename Acc>
FUSED_NORM_SIMD bool is_finite(const Acc* x, int64_t n) {
  Acc sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * 0;
  return sum == 0;
}

template <typename Acc>
void multiply_row(Acc factor, Acc* x, int64_t n) {
  each(n, [=](int64_t i) { x[i] *= factor; });
}

// `x` where the draw keeps a probability, times `scale`, else 0; of keys from `first` on.
template <typename Acc>
void drop(const AttentionParams& p, int64_t row, int64_t query, int64_t first, Acc* x, int64_t n) {
  const Dropout dropout{static_cast<uint64_t>(p.rng[0]), static_cast<uint64_t>(p.rng[1]),
                        static_cast<uint32_t>(row), p.dropout_threshold};
  const Acc scale = static_cast<Acc>(p.dropout_scale);
  uint32_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto key = static_cast<uint32_t>(first + i);
    if (i == 0 || key % 8 == 0) {
      kept = dropout.kept(static_cast<uint32_t>(query), key);
    }
    x[i] = Dropout::keeps(kept, key) ? x[i] * scale : Acc(0);
  }
}

// The scores of one block after the other.
template <typename Acc>
class Block {
 public:
  explicit Block(const AttentionParams& params)
      : p(params),
        group(params.heads / params.kv_heads),
        head_dim(params.head_dim),
        value_dim(params.value_dim) {}

  static int64_t queries_of_block(const AttentionParams& params) {
    return std::max<int64_t>(1, kBlockRows * params.kv_heads / params.heads);
  }

  void set_head(const Sequence& of, int64_t head) {
    sequence = of;
    kv_head = head;
    keys = rows_of_keys(key_part(p.key, head_dim), &key_buffer_);
    values = rows_of_keys(key_part(p.value, value_dim), &value_buffer_);
  }

  void set_queries(int64_t first, int64_t count) {
    first_query = first;
    queries = count;
    const int64_t shift = p.top_left ? 0 : sequence.keys - sequence.queries;
    low = 0;
    high = sequence.keys;
    if (p.window_left >= 0) low = std::max(low, first + shift - p.window_left);
    if (p.window_right >= 0) {
      high = std::min(high, first + count + shift + p.window_right);
    }
    low = std::min(low, sequence.keys);
    high = std::max(high, low);
  }

  int64_t rows() const { return group * queries; }
  int64_t width() const { return high - low; }
  int64_t head_of(int64_t row) const { return kv_head * group + row / queries; }
  int64_t query_of(int64_t row) const { return first_query + row % queries; }
  // Where a row is in tensors of (batch, heads, rows).
  int64_t place_of(int64_t row) const { return sequence.first_query + query_of(row); }

  int64_t place_in_lse(int64_t row) const {
    const int64_t of_head = p.query_offsets == nullptr ? p.queries : p.total_queries;
    return (sequence.batch * p.heads + head_of(row)) * of_head + place_of(row);
  }

  // The block's rows in tensors that are shaped as query is, and as key is.
  Part query_part(const AttentionTensor& t, int64_t cols) const {
    return {t, p.dtype, cols, sequence.batch, kv_head * group, group, place_of(0), queries};
  }
  Part key_part(const AttentionTensor& t, int64_t cols) const {
    return {t, p.dtype, cols, sequence.batch, kv_head, 1, sequence.first_key, sequence.keys};
  }

  Acc* gather(const AttentionTensor& from, int64_t cols, Buffer<Acc>* buffer) const {
    Acc* to = buffer->at_least(rows() * cols);
    load(query_part(from, cols), to);
    return to;
  }

  // rows() x width(). Hidden keys have -inf, whatever they hold. With `slopes`, also the derivative
  // of softcap there.
  Acc* scores(Acc* q, Buffer<Acc>* slopes = nullptr) {
    const int64_t n = rows() * width();
    Acc* s = score_buffer_.at_least(n);
    score_product_(q, keys + low * head_dim, s, rows(), width(), head_dim);
    if (p.softcap > 0) {
      Tensor all = matrix(s, rows(), width());
      all.mul_(p.scale / p.softcap).tanh_();
      if (slopes != nullptr) {
        Acc* slope = slopes->at_least(n);
        for (int64_t i = 0; i < n; ++i) slope[i] = 1 - s[i] * s[i];
      }
      all.mul_(p.softcap);
    } else {
      multiply_row(static_cast<Acc>(p.scale), s, n);
    }
    const Acc* mask = p.mask.data != nullptr ? gather_mask() : nullptr;
    for (int64_t r = 0; r < rows(); ++r) finish_row(r, mask, s + r * width());
    return s;
  }

  // weights (rows() x width()) times keys or values (their column count is `cols`). Keys that no
  // row of the block sees may hold NaN or Inf; they then count as zeros.
  void weighted_sum(Acc* weights, Acc* of, int64_t cols, Acc* to) {
    sum_product_(weights, of + low * cols, to, rows(), cols, width());
    if (is_finite(to, rows() * cols)) return;
    Acc* clean = clean_buffer_.at_least(width() * cols);
    std::copy_n(of + low * cols, width() * cols, clean);
    for (int64_t j = 0; j < width(); ++j) {
      bool hidden = true;
      for (int64_t r = 0; r < rows(); ++r) hidden = hidden && weights[r * width() + j] == 0;
      if (hidden) std::fill_n(clean + j * cols, cols, Acc(0));
    }
    sum_product_(weights, clean, to, rows(), cols, width());
  }

  const AttentionParams& p;
  const int64_t group, head_dim, value_dim;
  Sequence sequence{};
  int64_t kv_head = 0, first_query = 0, queries = 0;
  int64_t low = 0, high = 0;  // keys that the window lets a row of the block see
  Acc *keys = nullptr, *values = nullptr;

 private:
  // The head's rows: in place if they lie as in a buffer, so that products have the same bits.
  Acc* rows_of_keys(const Part& part, Buffer<Acc>* buffer) const {
    const AttentionTensor& t = part.tensor;
    if (type_of(part.dtype) == kType<Acc> && t.row_stride == part.cols && part.rows > 0) {
      Acc* first = static_cast<Acc*>(t.data) + part.batch * t.batch_stride +
                   part.head * t.head_stride + part.row * t.row_stride;
      constexpr uintptr_t kAlignment = c10::gAlignment;
      if (reinterpret_cast<uintptr_t>(first) % kAlignment == 0) return first;
    }
    Acc* to = buffer->at_least(part.rows * part.cols);
    load(part, to);
    return to;
  }

  Acc* gather_mask() {
    const AttentionMask& m = p.mask;
    const at::ScalarType type = m.boolean ? at::kBool : type_of(m.dtype);
    const int64_t first = sequence.batch * m.batch_stride + kv_head * group * m.head_stride +
                          first_query * m.row_stride + low * m.key_stride;
    const Tensor part = at::from_blob(
        static_cast<char*>(m.data) + first * c10::elementSize(type), {group, queries, width()},
        {m.head_stride, m.row_stride, m.key_stride}, at::TensorOptions().dtype(type));
    Acc* to = mask_buffer_.at_least(part.numel());
    matrix(to, rows(), width()).view(part.sizes()).copy_(part);
    return to;
  }

  void finish_row(int64_t r, const Acc* mask, Acc* s) const {
    const int64_t head = head_of(r), query = query_of(r);
    const int64_t of_query = query + sequence.keys - sequence.queries;
    if (p.alibi_slopes != nullptr) {
      const float slope = p.alibi_slopes[sequence.index * p.alibi_batch_stride + head];
      const Acc factor = slope, distance = of_query - low;
      each(width(), [=](int64_t i) { s[i] -= factor * std::abs(distance - Acc(i)); });
    }
    if (mask != nullptr) apply_mask(mask + r * width(), s);
    const int64_t centre = p.top_left ? query : of_query;
    if (p.window_left >= 0) {
      const int64_t hidden = std::clamp<int64_t>(centre - p.window_left - low, 0, width());
      std::fill_n(s, hidden, -kInfinity<Acc>);
    }
    if (p.window_right >= 0) {
      const int64_t seen = std::clamp<int64_t>(centre + p.window_right + 1 - low, 0, width());
      std::fill(s + seen, s + width(), -kInfinity<Acc>);
    }
  }

  // Of a boolean mask, `mask` is 1 where it is true.
  void apply_mask(const Acc* mask, Acc* s) const {
    if (p.mask.boolean) {
      each(width(), [=](int64_t j) { s[j] = mask[j] == 0 ? -kInfinity<Acc> : s[j]; });
    } else {
      each(width(),
           [=](int64_t j) { s[j] = mask[j] <= kHidingMask ? -kInfinity<Acc> : s[j] + mask[j]; });
    }
  }

  Buffer<Acc> key_buffer_, value_buffer_, score_buffer_, mask_buffer_, clean_buffer_;
  Product<Acc> score_product_{Product<Acc>::kTransposedB}, sum_product_{Product<Acc>::kPlain};
};

double sink_of(const AttentionParams& p, int64_t head) {
  const auto* sinks = static_cast<const double*>(p.sink.data);
  return sinks != nullptr ? sinks[head] : -kInfinity<double>;
}

template <typename Acc>
void forward_block(Block<Acc>& block, Buffer<Acc>* query_buffer, Buffer<Acc>* out_buffer,
                   Acc* lse) {
  const AttentionParams& p = block.p;
  const int64_t width = block.width(), dv = block.value_dim;
  Acc* s = block.scores(block.gather(p.query, block.head_dim, query_buffer));
  Acc* result = out_buffer->at_least(block.rows() * dv);
  std::vector<double> sums(block.rows());
  for (int64_t r = 0; r < block.rows(); ++r) {
    const int64_t head = block.head_of(r);
    const double sink = sink_of(p, head);
    Acc* row = s + r * width;
    const Acc shift = std::max(largest_of(row, width), static_cast<Acc>(sink));
    Acc* log_sum = lse + block.place_in_lse(r);
    if (shift == -kInfinity<Acc>) {  // nothing is seen, or only NaN
      const bool is_nan = !std::all_of(row, row + width, [](Acc x) { return x < 0; });
      std::fill_n(row, width, is_nan ? std::numeric_limits<Acc>::quiet_NaN() : Acc(0));
      sums[r] = 1;
      *log_sum = is_nan ? std::numeric_limits<Acc>::quiet_NaN() : -kInfinity<Acc>;
      continue;
    }
    sums[r] = exp_row(row, shift, row, width) + (p.sink.data ? std::exp(sink - shift) : 0);
    *log_sum = static_cast<Acc>(shift + std::log(sums[r]));
    if (p.dropout_threshold > 0) {
      drop(p, block.sequence.index * p.heads + head, block.query_of(r), block.low, row, width);
    }
  }
  block.weighted_sum(s, block.values, dv, result);
  for (int64_t r = 0; r < block.rows(); ++r) {
    multiply_row(static_cast<Acc>(1 / sums[r]), result + r * dv, dv);
  }
  store(result, block.query_part(p.out, dv));
}

template <typename Acc>
void forward(const AttentionParams& p) {
  struct Task {
    const Sequence* sequence;
    int64_t kv_head, first_query;
  };
  const std::vector<Sequence> sequences = sequences_of(p);
  const int64_t step = Block<Acc>::queries_of_block(p);
  std::vector<Task> tasks;
  for (const Sequence& sequence : sequences) {
    for (int64_t head = 0; head < p.kv_heads; ++head) {
      for (int64_t i = 0; i < sequence.queries; i += step) tasks.push_back({&sequence, head, i});
    }
  }
  Acc* log_sums = static_cast<Acc*>(p.lse);
  in_parallel(static_cast<int64_t>(tasks.size()), [&](int64_t first, int64_t last) {
    Block<Acc> block(p);
    Buffer<Acc> query_buffer, out_buffer;
    for (int64_t i = first; i < last; ++i) {
      const Task& task = tasks[i];
      if (i == first || task.sequence != tasks[i - 1].sequence ||
          task.kv_head != tasks[i - 1].kv_head) {
        block.set_head(*task.sequence, task.kv_head);
      }
      block.set_queries(task.first_query,
                        std::min(step, task.sequence->queries - task.first_query));
      forward_block(block, &query_buffer, &out_buffer, log_sums);
    }
  });
}

template <typename Acc>
struct BackwardBuffers {
  Buffer<Acc> query, dout, dquery, dscores, slopes, dropped, dkey, dvalue;
  Product<Acc> to_dscores{Product<Acc>::kTransposedB};
  Product<Acc> to_dkey{Product<Acc>::kAddTransposedA}, to_dvalue = to_dkey;
};

// The gradient of a mask while it is summed, in the mask's own shape; strides are 0 where the mask
// broadcasts. In fp64 where an element of the mask may serve millions of scores.
template <typename Acc>
struct MaskSums {
  explicit MaskSums(const AttentionBackwardParams& g) {
    if (g.dmask == nullptr) return;
    for (int d = 3; d >= 0; --d) {
      strides[d] = g.mask_shape[d] == 1 ? 0 : numel;
      numel *= g.mask_shape[d];
    }
    is_long = g.mask_shape[2] < g.forward.queries || g.mask_shape[3] < g.forward.keys;
    sums = at::zeros({numel}, at::TensorOptions().dtype(is_long ? at::kDouble : kType<Acc>));
  }

  // Adds the rows of a block.
  void add(const Block<Acc>& block, const Acc* ds) const {
    if (!sums.defined()) return;
    is_long ? add_to(sums.mutable_data_ptr<double>(), block, ds)
            : add_to(sums.mutable_data_ptr<Acc>(), block, ds);
  }
  template <typename Sum>
  void add_to(Sum* to, const Block<Acc>& block, const Acc* ds) const {
    for (int64_t r = 0; r < block.rows(); ++r) {
      Sum* row = to + block.sequence.batch * strides[0] + block.head_of(r) * strides[1] +
                 block.query_of(r) * strides[2] + block.low * strides[3];
      for (int64_t j = 0; j < block.width(); ++j) row[j * strides[3]] += ds[r * block.width() + j];
    }
  }

  int64_t strides[4] = {}, numel = 1;
  bool is_long = false;
  Tensor sums;
};

// The gradients of a block's queries, and its share of those of keys, values, mask and sinks.
template <typename Acc>
void backward_block(Block<Acc>& block, BackwardBuffers<Acc>& buffers,
                    const AttentionBackwardParams& gradients, Acc* dkey, Acc* dvalue,
                    const MaskSums<Acc>& dmask, double* dsink) {
  const AttentionParams& p = block.p;
  const Acc *lse = static_cast<Acc*>(p.lse), *dlse = static_cast<const Acc*>(gradients.dlse);
  const int64_t rows = block.rows(), width = block.width(), dv = block.value_dim;
  const int64_t total = rows * width;
  Acc* q = block.gather(p.query, block.head_dim, &buffers.query);
  Acc* d_out = block.gather(gradients.dout, dv, &buffers.dout);
  Acc* s = block.scores(q, &buffers.slopes);
  Acc* ds = buffers.dscores.at_least(total);
  buffers.to_dscores(d_out, block.values + block.low * dv, ds, rows, width, dv);
  Acc* dropped = p.dropout_threshold > 0 ? buffers.dropped.at_least(total) : s;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t head = block.head_of(r);
    const int64_t at = block.place_in_lse(r);
    Acc *p_row = s + r * width, *ds_row = ds + r * width;
    // Divided by their own sum: of exp(score - lse) the rounding of lse is a part of the sum.
    const double sink = sink_of(p, head);
    const Acc shift = std::max(largest_of(p_row, width), static_cast<Acc>(sink));
    const bool empty = lse[at] == -kInfinity<Acc>;
    if (std::all_of(p_row, p_row + width, [](Acc x) { return x == -kInfinity<Acc>; })) {
      std::fill_n(d_out + r * dv, dv, Acc(0));  // a NaN there would survive
      std::fill_n(q + r * block.head_dim, block.head_dim, Acc(0));
    }
    double of_sink = 0;
    if (empty) {
      std::fill_n(p_row, width, Acc(0));
    } else {
      of_sink = p.sink.data ? std::exp(sink - shift) : 0;
      const double sum = exp_row(p_row, shift, p_row, width) + of_sink;
      multiply_row(static_cast<Acc>(1 / sum), p_row, width);
      of_sink /= sum;
    }
    if (p.dropout_threshold > 0) {
      const int64_t row = block.sequence.index * p.heads + head;
      std::copy_n(p_row, width, dropped + r * width);
      drop(p, row, block.query_of(r), block.low, dropped + r * width, width);
      drop(p, row, block.query_of(r), block.low, ds_row, width);
    }
    const double of_lse = dlse == nullptr ? 0 : dlse[at];
    // The sum of p * dp is dout . out, without the rounding of out. Where a key is hidden its
    // probability is 0, whatever its value, and so dp, holds.
    const double of_sum = row_sum<Acc>(width, [=](int64_t i) {
      return p_row[i] == 0 ? 0.0 : double{p_row[i]} * double{ds_row[i]};
    });
    if (dsink != nullptr) dsink[head] -= of_sink * (of_sum - of_lse);
    // Apart: of a row that sees one key the sum is dp, and what is left is that of the lse.
    const Acc sum = of_sum, rest = of_lse;
    each(width, [=](int64_t i) {
      ds_row[i] = p_row[i] == 0 ? Acc(0) : p_row[i] * (ds_row[i] - sum + rest);
    });
  }
  dmask.add(block, ds);
  if (gradients.dvalue.data != nullptr) {
    buffers.to_dvalue(dropped, d_out, dvalue + block.low * dv, width, dv, rows);
  }
  if (p.softcap > 0) {
    const Acc* slopes = buffers.slopes.at_least(total);
    for (int64_t i = 0; i < total; ++i) ds[i] = ds[i] == 0 ? Acc(0) : ds[i] * slopes[i];
  }
  multiply_row(static_cast<Acc>(p.scale), ds, total);
  if (gradients.dquery.data != nullptr) {
    Acc* dq = buffers.dquery.at_least(rows * block.head_dim);
    block.weighted_sum(ds, block.keys, block.head_dim, dq);
    store(dq, block.query_part(gradients.dquery, block.head_dim));
  }
  if (gradients.dkey.data != nullptr) {
    buffers.to_dkey(ds, q, dkey + block.low * block.head_dim, width, block.head_dim, rows);
  }
}

template <typename Acc>
void backward(const AttentionBackwardParams& gradients) {
  const AttentionParams& p = gradients.forward;
  const std::vector<Sequence> sequences = sequences_of(p);
  const int64_t kv_heads = p.kv_heads, heads = p.heads;
  const int64_t count = static_cast<int64_t>(sequences.size());
  const MaskSums<Acc> dmask(gradients);
  // Tasks that add to the same elements of dmask belong to one chain, and run one after another.
  const bool by_batch = gradients.dmask == nullptr || dmask.strides[0] != 0;
  const bool by_head = gradients.dmask == nullptr || dmask.strides[1] != 0;
  const int64_t batch_chains = by_batch ? count : std::min<int64_t>(count, 1);
  const int64_t head_chains = by_head ? kv_heads : 1;
  std::vector<double> dsinks(gradients.dsink != nullptr ? count * heads : 0);

  const int64_t step = Block<Acc>::queries_of_block(p);
  const auto run = [&](Block<Acc>& block, BackwardBuffers<Acc>& buffers, int64_t s, int64_t head) {
    const Sequence& sequence = sequences[s];
    block.set_head(sequence, head);
    Acc* dkey = buffers.dkey.at_least(sequence.keys * block.head_dim);
    Acc* dvalue = buffers.dvalue.at_least(sequence.keys * block.value_dim);
    std::fill_n(dkey, sequence.keys * block.head_dim, Acc(0));
    std::fill_n(dvalue, sequence.keys * block.value_dim, Acc(0));
    for (int64_t i = 0; i < sequence.queries; i += step) {
      block.set_queries(i, std::min(step, sequence.queries - i));
      backward_block(block, buffers, gradients, dkey, dvalue, dmask,
                     dsinks.empty() ? nullptr : dsinks.data() + s * heads);
    }
    if (gradients.dkey.data) store(dkey, block.key_part(gradients.dkey, p.head_dim));
    if (gradients.dvalue.data) store(dvalue, block.key_part(gradients.dvalue, p.value_dim));
  };
  in_parallel(batch_chains * head_chains, [&](int64_t first, int64_t last) {
    Block<Acc> block(p);
    BackwardBuffers<Acc> buffers;
    for (int64_t chain = first; chain < last; ++chain) {
      const int64_t s = chain / head_chains, head = chain % head_chains;
      for (int64_t i = s; i < (by_batch ? s + 1 : count); ++i) {
        for (int64_t h = head; h < (by_head ? head + 1 : kv_heads); ++h) run(block, buffers, i, h);
      }
    }
  });
  if (gradients.dmask != nullptr) {
    at::from_blob(gradients.dmask, {dmask.numel}, type_of(p.mask.dtype)).copy_(dmask.sums);
  }
  double* dsink = static_cast<double*>(gradients.dsink);
  if (dsink != nullptr) std::fill_n(dsink, heads, 0.0);
  for (size_t i = 0; i < dsinks.size(); ++i) dsink[i % heads] += dsinks[i];
}

}  // namespace

void attention_forward(const AttentionParams& params) {
  in_precision_of(type_of(params.dtype), [&](auto acc) { forward<decltype(acc)>(params); });
}

void attention_backward(const AttentionBackwardParams& params) {
  in_precision_of(type_of(params.forward.dtype),
                  [&](auto acc) { backward<decltype(acc)>(params); });
}

}  // namespace fused_norm::cpu
