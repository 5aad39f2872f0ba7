// Each row is converted once to the accumulation type Acc (float, or double for fp64), worked on
// while it is in cache, and rounded once on its way out. Long sums are kept in double: for fp32
// that makes them as good as exact, and on a CPU it costs little.
#include "cpu/norm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "core/norm/recoverable.h"
#include "cpu/rows.h"

namespace fused_norm::cpu {
namespace {

// Rows whose dweight and dbias are added up in Acc before they join a sum in double: few enough
// for fp32 to lose little, enough to make the longer sums cheap.
constexpr int64_t kFewRows = 16;

// The pitch of a thread's buffers. Each starts on a cache line of its own: wide loads that straddle
// two lines made the backward pass take 1.7 times as long.
int64_t line_size(int64_t cols) { return (cols + 15) / 16 * 16; }

// A parameter as Acc. One that is absent becomes a constant, so that one loop serves all forms.
template <typename Acc>
at::Tensor parameter(const at::Tensor& param, double offset, double if_absent, int64_t cols) {
  if (!param.defined()) return at::full({cols}, if_absent, kType<Acc>);
  const at::Tensor converted = param.to(kType<Acc>).contiguous();
  return offset == 0 ? converted : at::add(converted, offset);
}

// Columns of a block of a RowSum. fp64 has shorter ones, of few additions in each lane of a vector
// (RMSNorm of 5000 columns around 1e4, four lanes: y off by 9.6 u with blocks of 512, by 3.5 u).
template <typename Acc>
constexpr int64_t kBlockCols = std::is_same_v<Acc, double> ? 32 : 512;

// The sum of term(i) over a row of n. Part of the caller, whose instruction set it gets.
template <typename Acc, typename Term>
[[gnu::always_inline]] inline double row_sum(int64_t n, Term term) {
  RowSum sum;
  for (int64_t begin = 0; begin < n; begin += kBlockCols<Acc>) {
    const int64_t end = std::min(begin + kBlockCols<Acc>, n);
    double of_block = 0;
#pragma omp simd reduction(+ : of_block)
    for (int64_t i = begin; i < end; ++i) of_block += term(i);
    sum.add(of_block);
  }
  return sum.value();
}

template <typename Acc>
FUSED_NORM_SIMD double row_mean(const Acc* x, int64_t n) {
  const double mean = row_sum<Acc>(n, [=](int64_t i) { return x[i]; }) / n;
  if constexpr (std::is_same_v<Acc, float>) return mean;
  // The double sum of doubles rounds. What is left over repairs it: the mean of equal numbers is
  // then that number, and a constant row gives the bias exactly.
  return mean + row_sum<Acc>(n, [=](int64_t i) { return x[i] - mean; }) / n;
}

template <typename Acc>
FUSED_NORM_SIMD double row_variance(const Acc* x, int64_t n, double mean) {
  return row_sum<Acc>(n, [=](int64_t i) { return (x[i] - mean) * (x[i] - mean); }) / n;
}

template <typename Acc>
FUSED_NORM_SIMD void normalize_row(const Acc* x, Acc mean, Acc rstd, const Acc* weight,
                                   const Acc* bias, Acc* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
}

// What backward knows of a row. xhat is recomputed where it is needed: cheaper than keeping it.
template <typename Acc>
struct GradientRow {
  const Acc *dy, *saved, *weight, *shift, *divisor;
  Acc mean, rstd;
  int64_t cols;

  template <bool from_output>
  Acc xhat(int64_t i) const {
    return from_output ? (saved[i] - shift[i]) / divisor[i] : (saved[i] - mean) * rstd;
  }
};

// With h = dy * weight: dx = rstd * (h - mean(h) - xhat * mean(h * xhat)); RMSNorm has no mean(h).
template <bool from_output, typename Acc>
FUSED_NORM_SIMD void row_dx(GradientRow<Acc> row, bool rms, Acc* dx) {
  RowSum sum, sum_xhat;
  for (int64_t begin = 0; begin < row.cols; begin += kBlockCols<Acc>) {
    const int64_t end = std::min(begin + kBlockCols<Acc>, row.cols);
    double of_block = 0, xhat_of_block = 0;
#pragma omp simd reduction(+ : of_block, xhat_of_block)
    for (int64_t i = begin; i < end; ++i) {
      const double h = row.dy[i] * row.weight[i];
      of_block += h;
      xhat_of_block += h * row.template xhat<from_output>(i);
    }
    sum.add(of_block);
    sum_xhat.add(xhat_of_block);
  }
  const Acc mean = rms ? 0 : sum.value() / row.cols;
  const Acc mean_xhat = sum_xhat.value() / row.cols;
#pragma omp simd
  for (int64_t i = 0; i < row.cols; ++i) {
    const Acc h = row.dy[i] * row.weight[i];
    dx[i] = row.rstd * (h - mean - row.template xhat<from_output>(i) * mean_xhat);
  }
}

template <bool from_output, typename Acc>
FUSED_NORM_SIMD void row_parameter_gradients(GradientRow<Acc> row, Acc* dweight, Acc* dbias) {
#pragma omp simd
  for (int64_t i = 0; i < row.cols; ++i) {
    dweight[i] += row.dy[i] * row.template xhat<from_output>(i);
    dbias[i] += row.dy[i];
  }
}

template <typename Acc>
FUSED_NORM_SIMD void add_to_row(const Acc* from, Acc* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

// Adds one row of sums to another and clears it.
template <typename Acc>
FUSED_NORM_SIMD void move_sums(Acc* from, double* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    to[i] += from[i];
    from[i] = 0;
  }
}

// dweight and dbias are summed in two stages: each chunk of rows into sums of its own, then those
// in order. Chunks depend on the shape alone, so the bits do not depend on the number of threads.
// There are at most 64, and their sums take at most 32 MB unless those of one row take more.
int64_t rows_per_chunk(int64_t rows, int64_t cols) {
  const int64_t chunks = std::clamp<int64_t>((int64_t{1} << 21) / cols, 1, 64);
  return std::max<int64_t>((rows + chunks - 1) / chunks, 8);
}

// The second stage: moves every chunk's sums into the first's, each column by one thread.
at::Tensor add_chunks(const at::Tensor& sums) {
  const int64_t chunks = sums.size(0), cols = sums.size(1);
  double* first = sums.mutable_data_ptr<double>();
  at::parallel_for(0, cols, std::max<int64_t>(kGrain / chunks, 1), [&](int64_t begin, int64_t end) {
    for (int64_t chunk = 1; chunk < chunks; ++chunk) {
      move_sums(first + chunk * cols + begin, first + begin, end - begin);
    }
  });
  return sums[0];
}

// How xhat = (saved - shift) / divisor is had from the output: (bias, g) but for columns that are
// not recoverable. There the saved value is replaced by xhat itself, or the divisor is NaN.
template <typename Acc>
class Recovery {
 public:
  Recovery(const at::Tensor& g, const at::Tensor& bias, const ListedColumns& listed)
      : shift_(bias), divisor_(g), columns_(listed.columns) {
    if (!columns_.defined()) return;
    side_ = listed.side.contiguous();
    shift_ = bias.index_fill(0, columns_, 0);
    divisor_ = g.index_fill(0, columns_, 1).index_fill_(0, listed.missing, NAN);
  }

  const Acc* shift() const { return shift_.const_data_ptr<Acc>(); }
  const Acc* divisor() const { return divisor_.const_data_ptr<Acc>(); }

  const Acc* with_listed(const Acc* saved, int64_t row, Acc* buffer) const {
    if (!columns_.defined()) return saved;
    if (saved != buffer) std::copy_n(saved, shift_.size(0), buffer);
    const int64_t* columns = columns_.const_data_ptr<int64_t>();
    const Acc* side = side_.const_data_ptr<Acc>() + row * side_.size(1);
    for (int64_t i = 0; i < columns_.size(0); ++i) buffer[columns[i]] = side[i];
    return buffer;
  }

 private:
  at::Tensor shift_, divisor_, columns_, side_;
};

DType core_dtype(at::ScalarType type) {
  return type == at::kHalf       ? DType::kFloat16
         : type == at::kBFloat16 ? DType::kBFloat16
         : type == at::kFloat    ? DType::kFloat32
                                 : DType::kFloat64;
}

template <typename Acc>
at::Tensor find_lost_columns(const at::Tensor& weight, const at::Tensor& bias, double weight_offset,
                             int64_t cols, at::ScalarType y_dtype, bool precise) {
  const at::Tensor affine_weight = parameter<Acc>(weight, weight_offset, 1, cols);
  const at::Tensor affine_bias = parameter<Acc>(bias, 0, 0, cols);
  const Acc* g = affine_weight.const_data_ptr<Acc>();
  const Acc* b = affine_bias.const_data_ptr<Acc>();
  const DType y = core_dtype(y_dtype);
  const auto limits = precise ? precise_limits<Acc>(y) : recoverable_limits<Acc>(y);
  std::vector<int64_t> lost;
  for (int64_t col = 0; col < cols; ++col) {
    if (!meets(limits, g[col], b[col])) lost.push_back(col);
  }
  return at::tensor(lost, at::kLong);
}

template <typename Acc>
ForwardResult forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps, double weight_offset, bool rms, at::ScalarType out_dtype) {
  const int64_t rows = x.size(0), cols = x.size(1);
  ForwardResult result{at::empty({rows, cols}, out_dtype), {}, at::empty({rows}, kType<Acc>)};
  if (!rms) result.mean = at::empty({rows}, kType<Acc>);
  const at::Tensor affine_weight = parameter<Acc>(weight, weight_offset, 1, cols);
  const at::Tensor affine_bias = parameter<Acc>(bias, 0, 0, cols);
  const Acc* g = affine_weight.const_data_ptr<Acc>();
  const Acc* b = affine_bias.const_data_ptr<Acc>();
  Acc* means = rms ? nullptr : result.mean.mutable_data_ptr<Acc>();
  Acc* rstds = result.rstd.mutable_data_ptr<Acc>();
  const Rows<Acc> x_rows(x), y_rows(result.y);

  at::parallel_for(0, rows, std::max<int64_t>(kGrain / cols, 1), [&](int64_t begin, int64_t end) {
    const at::Tensor storage = at::empty({cols}, kType<Acc>);
    Acc* buffer = storage.mutable_data_ptr<Acc>();
    for (int64_t row = begin; row < end; ++row) {
      const Acc* x_row = x_rows.read(row, buffer);
      const double mean = rms ? 0 : row_mean(x_row, cols);
      rstds[row] = 1 / std::sqrt(row_variance(x_row, cols, mean) + eps);
      if (!rms) means[row] = mean;
      Acc* y_row = y_rows.target(row, buffer);
      normalize_row<Acc>(x_row, mean, rstds[row], g, b, y_row, cols);
      y_rows.write(row, y_row);
    }
  });
  return result;
}

template <typename Acc>
BackwardResult backward(const at::Tensor& dy, const at::Tensor& saved, const at::Tensor& mean,
                        const at::Tensor& rstd, const at::Tensor& weight, const at::Tensor& bias,
                        double weight_offset, bool rms, bool from_output,
                        const ListedColumns& listed, at::ScalarType input_dtype,
                        std::array<bool, 3> output_mask, const at::Tensor& dresidual) {
  const int64_t rows = dy.size(0), cols = dy.size(1);
  const int64_t chunk_rows = rows_per_chunk(rows, cols);
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  const at::Tensor affine_weight = parameter<Acc>(weight, weight_offset, 1, cols);
  const at::Tensor affine_bias = parameter<Acc>(bias, 0, 0, cols);
  const Acc* g = affine_weight.const_data_ptr<Acc>();
  const Recovery<Acc> recovery(affine_weight, affine_bias, listed);
  const at::Tensor rstd_row = rstd.contiguous();
  const at::Tensor mean_row = rms || from_output ? at::Tensor() : mean.contiguous();
  const Acc* rstds = rstd_row.const_data_ptr<Acc>();
  const Acc* means = mean_row.defined() ? mean_row.const_data_ptr<Acc>() : nullptr;
  BackwardResult result;
  if (output_mask[0]) result.dx = at::empty({rows, cols}, input_dtype);
  const Rows<Acc> dy_rows(dy), saved_rows(saved), dx_rows(result.dx);
  const Rows<Acc> dresidual_rows(dresidual);
  const bool wants_dweight = output_mask[1] && weight.defined();
  const bool wants_dbias = output_mask[2] && bias.defined();
  // A row of sums is dweight's, then at `line` dbias's.
  const int64_t line = line_size(cols);
  at::Tensor sums;
  if (wants_dweight || wants_dbias) sums = at::zeros({chunks, 2 * line}, at::kDouble);
  const auto input_gradient = from_output ? row_dx<true, Acc> : row_dx<false, Acc>;
  const auto add_parameter_gradients =
      from_output ? row_parameter_gradients<true, Acc> : row_parameter_gradients<false, Acc>;

  const int64_t grain = std::max<int64_t>(kGrain / (chunk_rows * cols), 1);
  at::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    const at::Tensor buffers = at::zeros({6, line}, kType<Acc>);
    Acc* dy_buffer = buffers.mutable_data_ptr<Acc>();
    Acc* saved_buffer = dy_buffer + line;
    Acc* dx_buffer = saved_buffer + line;
    Acc* dresidual_buffer = dx_buffer + line;
    Acc* few_sums = dresidual_buffer + line;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t row_end = std::min(rows, (chunk + 1) * chunk_rows);
      for (int64_t row = chunk * chunk_rows; row < row_end; ++row) {
        const Acc* dy_row = dy_rows.read(row, dy_buffer);
        const Acc* saved_row =
            recovery.with_listed(saved_rows.read(row, saved_buffer), row, saved_buffer);
        const Acc row_mean = means != nullptr ? means[row] : 0;
        const GradientRow<Acc> values{
            dy_row, saved_row, g, recovery.shift(), recovery.divisor(), row_mean, rstds[row], cols};
        if (output_mask[0]) {
          Acc* dx_row = dx_rows.target(row, dx_buffer);
          input_gradient(values, rms, dx_row);
          if (dresidual.defined())
            add_to_row(dresidual_rows.read(row, dresidual_buffer), dx_row, cols);
          dx_rows.write(row, dx_row);
        }
        if (!sums.defined()) continue;
        add_parameter_gradients(values, few_sums, few_sums + line);
        if ((row + 1) % kFewRows == 0 || row + 1 == row_end) {
          move_sums(few_sums, sums.mutable_data_ptr<double>() + chunk * 2 * line, 2 * line);
        }
      }
    }
  });
  if (sums.defined()) {
    const at::Tensor total = add_chunks(sums);
    const auto gradient = [&](int64_t start, const at::Tensor& param) {
      return total.narrow(0, start, cols)
          .to(param.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    };
    if (wants_dweight) result.dweight = gradient(0, weight);
    if (wants_dbias) result.dbias = gradient(line, bias);
  }
  return result;
}

}  // namespace

ForwardResult norm_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                           double eps, double weight_offset, bool rms, at::ScalarType out_dtype) {
  const at::NoGradGuard no_grad;
  const auto run = x.scalar_type() == at::kDouble ? forward<double> : forward<float>;
  return run(x, weight, bias, eps, weight_offset, rms, out_dtype);
}

BackwardResult norm_backward(const at::Tensor& dy, const at::Tensor& saved, const at::Tensor& mean,
                             const at::Tensor& rstd, const at::Tensor& weight,
                             const at::Tensor& bias, double weight_offset, bool rms,
                             bool from_output, const ListedColumns& listed,
                             at::ScalarType input_dtype, std::array<bool, 3> output_mask,
                             const at::Tensor& dresidual) {
  const at::NoGradGuard no_grad;
  const auto run = input_dtype == at::kDouble ? backward<double> : backward<float>;
  return run(dy, saved, mean, rstd, weight, bias, weight_offset, rms, from_output, listed,
             input_dtype, output_mask, dresidual);
}

at::Tensor lost_columns(const at::Tensor& weight, const at::Tensor& bias, double weight_offset,
                        int64_t cols, at::ScalarType x_dtype, at::ScalarType y_dtype,
                        bool precise) {
  const at::NoGradGuard no_grad;
  const auto find = x_dtype == at::kDouble ? find_lost_columns<double> : find_lost_columns<float>;
  return find(weight, bias, weight_offset, cols, y_dtype, precise);
}

at::Tensor gather_xhat(const at::Tensor& x, const at::Tensor& mean, const at::Tensor& rstd,
                       const at::Tensor& columns) {
  const at::NoGradGuard no_grad;
  at::Tensor xhat = x.index_select(1, columns).to(rstd.scalar_type());
  if (mean.defined()) xhat.sub_(mean.unsqueeze(1));
  return xhat.mul_(rstd.unsqueeze(1));
}

}  // namespace fused_norm::cpu
