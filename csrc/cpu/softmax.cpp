#include "cpu/softmax.h"

#include <ATen/Dispatch.h>

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

// y = scale * x with one row of the mask, whose shape is that of the input by expand().
template <typename Acc>
void mask_row(const Acc* x, Acc scale, const at::Tensor& mask, int64_t row, Acc* y, int64_t n) {
  int64_t offset = 0;
  for (int64_t d = mask.dim() - 2; d >= 0; --d) {
    offset += row % mask.size(d) * mask.stride(d);
    row /= mask.size(d);
  }
  const int64_t stride = mask.dim() == 0 ? 0 : mask.stride(-1);
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

}  // namespace

void softmax_forward(const at::Tensor& x, bool log, const at::Tensor& mask, double scale,
                     int64_t queries, const at::Tensor& y) {
  const int64_t cols = x.size(1);
  const bool causal = queries > 0, hides = mask.defined() || causal;
  const auto forward = [&](auto acc) {
    using Acc = decltype(acc);
    over_rows<Acc, 1>({x}, y, [=](int64_t row, const auto& data, Acc* to) {
      const Acc *from = data[0], factor = scale;
      if (!hides && scale == 1) return softmax_row(from, log, to, cols);
      // Keys that a query may see come first; the rest is not looked at.
      const int64_t last = causal ? row % queries + cols - queries : cols - 1;
      const int64_t seen = std::clamp<int64_t>(last + 1, 0, cols);
      if (mask.defined()) {
        mask_row(from, factor, mask, row, to, seen);
      } else {
        each(seen, [=](int64_t i) { to[i] = from[i] * factor; });
      }
      // Nothing is left of a row: no maximum, and no NaN that a maximum does not see.
      const bool empty =
          hides && std::all_of(to, to + seen, [](Acc value) { return value == -kInfinity<Acc>; });
      if (!empty) softmax_row(to, log, to, seen);
      std::fill(empty ? to : to + seen, to + cols, Acc(0));
    });
  };
  in_precision_of(x.scalar_type(), forward);
}

void softmax_backward(const at::Tensor& dy, const at::Tensor& y, bool log, double scale,
                      const at::Tensor& dx) {
  in_precision_of(dx.scalar_type(), [&](auto acc) {
    using Acc = decltype(acc);
    const auto row_function = [=, cols = dy.size(1)](int64_t, const auto& row, Acc* to) {
      gradient_row<Acc>(row[0], row[1], log, scale, to, cols);
    };
    over_rows<Acc, 2>({dy, y}, dx, row_function);
  });
}

}  // namespace fused_norm::cpu
