// Rows are converted to the accumulation type by blocks, worked on while they are in cache, and
// rounded once on their way out. Long sums are kept in double: for fp32 that makes them as good as
// exact, and on a CPU it costs little. ATen's own norms give 0 where the squares of fp32 overflow,
// and statistics in bf16 for bf16.
#include "cpu/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "core/norm/recoverable.h"
#include "cpu/rows.h"

namespace fused_norm::cpu {
namespace {

// A parameter as Acc. One that is absent becomes a constant, so that one loop serves all forms.
template <typename Acc>
at::Tensor parameter(const at::Tensor& param, double offset, double if_absent, int64_t cols) {
  if (!param.defined()) return at::full({cols}, if_absent, kType<Acc>);
  const at::Tensor converted = param.to(kType<Acc>).contiguous();
  return offset == 0 ? converted : at::add(converted, offset);
}

template <typename Acc>
double row_mean(const Acc* x, int64_t n) {
  const double mean = row_sum<Acc>(n, [=](int64_t i) { return double{x[i]}; }) / n;
  if constexpr (std::is_same_v<Acc, float>) return mean;
  // The double sum of doubles rounds. What is left over repairs it: the mean of equal numbers is
  // then that number, and a constant row gives the bias exactly.
  return mean + row_sum<Acc>(n, [=](int64_t i) { return x[i] - mean; }) / n;
}

// Rows whose dweight and dbias are added up in Acc before they join a sum in double: few enough
// for fp32 to lose little, enough to make the longer sums cheap.
constexpr int64_t kFewRows = 16;

// dweight and dbias are summed in two stages: each chunk of rows into sums of its own, then those
// in order. Chunks depend on the shape alone, so the bits do not depend on the number of threads.
// There are at most 64, and their sums take at most 32 MB unless those of one row take more.
int64_t rows_per_chunk(int64_t rows, int64_t cols) {
  const int64_t chunks = std::clamp<int64_t>((int64_t{1} << 21) / cols, 1, 64);
  return std::max((rows + chunks - 1) / chunks, std::max<int64_t>(kGrain / cols, 8));
}

// The second stage: adds every chunk's sums to the first's, each column by one thread.
at::Tensor add_chunks(const at::Tensor& sums) {
  const int64_t chunks = sums.size(0), cols = sums.size(1);
  double* first = sums.mutable_data_ptr<double>();
  at::parallel_for(0, cols, std::max<int64_t>(kGrain / chunks, 1), [&](int64_t begin, int64_t end) {
    for (int64_t chunk = 1; chunk < chunks; ++chunk) {
      double* to = first + begin;
      each(end - begin, [=](int64_t i) { to[i] += to[chunk * cols + i]; });
    }
  });
  return sums[0];
}

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

  in_parallel_blocks(rows, cols, [&](int64_t first, int64_t count, Scratch& scratch) {
    const at::Tensor block = rows_of<Acc>(x, first, count, scratch[0]);
    const NewRows<Acc> made(result.y, first, count, scratch[1]);
    const Acc* from = block.const_data_ptr<Acc>();
    Acc* y = made.data();
    for (int64_t row = first; row < first + count; ++row, from += cols, y += cols) {
      const double mean = rms ? 0 : row_mean(from, cols);
      const double squares =
          row_sum<Acc>(cols, [=](int64_t i) { return (from[i] - mean) * (from[i] - mean); });
      const Acc centre = mean, rstd = 1 / std::sqrt(squares / cols + eps);
      if (!rms) means[row] = centre;
      rstds[row] = rstd;
      each(cols, [=](int64_t i) { y[i] = (from[i] - centre) * rstd * g[i] + b[i]; });
    }
    made.store();
  });
  return result;
}

// xhat = (y - bias) / g of rows of the output from `first` on, but for the listed columns.
at::Tensor recovered(const at::Tensor& y, const at::Tensor& g, const at::Tensor& bias,
                     const ListedColumns& listed, int64_t first) {
  const at::Tensor xhat = (y - bias).div_(g);
  if (!listed.columns.defined()) return xhat;
  const int64_t size = listed.columns.size(0);
  if (size > 0) {
    const at::Tensor side = listed.side.narrow(0, first, y.size(0)).narrow(1, 0, size);
    xhat.index_copy_(1, listed.columns, side);
  }
  return xhat.index_fill_(1, listed.missing, NAN);
}

template <typename Acc>
BackwardResult backward(const at::Tensor& dy, const at::Tensor& saved, const at::Tensor& mean,
                        const at::Tensor& rstd, const at::Tensor& weight, const at::Tensor& bias,
                        double weight_offset, bool rms, bool from_output,
                        const ListedColumns& listed, at::ScalarType input_dtype,
                        std::array<bool, 3> output_mask, const at::Tensor& dresidual) {
  const int64_t rows = dy.size(0), cols = dy.size(1);
  const at::Tensor affine_weight = parameter<Acc>(weight, weight_offset, 1, cols);
  const at::Tensor affine_bias = parameter<Acc>(bias, 0, 0, cols);
  const Acc* g = affine_weight.const_data_ptr<Acc>();
  const Acc* rstds = rstd.const_data_ptr<Acc>();
  const Acc* means = rms || from_output ? nullptr : mean.const_data_ptr<Acc>();
  BackwardResult result;
  if (output_mask[0]) result.dx = at::empty({rows, cols}, input_dtype);
  const bool wants_dweight = output_mask[1] && weight.defined();
  const bool wants_dbias = output_mask[2] && bias.defined();
  const int64_t chunk_rows = rows_per_chunk(rows, cols);
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  at::Tensor sums;  // of a chunk dweight's, then dbias's
  if (wants_dweight || wants_dbias) sums = at::zeros({chunks, 2 * cols}, at::kDouble);

  const auto do_block = [&](int64_t chunk, int64_t first, int64_t count, Scratch& scratch) {
    const at::Tensor dy_block = rows_of<Acc>(dy, first, count, scratch[0]);
    at::Tensor source = rows_of<Acc>(saved, first, count, scratch[1]);
    if (from_output) source = recovered(source, affine_weight, affine_bias, listed, first);
    const Acc* d = dy_block.const_data_ptr<Acc>();
    const Acc* from = source.const_data_ptr<Acc>();
    const NewRows<Acc> made(result.dx, first, count, scratch[2]);
    Acc* dx = made.data();
    std::vector<Acc> few(sums.defined() ? 2 * cols : 0);  // sums over a few rows
    double* of_chunk =
        sums.defined() ? sums.mutable_data_ptr<double>() + chunk * 2 * cols : nullptr;
    for (int64_t row = first; row < first + count; ++row, d += cols, from += cols, dx += cols) {
      const Acc centre = means == nullptr ? 0 : means[row], rstd_of_row = rstds[row];
      const Acc factor = from_output ? 1 : rstd_of_row;
      const auto xhat = [=](int64_t i) { return (from[i] - centre) * factor; };
      const auto h = [=](int64_t i) { return d[i] * g[i]; };
      if (of_chunk != nullptr) {
        Acc* to = few.data();
        each(cols, [=](int64_t i) {
          to[i] += d[i] * xhat(i);
          to[cols + i] += d[i];
        });
        if ((row + 1) % kFewRows == 0 || row + 1 == first + count) {
          each(2 * cols, [=](int64_t i) {
            of_chunk[i] += to[i];
            to[i] = 0;
          });
        }
      }
      if (!result.dx.defined()) continue;
      // dx = rstd * (h - mean(h) - xhat * mean(h * xhat)); RMSNorm has no mean(h).
      const Acc mean_h =
          rms ? 0 : row_sum<Acc>(cols, [=](int64_t i) { return double{h(i)}; }) / cols;
      const Acc mean_product =
          row_sum<Acc>(cols, [=](int64_t i) { return double{h(i)} * xhat(i); }) / cols;
      each(cols,
           [=](int64_t i) { dx[i] = rstd_of_row * (h(i) - mean_h - xhat(i) * mean_product); });
    }
    if (!result.dx.defined()) return;
    if (dresidual.defined()) made.values.add_(dresidual.narrow(0, first, count));
    made.store();
  };
  const int64_t grain = std::max<int64_t>(kGrain / (chunk_rows * cols), 1);
  at::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      in_blocks(chunk * chunk_rows, std::min(rows, (chunk + 1) * chunk_rows), cols,
                [&](int64_t first, int64_t count) { do_block(chunk, first, count, scratch); });
    }
  });
  if (sums.defined()) {
    const at::Tensor total = add_chunks(sums);
    const auto gradient = [&](int64_t start, const at::Tensor& param) {
      return total.narrow(0, start, cols)
          .to(param.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    };
    if (wants_dweight) result.dweight = gradient(0, weight);
    if (wants_dbias) result.dbias = gradient(cols, bias);
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
