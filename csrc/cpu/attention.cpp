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
#include <c10/core/GradMode.h>
#include <c10/core/alignment.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "core/attention/dropout.h"
#include "core/attention/params.h"
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

std::vector<Sequence> sequences_of(const AttentionProblem& p) {
  std::vector<Sequence> sequences;
  if (p.query_offsets.empty()) {
    for (int64_t b = 0; b < p.query.size(0); ++b) {
      sequences.push_back({b, b, 0, p.query.size(2), 0, p.key.size(2)});
    }
  }
  for (size_t i = 0; i + 1 < p.query_offsets.size(); ++i) {
    sequences.push_back({static_cast<int64_t>(i), 0, p.query_offsets[i],
                         p.query_offsets[i + 1] - p.query_offsets[i], p.key_offsets[i],
                         p.key_offsets[i + 1] - p.key_offsets[i]});
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

// Rows of a tensor (batch, heads, rows, columns).
struct Part {
  int64_t batch, head, heads, row, rows;
};

// Calls function(elements, values, columns) for the rows of a part, whose values lie one after the
// other. Views and copies of ATen take longer than the products of a short sequence.
template <typename Acc, typename Function>
void each_row(const Tensor& t, const Part& part, Acc* values, const Function& function) {
  const int64_t cols = t.size(3), of_head = t.stride(1), of_row = t.stride(2);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, t.scalar_type(), "attention", [&] {
    auto* first = const_cast<scalar_t*>(t.const_data_ptr<scalar_t>()) + part.batch * t.stride(0) +
                  part.head * of_head + part.row * of_row;
    for (int64_t i = 0; i < part.heads * part.rows; ++i) {
      function(first + i / part.rows * of_head + i % part.rows * of_row, values + i * cols, cols);
    }
  });
}

template <typename Acc>
void load(const Tensor& from, const Part& part, Acc* to) {
  each_row(from, part, to, [](const auto* row, Acc* x, int64_t n) { convert(row, x, n); });
}

template <typename Acc>
void store(Acc* from, const Part& part, const Tensor& to) {
  each_row(to, part, from, [](auto* row, const Acc* x, int64_t n) { convert(x, row, n); });
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
void drop(const AttentionProblem& p, int64_t row, int64_t query, int64_t first, Acc* x, int64_t n) {
  const Dropout dropout{p.seed, p.offset, static_cast<uint32_t>(row),
                        dropout_threshold(p.dropout_p)};
  if (dropout.threshold == 0) return;
  const Acc scale = static_cast<Acc>(dropout_scale(dropout.threshold));
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
  explicit Block(const AttentionProblem& problem)
      : p(problem),
        group(problem.query.size(1) / problem.key.size(1)),
        head_dim(problem.query.size(3)),
        value_dim(problem.value.size(3)) {}

  static int64_t queries_of_block(const AttentionProblem& problem) {
    return std::max<int64_t>(1, kBlockRows * problem.key.size(1) / problem.query.size(1));
  }

  void set_head(const Sequence& of, int64_t head) {
    sequence = of;
    kv_head = head;
    keys = rows_of_keys(p.key, &key_buffer_);
    values = rows_of_keys(p.value, &value_buffer_);
  }

  void set_queries(int64_t first, int64_t count) {
    first_query = first;
    queries = count;
    const int64_t shift = p.top_left ? 0 : sequence.keys - sequence.queries;
    low = 0;
    high = sequence.keys;
    if (p.window_left != p.kNoLimit) low = std::max(low, first + shift - p.window_left);
    if (p.window_right != p.kNoLimit) {
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
    return (sequence.batch * p.query.size(1) + head_of(row)) * p.query.size(2) + place_of(row);
  }

  // The block's rows in tensors that are shaped as query is, and as key is.
  Part query_part() const { return {sequence.batch, kv_head * group, group, place_of(0), queries}; }
  Part key_part() const { return {sequence.batch, kv_head, 1, sequence.first_key, sequence.keys}; }

  Acc* gather(const Tensor& from, Buffer<Acc>* buffer) const {
    Acc* to = buffer->at_least(rows() * from.size(3));
    load(from, query_part(), to);
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
    const Acc* mask = p.mask.defined() ? gather_mask() : nullptr;
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

  const AttentionProblem& p;
  const int64_t group, head_dim, value_dim;
  Sequence sequence{};
  int64_t kv_head = 0, first_query = 0, queries = 0;
  int64_t low = 0, high = 0;  // keys that the window lets a row of the block see
  Acc *keys = nullptr, *values = nullptr;

 private:
  // The head's rows: in place if they lie as in a buffer, so that products have the same bits.
  Acc* rows_of_keys(const Tensor& t, Buffer<Acc>* buffer) const {
    const Part part = key_part();
    const int64_t cols = t.size(3);
    if (t.scalar_type() == kType<Acc> && t.stride(2) == cols && part.rows > 0) {
      const Acc* first = t.const_data_ptr<Acc>() + part.batch * t.stride(0) +
                         part.head * t.stride(1) + part.row * cols;
      constexpr uintptr_t kAlignment = c10::gAlignment;
      if (reinterpret_cast<uintptr_t>(first) % kAlignment == 0) return const_cast<Acc*>(first);
    }
    Acc* to = buffer->at_least(part.rows * cols);
    load(t, part, to);
    return to;
  }

  Acc* gather_mask() {
    const Tensor part = p.mask.select(0, sequence.batch)
                            .narrow(0, kv_head * group, group)
                            .narrow(1, first_query, queries)
                            .narrow(2, low, width());
    Acc* to = mask_buffer_.at_least(part.numel());
    matrix(to, rows(), width()).view(part.sizes()).copy_(part);
    return to;
  }

  void finish_row(int64_t r, const Acc* mask, Acc* s) const {
    const int64_t head = head_of(r), query = query_of(r);
    const int64_t of_query = query + sequence.keys - sequence.queries;
    if (p.alibi_slopes.defined()) {
      const float* slopes = p.alibi_slopes.const_data_ptr<float>();
      const float slope =
          slopes[sequence.index * p.alibi_slopes.stride(0) + head * p.alibi_slopes.stride(1)];
      const Acc factor = slope, distance = of_query - low;
      each(width(), [=](int64_t i) { s[i] -= factor * std::abs(distance - Acc(i)); });
    }
    if (mask != nullptr) apply_mask(mask + r * width(), s);
    const int64_t centre = p.top_left ? query : of_query;
    if (p.window_left != p.kNoLimit) {
      const int64_t hidden = std::clamp<int64_t>(centre - p.window_left - low, 0, width());
      std::fill_n(s, hidden, -kInfinity<Acc>);
    }
    if (p.window_right != p.kNoLimit) {
      const int64_t seen = std::clamp<int64_t>(centre + p.window_right + 1 - low, 0, width());
      std::fill(s + seen, s + width(), -kInfinity<Acc>);
    }
  }

  // Of a boolean mask, `mask` is 1 where it is true.
  void apply_mask(const Acc* mask, Acc* s) const {
    if (p.mask.scalar_type() == at::kBool) {
      each(width(), [=](int64_t j) { s[j] = mask[j] == 0 ? -kInfinity<Acc> : s[j]; });
    } else {
      each(width(),
           [=](int64_t j) { s[j] = mask[j] <= kHidingMask ? -kInfinity<Acc> : s[j] + mask[j]; });
    }
  }

  Buffer<Acc> key_buffer_, value_buffer_, score_buffer_, mask_buffer_, clean_buffer_;
  Product<Acc> score_product_{Product<Acc>::kTransposedB}, sum_product_{Product<Acc>::kPlain};
};

double sink_of(const AttentionProblem& p, int64_t head) {
  return p.sink.defined() ? p.sink.const_data_ptr<double>()[head] : -kInfinity<double>;
}

template <typename Acc>
void forward_block(Block<Acc>& block, Buffer<Acc>* query_buffer, Buffer<Acc>* out_buffer,
                   const Tensor& out, Acc* lse) {
  const AttentionProblem& p = block.p;
  const int64_t width = block.width(), dv = block.value_dim;
  Acc* s = block.scores(block.gather(p.query, query_buffer));
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
    sums[r] = exp_row(row, shift, row, width) + (p.sink.defined() ? std::exp(sink - shift) : 0);
    *log_sum = static_cast<Acc>(shift + std::log(sums[r]));
    if (p.dropout_p > 0) {
      drop(p, block.sequence.index * p.query.size(1) + head, block.query_of(r), block.low, row,
           width);
    }
  }
  block.weighted_sum(s, block.values, dv, result);
  for (int64_t r = 0; r < block.rows(); ++r) {
    multiply_row(static_cast<Acc>(1 / sums[r]), result + r * dv, dv);
  }
  store(result, block.query_part(), out);
}

template <typename Acc>
void forward(const AttentionProblem& p, const Tensor& out, const Tensor& lse) {
  struct Task {
    const Sequence* sequence;
    int64_t kv_head, first_query;
  };
  const std::vector<Sequence> sequences = sequences_of(p);
  const int64_t step = Block<Acc>::queries_of_block(p);
  std::vector<Task> tasks;
  for (const Sequence& sequence : sequences) {
    for (int64_t head = 0; head < p.key.size(1); ++head) {
      for (int64_t i = 0; i < sequence.queries; i += step) tasks.push_back({&sequence, head, i});
    }
  }
  Acc* log_sums = lse.mutable_data_ptr<Acc>();
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
      forward_block(block, &query_buffer, &out_buffer, out, log_sums);
    }
  });
}

template <typename Acc>
struct BackwardBuffers {
  Buffer<Acc> query, dout, dquery, dscores, slopes, dropped, dkey, dvalue;
  Product<Acc> to_dscores{Product<Acc>::kTransposedB};
  Product<Acc> to_dkey{Product<Acc>::kAddTransposedA}, to_dvalue = to_dkey;
};

// Adds to the block's rows of `sums`, which lie as dmask; strides are 0 where the mask broadcasts.
template <typename Acc, typename Sum>
void add_mask_gradient(const Block<Acc>& block, const Acc* ds, const Tensor& dmask, Sum* sums) {
  const int64_t stride = dmask.stride(3);
  for (int64_t r = 0; r < block.rows(); ++r) {
    Sum* to = sums + block.sequence.batch * dmask.stride(0) + block.head_of(r) * dmask.stride(1) +
              block.query_of(r) * dmask.stride(2) + block.low * stride;
    for (int64_t j = 0; j < block.width(); ++j) to[j * stride] += ds[r * block.width() + j];
  }
}

// The gradients of a block's queries, and its share of those of keys, values, mask and sinks.
template <typename Acc>
void backward_block(Block<Acc>& block, BackwardBuffers<Acc>& buffers, const Acc* lse,
                    const Tensor& dout, const Acc* dlse, Acc* dkey, Acc* dvalue,
                    const AttentionProblemGradients& gradients, double* dmask, double* dsink) {
  const AttentionProblem& p = block.p;
  const int64_t rows = block.rows(), width = block.width(), dv = block.value_dim;
  const int64_t total = rows * width;
  Acc* q = block.gather(p.query, &buffers.query);
  Acc* d_out = block.gather(dout, &buffers.dout);
  Acc* s = block.scores(q, &buffers.slopes);
  Acc* ds = buffers.dscores.at_least(total);
  buffers.to_dscores(d_out, block.values + block.low * dv, ds, rows, width, dv);
  Acc* dropped = p.dropout_p > 0 ? buffers.dropped.at_least(total) : s;
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
      of_sink = p.sink.defined() ? std::exp(sink - shift) : 0;
      const double sum = exp_row(p_row, shift, p_row, width) + of_sink;
      multiply_row(static_cast<Acc>(1 / sum), p_row, width);
      of_sink /= sum;
    }
    if (p.dropout_p > 0) {
      const int64_t row = block.sequence.index * p.query.size(1) + head;
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
  if (dmask != nullptr) {
    add_mask_gradient(block, ds, gradients.mask, dmask);
  } else if (gradients.mask.defined()) {
    add_mask_gradient(block, ds, gradients.mask, gradients.mask.mutable_data_ptr<Acc>());
  }
  if (gradients.value.defined()) {
    buffers.to_dvalue(dropped, d_out, dvalue + block.low * dv, width, dv, rows);
  }
  if (p.softcap > 0) {
    const Acc* slopes = buffers.slopes.at_least(total);
    for (int64_t i = 0; i < total; ++i) ds[i] = ds[i] == 0 ? Acc(0) : ds[i] * slopes[i];
  }
  multiply_row(static_cast<Acc>(p.scale), ds, total);
  if (gradients.query.defined()) {
    Acc* dq = buffers.dquery.at_least(rows * block.head_dim);
    block.weighted_sum(ds, block.keys, block.head_dim, dq);
    store(dq, block.query_part(), gradients.query);
  }
  if (gradients.key.defined()) {
    buffers.to_dkey(ds, q, dkey + block.low * block.head_dim, width, block.head_dim, rows);
  }
}

template <typename Acc>
void backward(const AttentionProblem& p, const Tensor& lse, const Tensor& dout, const Tensor& dlse,
              const AttentionProblemGradients& gradients) {
  const std::vector<Sequence> sequences = sequences_of(p);
  const int64_t kv_heads = p.key.size(1), heads = p.query.size(1);
  const int64_t count = static_cast<int64_t>(sequences.size());
  // Tasks that add to the same elements of dmask belong to one chain, and run one after another.
  const bool by_batch = !gradients.mask.defined() || gradients.mask.stride(0) != 0;
  const bool by_head = !gradients.mask.defined() || gradients.mask.stride(1) != 0;
  const int64_t batch_chains = by_batch ? count : std::min<int64_t>(count, 1);
  const int64_t head_chains = by_head ? kv_heads : 1;
  // In fp64 where an element of the mask may serve millions of scores.
  const bool is_long =
      gradients.mask.defined() && (gradients.mask.stride(2) == 0 || gradients.mask.stride(3) == 0);
  std::vector<double> dmask(is_long ? gradients.mask.storage().nbytes() / sizeof(Acc) : 0);
  std::vector<double> dsinks(gradients.sink.defined() ? count * heads : 0);

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
      backward_block(block, buffers, lse.const_data_ptr<Acc>(), dout,
                     dlse.defined() ? dlse.const_data_ptr<Acc>() : nullptr, dkey, dvalue, gradients,
                     is_long ? dmask.data() : nullptr,
                     dsinks.empty() ? nullptr : dsinks.data() + s * heads);
    }
    if (gradients.key.defined()) store(dkey, block.key_part(), gradients.key);
    if (gradients.value.defined()) store(dvalue, block.key_part(), gradients.value);
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
  if (is_long) std::copy(dmask.begin(), dmask.end(), gradients.mask.mutable_data_ptr<Acc>());
  if (!gradients.sink.defined()) return;
  double* dsink = gradients.sink.mutable_data_ptr<double>();
  std::fill_n(dsink, heads, 0.0);
  for (size_t i = 0; i < dsinks.size(); ++i) dsink[i % heads] += dsinks[i];
}

// The rows of no sequence, and all of a tensor without sequences.
void zero_outside(const Tensor& t, const std::vector<int64_t>& offsets) {
  if (!t.defined() || offsets.empty()) return;
  t.narrow(2, 0, offsets.front()).zero_();
  t.narrow(2, offsets.back(), t.size(2) - offsets.back()).zero_();
}

}  // namespace

void attention_forward(const AttentionProblem& p, const Tensor& out, const Tensor& lse) {
  zero_outside(out, p.query_offsets);
  if (!p.query_offsets.empty()) lse.fill_(-kInfinity<double>);
  in_precision_of(out.scalar_type(), [&](auto acc) { forward<decltype(acc)>(p, out, lse); });
}

void attention_backward(const AttentionProblem& p, const Tensor& lse, const Tensor& dout,
                        const Tensor& dlse, const AttentionProblemGradients& gradients) {
  zero_outside(gradients.query, p.query_offsets);
  zero_outside(gradients.key, p.key_offsets);
  zero_outside(gradients.value, p.key_offsets);
  in_precision_of(lse.scalar_type(),
                  [&](auto acc) { backward<decltype(acc)>(p, lse, dout, dlse, gradients); });
}

}  // namespace fused_norm::cpu
