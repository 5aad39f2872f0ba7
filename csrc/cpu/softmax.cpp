// A row, or a tile of columns side by side, is converted once to the accumulation type Acc (float,
// or double for fp64), worked on while it is in cache, and rounded once on its way out.
#include "cpu/softmax.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/exponential.h"
#include "cpu/rows.h"
#include "cpu/softmax_row.h"

namespace fused_norm::cpu {
namespace {

// Columns of a tile: 256 bytes of fp32, whole cache lines at 16 bit too. Lines of a block of a
// RowSum.
constexpr int64_t kTile = 64, kLines = 32;

// Over rows.

template <typename Acc>
FUSED_NORM_SIMD double exp_sum(const Acc* x, Acc shift, int64_t n) {
  RowSum total;
  for (int64_t start = 0; start < n; start += kTerms) {
    const int64_t end = std::min(n, start + kTerms);
    Acc sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < end; ++i) sum += exponential(x[i] - shift);
    total.add(sum);
  }
  return total.value();
}

template <typename Acc>
FUSED_NORM_SIMD void subtract_from_row(const Acc* x, Acc first, Acc second, Acc* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - first) - second;
}

// x and y may be the same row.
template <typename Acc>
void softmax_row(const Acc* x, bool log, Acc* y, int64_t n) {
  const Acc largest = largest_of(x, n);
  if (log) {
    subtract_from_row<Acc>(x, largest, std::log(exp_sum(x, largest, n)), y, n);
  } else {
    const double sum = exp_row(x, largest, y, n);
    multiply_row<Acc>(1 / sum, y, n);
  }
}

template <bool log, typename Acc>
FUSED_NORM_SIMD double gradient_sum(const Acc* dy, const Acc* y, int64_t n) {
  RowSum total;
  for (int64_t start = 0; start < n; start += kTerms) {
    const int64_t end = std::min(n, start + kTerms);
    Acc sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < end; ++i) sum += log ? dy[i] : dy[i] * y[i];
    total.add(sum);
  }
  return total.value();
}

template <bool log, typename Acc>
FUSED_NORM_SIMD void gradient_row(const Acc* dy, const Acc* y, Acc sum, Acc scale, Acc* dx,
                                  int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    dx[i] = scale * (log ? dy[i] - exponential(y[i]) * sum : (dy[i] - sum) * y[i]);
  }
}

template <typename Acc>
at::Tensor rows_forward(const at::Tensor& x, bool log, at::ScalarType out_dtype) {
  const int64_t rows = x.size(0), cols = x.size(1);
  const at::Tensor y = at::empty({rows, cols}, out_dtype);
  const Rows<Acc> x_rows(x), y_rows(y);
  at::parallel_for(0, rows, std::max<int64_t>(kGrain / cols, 1), [&](int64_t begin, int64_t end) {
    const at::Tensor storage = at::empty({cols}, kType<Acc>);
    Acc* buffer = storage.mutable_data_ptr<Acc>();
    for (int64_t row = begin; row < end; ++row) {
      Acc* y_row = y_rows.target(row, buffer);
      softmax_row(x_rows.read(row, buffer), log, y_row, cols);
      y_rows.write(row, y_row);
    }
  });
  return y;
}

template <bool log, typename Acc>
at::Tensor rows_backward(const at::Tensor& dy, const at::Tensor& y, at::ScalarType input_dtype,
                         double scale) {
  const int64_t rows = dy.size(0), cols = dy.size(1);
  const at::Tensor dx = at::empty({rows, cols}, input_dtype);
  const Rows<Acc> dy_rows(dy), y_rows(y), dx_rows(dx);
  at::parallel_for(0, rows, std::max<int64_t>(kGrain / cols, 1), [&](int64_t begin, int64_t end) {
    const at::Tensor storage = at::empty({2, cols}, kType<Acc>);
    Acc* dy_buffer = storage.mutable_data_ptr<Acc>();
    Acc* y_buffer = dy_buffer + cols;
    for (int64_t row = begin; row < end; ++row) {
      const Acc* dy_row = dy_rows.read(row, dy_buffer);
      const Acc* y_row = y_rows.read(row, y_buffer);
      Acc* dx_row = dx_rows.target(row, dy_buffer);
      const Acc sum = gradient_sum<log>(dy_row, y_row, cols);
      gradient_row<log, Acc>(dy_row, y_row, sum, scale, dx_row, cols);
      dx_rows.write(row, dx_row);
    }
  });
  return dx;
}

// Over columns: a tile holds `cols` lines of `width` columns of a contiguous (outer, cols, inner).

struct Tile {
  int64_t start;  // of its first line, in elements
  int64_t width;
};

struct Tiling {
  int64_t cols, inner, blocks, count;

  Tiling(int64_t outer, int64_t cols, int64_t inner)
      : cols(cols), inner(inner), blocks((inner + kTile - 1) / kTile), count(outer * blocks) {}

  Tile tile(int64_t index) const {
    const int64_t first = index % blocks * kTile;
    return {index / blocks * cols * inner + first, std::min(kTile, inner - first)};
  }

  template <typename Acc>
  void read(const at::Tensor& from, Tile tile, Acc* to) const {
    const auto* base = static_cast<const char*>(from.const_data_ptr());
    for (int64_t c = 0; c < cols; ++c) {
      widen(from.scalar_type(), base + (tile.start + c * inner) * from.itemsize(),
            to + c * tile.width, tile.width);
    }
  }

  template <typename Acc>
  void write(const at::Tensor& to, Tile tile, const Acc* from) const {
    auto* base = static_cast<char*>(to.mutable_data_ptr());
    for (int64_t c = 0; c < cols; ++c) {
      narrow(to.scalar_type(), from + c * tile.width,
             base + (tile.start + c * inner) * to.itemsize(), tile.width);
    }
  }

  // Few enough tiles for each thread to be worth it.
  // Of the widest tile.
  int64_t elements() const { return cols * std::min(kTile, inner); }

  int64_t grain() const { return std::max<int64_t>(kGrain / elements(), 1); }
};

template <bool log, typename Acc>
FUSED_NORM_SIMD void softmax_tile(Acc* x, int64_t cols, int64_t width) {
  Acc largest[kTile];
  RowSum sums[kTile];
  for (int64_t j = 0; j < width; ++j) largest[j] = -kInfinity<Acc>;
  for (int64_t c = 0; c < cols; ++c) {
    const Acc* line = x + c * width;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) largest[j] = line[j] > largest[j] ? line[j] : largest[j];
  }
  for (int64_t start = 0; start < cols; start += kLines) {
    double sum[kTile] = {};
    for (int64_t c = start; c < std::min(start + kLines, cols); ++c) {
      Acc* line = x + c * width;
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) {
        const Acc e = exponential(line[j] - largest[j]);
        if (!log) line[j] = e;
        sum[j] += e;
      }
    }
    for (int64_t j = 0; j < width; ++j) sums[j].add(sum[j]);
  }
  Acc last[kTile];
  for (int64_t j = 0; j < width; ++j) {
    last[j] = log ? std::log(sums[j].value()) : 1 / sums[j].value();
  }
  for (int64_t c = 0; c < cols; ++c) {
    Acc* line = x + c * width;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      line[j] = log ? (line[j] - largest[j]) - last[j] : line[j] * last[j];
    }
  }
}

// Leaves dx in place of dy.
template <bool log, typename Acc>
FUSED_NORM_SIMD void gradient_tile(Acc* dy, const Acc* y, Acc scale, int64_t cols, int64_t width) {
  RowSum sums[kTile];
  for (int64_t start = 0; start < cols; start += kLines) {
    double part[kTile] = {};
    for (int64_t c = start; c < std::min(start + kLines, cols); ++c) {
      const Acc *dy_line = dy + c * width, *y_line = y + c * width;
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) part[j] += log ? dy_line[j] : dy_line[j] * y_line[j];
    }
    for (int64_t j = 0; j < width; ++j) sums[j].add(part[j]);
  }
  Acc sum[kTile];
  for (int64_t j = 0; j < width; ++j) sum[j] = sums[j].value();
  for (int64_t c = 0; c < cols; ++c) {
    Acc* dy_line = dy + c * width;
    const Acc* y_line = y + c * width;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      dy_line[j] = scale * (log ? dy_line[j] - exponential(y_line[j]) * sum[j]
                                : (dy_line[j] - sum[j]) * y_line[j]);
    }
  }
}

template <typename Acc>
at::Tensor columns_forward(const at::Tensor& x, bool log, at::ScalarType out_dtype) {
  const at::Tensor from = x.contiguous();
  const at::Tensor y = at::empty(x.sizes(), out_dtype);
  const Tiling tiling(x.size(0), x.size(1), x.size(2));
  const auto run = log ? softmax_tile<true, Acc> : softmax_tile<false, Acc>;
  at::parallel_for(0, tiling.count, tiling.grain(), [&](int64_t begin, int64_t end) {
    const at::Tensor storage = at::empty({tiling.elements()}, kType<Acc>);
    Acc* buffer = storage.mutable_data_ptr<Acc>();
    for (int64_t index = begin; index < end; ++index) {
      const Tile tile = tiling.tile(index);
      tiling.read(from, tile, buffer);
      run(buffer, tiling.cols, tile.width);
      tiling.write(y, tile, buffer);
    }
  });
  return y;
}

template <bool log, typename Acc>
at::Tensor columns_backward(const at::Tensor& dy, const at::Tensor& y, at::ScalarType input_dtype,
                            double scale) {
  const at::Tensor dy_from = dy.contiguous(), y_from = y.contiguous();
  const at::Tensor dx = at::empty(dy.sizes(), input_dtype);
  const Tiling tiling(dy.size(0), dy.size(1), dy.size(2));
  at::parallel_for(0, tiling.count, tiling.grain(), [&](int64_t begin, int64_t end) {
    const at::Tensor storage = at::empty({2, tiling.elements()}, kType<Acc>);
    Acc* dy_buffer = storage.mutable_data_ptr<Acc>();
    Acc* y_buffer = dy_buffer + tiling.elements();
    for (int64_t index = begin; index < end; ++index) {
      const Tile tile = tiling.tile(index);
      tiling.read(dy_from, tile, dy_buffer);
      tiling.read(y_from, tile, y_buffer);
      gradient_tile<log, Acc>(dy_buffer, y_buffer, scale, tiling.cols, tile.width);
      tiling.write(dx, tile, dy_buffer);
    }
  });
  return dx;
}

// Scaled and masked rows.

template <typename Acc>
FUSED_NORM_SIMD void scale_and_fill(const Acc* x, Acc scale, const Acc* masked, Acc* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = masked[i] != 0 ? -kInfinity<Acc> : x[i] * scale;
}

template <typename Acc>
FUSED_NORM_SIMD void scale_and_add(const Acc* x, Acc scale, const Acc* mask, Acc* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * scale + mask[i];
}

// Loads of bool itself are not vectorised.
template <typename Acc>
FUSED_NORM_SIMD void flags(const uint8_t* from, Acc* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}

template <typename Acc>
FUSED_NORM_SIMD void scale_row(const Acc* x, Acc scale, Acc* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * scale;
}

// The rows of a mask that was expanded to the input's shape, as Acc, one at a time; of a boolean
// mask 1 where it is true. A row that several of the input's share is converted once if they follow
// each other.
template <typename Acc>
class MaskRows {
 public:
  MaskRows(const at::Tensor& mask, int64_t cols)
      : mask_(mask), values_(at::empty({cols}, kType<Acc>)) {}

  bool boolean() const { return mask_.scalar_type() == at::kBool; }

  // Valid until the next call.
  const Acc* read(int64_t row) {
    Acc* to = values_.mutable_data_ptr<Acc>();
    int64_t offset = 0;
    for (int64_t d = mask_.dim() - 2; d >= 0; --d) {
      offset += row % mask_.size(d) * mask_.stride(d);
      row /= mask_.size(d);
    }
    if (offset == offset_) return to;
    offset_ = offset;
    const int64_t cols = mask_.size(-1), stride = mask_.stride(-1);
    if (stride == 1) {
      convert(offset, to, cols);
    } else {
      for (int64_t i = 0; i < cols; ++i) {
        if (i > 0 && stride == 0) {
          to[i] = to[0];
        } else {
          convert(offset + i * stride, to + i, 1);
        }
      }
    }
    return to;
  }

 private:
  void convert(int64_t offset, Acc* to, int64_t n) const {
    const auto* from = static_cast<const char*>(mask_.const_data_ptr()) + offset * mask_.itemsize();
    if (boolean()) {
      flags(reinterpret_cast<const uint8_t*>(from), to, n);
    } else {
      widen(mask_.scalar_type(), from, to, n);
    }
  }

  const at::Tensor& mask_;
  at::Tensor values_;
  int64_t offset_ = -1;
};

// Nothing is left of a row: no maximum, and no NaN that a maximum does not see.
template <typename Acc>
bool nothing_left(const Acc* x, int64_t n) {
  return std::all_of(x, x + n, [](Acc value) { return value == -kInfinity<Acc>; });
}

template <typename Acc>
at::Tensor masked_forward(const at::Tensor& x, const at::Tensor& mask, double scale, bool causal,
                          at::ScalarType out_dtype) {
  const int64_t cols = x.size(-1), rows = x.numel() / cols;
  const int64_t queries = causal ? x.size(-2) : 1;
  const at::Tensor y = at::empty(x.sizes(), out_dtype);
  const Rows<Acc> x_rows(x.reshape({rows, cols})), y_rows(y.view({rows, cols}));
  const Acc factor = scale;
  const bool masked = mask.defined() || causal;
  at::parallel_for(0, rows, std::max<int64_t>(kGrain / cols, 1), [&](int64_t begin, int64_t end) {
    const at::Tensor storage = at::empty({cols}, kType<Acc>);
    Acc* buffer = storage.mutable_data_ptr<Acc>();
    MaskRows<Acc> mask_rows(mask.defined() ? mask : storage, cols);
    for (int64_t row = begin; row < end; ++row) {
      const Acc* x_row = x_rows.read(row, buffer);
      Acc* y_row = y_rows.target(row, buffer);
      // Keys that a query may see come first; the rest is not looked at.
      const int64_t last = row % queries + cols - queries;
      const int64_t seen = causal ? std::clamp<int64_t>(last + 1, 0, cols) : cols;
      if (!mask.defined()) {
        scale_row(x_row, factor, y_row, seen);
      } else if (mask_rows.boolean()) {
        scale_and_fill(x_row, factor, mask_rows.read(row), y_row, seen);
      } else {
        scale_and_add(x_row, factor, mask_rows.read(row), y_row, seen);
      }
      const bool empty = masked && nothing_left(y_row, seen);
      if (!empty) softmax_row(y_row, false, y_row, seen);
      std::fill(empty ? y_row : y_row + seen, y_row + cols, Acc(0));
      y_rows.write(row, y_row);
    }
  });
  return y;
}

}  // namespace

at::Tensor softmax_forward(const at::Tensor& x, bool log, at::ScalarType out_dtype) {
  const at::NoGradGuard no_grad;
  const bool wide = x.scalar_type() == at::kDouble;
  if (x.size(2) == 1) {
    const auto run = wide ? rows_forward<double> : rows_forward<float>;
    return run(x.squeeze(2), log, out_dtype).unsqueeze(2);
  }
  const auto run = wide ? columns_forward<double> : columns_forward<float>;
  return run(x, log, out_dtype);
}

at::Tensor scaled_masked_softmax(const at::Tensor& x, const at::Tensor& mask, double scale,
                                 bool causal, at::ScalarType out_dtype) {
  const at::NoGradGuard no_grad;
  const auto run = x.scalar_type() == at::kDouble ? masked_forward<double> : masked_forward<float>;
  return run(x, mask, scale, causal, out_dtype);
}

at::Tensor softmax_backward(const at::Tensor& dy, const at::Tensor& y, bool log,
                            at::ScalarType input_dtype, double scale) {
  const at::NoGradGuard no_grad;
  const bool wide = input_dtype == at::kDouble;
  if (dy.size(2) == 1) {
    const auto with_log = wide ? rows_backward<true, double> : rows_backward<true, float>;
    const auto without = wide ? rows_backward<false, double> : rows_backward<false, float>;
    return (log ? with_log : without)(dy.squeeze(2), y.squeeze(2), input_dtype, scale).unsqueeze(2);
  }
  const auto with_log = wide ? columns_backward<true, double> : columns_backward<true, float>;
  const auto without = wide ? columns_backward<false, double> : columns_backward<false, float>;
  return (log ? with_log : without)(dy, y, input_dtype, scale);
}

}  // namespace fused_norm::cpu
