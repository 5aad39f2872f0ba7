#include "cpu/softmax.h"

#include <ATen/Dispatch.h>

#include <array>

#include "cpu/exponential.h"
#include "cpu/rows.h"

namespace fused_norm::cpu {
namespace {

// x and y may be the same row.
template <typename Acc>
void softmax_row(const Acc* x, bool log, Acc* y, int64_t n) {
  const Acc largest = largest_of(x, n);
  if (log) {
    const Acc log_sum =
        std::log(row_sum<Acc>(n, [=](int64_t i) { return exponential(x[i] - largest); }));
    each(n, [=](int64_t i) { y[i] = (x[i] - largest) - log_sum; });
  } else {
    const Acc factor = 1 / exp_row(x, largest, y, n);
    each(n, [=](int64_t i) { y[i] *= factor; });
  }
}

template <typename Acc>
void gradient_row(const Acc* dy, const Acc* y, bool log, Acc scale, Acc* dx, int64_t n) {
  if (log) {
    const Acc sum = row_sum<Acc>(n, [=](int64_t i) { return dy[i]; });
    each(n, [=](int64_t i) { dx[i] = scale * (dy[i] - exponential(y[i]) * sum); });
  } else {
    const Acc sum = row_sum<Acc>(n, [=](int64_t i) { return dy[i] * y[i]; });
    each(n, [=](int64_t i) { dx[i] = scale * ((dy[i] - sum) * y[i]); });
  }
}

// Calls row_function(a row of each input, where to put the result) over dimension 1 of inputs of
// shape (outer, cols, inner). Columns are copied to rows, so that a row has the same bits wherever
// its elements lie.
template <typename Acc, size_t inputs, typename RowFunction>
void over_rows(const std::array<at::Tensor, inputs>& from, const at::Tensor& result,
               const RowFunction& row_function) {
  const int64_t outer = from[0].size(0), cols = from[0].size(1), inner = from[0].size(2);
  const int64_t rows = outer * inner;
  std::array<at::Tensor, inputs> rows_from;
  for (size_t i = 0; i < inputs; ++i) rows_from[i] = from[i].transpose(1, 2).reshape({rows, cols});
  const at::Tensor rows_made =
      inner == 1 ? result.view({rows, cols}) : at::empty({rows, cols}, result.options());
  in_parallel_blocks(rows, cols, [&](int64_t first, int64_t count, Scratch& scratch) {
    const NewRows<Acc> made(rows_made, first, count, scratch[inputs]);
    std::array<at::Tensor, inputs> blocks;
    std::array<const Acc*, inputs> data;
    for (size_t i = 0; i < inputs; ++i) {
      blocks[i] = rows_of<Acc>(rows_from[i], first, count, scratch[i]);
      data[i] = blocks[i].template const_data_ptr<Acc>();
    }
    for (Acc *to = made.data(), *end = to + count * cols; to != end; to += cols) {
      row_function(data, to);
      for (const Acc*& row : data) row += cols;
    }
    made.store();
  });
  if (inner == 1) return;
  result.view({outer, cols, inner}).copy_(rows_made.view({outer, inner, cols}).transpose(1, 2));
}

// y = scale * x with one row of the mask, whose shape is that of the input by expand().
template <typename Acc>
void mask_row(const Acc* x, Acc scale, const at::Tensor& mask, int64_t row, Acc* y, int64_t n) {
  int64_t offset = 0;
  for (int64_t d = mask.dim() - 2; d >= 0; --d) {
    offset += row % mask.size(d) * mask.stride(d);
    row /= mask.size(d);
  }
  const int64_t stride = mask.stride(-1);
  if (mask.scalar_type() == at::kBool) {
    // Loads of bool itself are not vectorised.
    const auto* masked = static_cast<const uint8_t*>(mask.const_data_ptr()) + offset;
    each(n, [=](int64_t i) { y[i] = masked[i * stride] != 0 ? -kInfinity<Acc> : x[i] * scale; });
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, mask.scalar_type(), "fused_norm", [&] {
    const auto* added = mask.const_data_ptr<scalar_t>() + offset;
    each(n, [=](int64_t i) { y[i] = x[i] * scale + static_cast<Acc>(added[i * stride]); });
  });
}

template <typename Acc>
void masked_forward(const at::Tensor& x, const at::Tensor& mask, Acc scale, bool causal,
                    const at::Tensor& y) {
  const int64_t cols = x.size(-1), rows = x.numel() / cols;
  const int64_t queries = causal ? x.size(-2) : 1;
  const at::Tensor x_rows = x.reshape({rows, cols}), y_rows = y.view({rows, cols});
  in_parallel_blocks(rows, cols, [&](int64_t first, int64_t count, Scratch& scratch) {
    const NewRows<Acc> made(y_rows, first, count, scratch[0]);
    const at::Tensor block = rows_of<Acc>(x_rows, first, count, scratch[1]);
    const Acc* from = block.const_data_ptr<Acc>();
    Acc* to = made.data();
    for (int64_t row = first; row < first + count; ++row, from += cols, to += cols) {
      // Keys that a query may see come first; the rest is not looked at.
      const int64_t last = row % queries + cols - queries;
      const int64_t seen = causal ? std::clamp<int64_t>(last + 1, 0, cols) : cols;
      if (mask.defined()) {
        mask_row(from, scale, mask, row, to, seen);
      } else {
        each(seen, [=](int64_t i) { to[i] = from[i] * scale; });
      }
      // Nothing is left of a row: no maximum, and no NaN that a maximum does not see.
      const bool empty = (mask.defined() || causal) && std::all_of(to, to + seen, [](Acc value) {
                           return value == -kInfinity<Acc>;
                         });
      if (!empty) softmax_row(to, false, to, seen);
      std::fill(empty ? to : to + seen, to + cols, Acc(0));
    }
    made.store();
  });
}

}  // namespace

void softmax_forward(const at::Tensor& x, bool log, const at::Tensor& y) {
  in_precision_of(x.scalar_type(), [&](auto acc) {
    const auto row_function = [log, cols = x.size(1)](const auto& row, auto* to) {
      softmax_row(row[0], log, to, cols);
    };
    over_rows<decltype(acc), 1>({x}, y, row_function);
  });
}

void scaled_masked_softmax(const at::Tensor& x, const at::Tensor& mask, double scale, bool causal,
                           const at::Tensor& y) {
  in_precision_of(x.scalar_type(),
                  [&](auto acc) { masked_forward<decltype(acc)>(x, mask, scale, causal, y); });
}

void softmax_backward(const at::Tensor& dy, const at::Tensor& y, bool log, double scale,
                      const at::Tensor& dx) {
  in_precision_of(dx.scalar_type(), [&](auto acc) {
    using Acc = decltype(acc);
    const auto row_function = [=, cols = dy.size(1)](const auto& row, Acc* to) {
      gradient_row<Acc>(row[0], row[1], log, scale, to, cols);
    };
    over_rows<Acc, 2>({dy, y}, dx, row_function);
  });
}

}  // namespace fused_norm::cpu
