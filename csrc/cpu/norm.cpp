// Rows are converted to the accumulation type by blocks, worked on while they are in cache, and
// rounded once on their way out. Long sums are kept in double: for fp32 that makes them as good as
// exact, and on a CPU it costs little. ATen's own norms give 0 where the squares of fp32 overflow,
// and statistics in bf16 for bf16.
#include "cpu/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "cpu/rows.h"

namespace fused_norm::cpu {
namespace {

// A norm's parameters as Acc. One that is absent becomes a constant, so that one loop serves all
// forms.
template <typename Acc>
struct Affine {
  at::Tensor weight, bias;  // (cols), weight_offset added

  explicit Affine(const NormColumns& norm)
      : weight(as_acc(norm.weight, 1, norm.cols)), bias(as_acc(norm.bias, 0, norm.cols)) {
    if (norm.weight.defined() && norm.weight_offset != 0) weight = weight + norm.weight_offset;
  }
  const Acc* g() const { return weight.const_data_ptr<Acc>(); }
  const Acc* b() const { return bias.const_data_ptr<Acc>(); }

 private:
  static at::Tensor as_acc(const at::Tensor& param, double if_absent, int64_t cols) {
    if (!param.defined()) return at::full({cols}, if_absent, kType<Acc>);
    return param.to(kType<Acc>).reshape({-1}).contiguous();
  }
};

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

template <typename Acc>
void forward(const at::Tensor& input, const NormColumns& norm, double eps, bool rms,
             const at::Tensor& output, const at::Tensor& mean, const at::Tensor& rstd) {
  const int64_t rows = rstd.numel(), cols = norm.cols;
  const Affine<Acc> affine(norm);
  const Acc *g = affine.g(), *b = affine.b();
  Acc* means = rms ? nullptr : mean.mutable_data_ptr<Acc>();
  Acc* rstds = rstd.mutable_data_ptr<Acc>();
  const auto row_function = [=](int64_t row, const auto& data, Acc* y) {
    const Acc* from = data[0];
    const double shift = rms ? 0 : row_mean(from, cols);
    const double squares =
        row_sum<Acc>(cols, [=](int64_t i) { return (from[i] - shift) * (from[i] - shift); });
    const Acc centre = shift, scale = 1 / std::sqrt(squares / cols + eps);
    if (!rms) means[row] = centre;
    rstds[row] = scale;
    each(cols, [=](int64_t i) { y[i] = (from[i] - centre) * scale * g[i] + b[i]; });
  };
  over_rows<Acc, 1>({input.reshape({rows, cols, 1})}, output.view({rows, cols, 1}), row_function);
}

template <typename Acc>
void backward(const NormBackward& call) {
  const int64_t rows = call.rstd.numel(), cols = call.norm.cols;
  const bool rms = call.rms, from_output = call.from_output, lists = call.columns.defined();
  const auto as_rows = [&](const at::Tensor& t) {
    return t.defined() ? t.reshape({rows, cols}) : t;
  };
  const at::Tensor dy = as_rows(call.dy), saved = as_rows(call.saved);
  const at::Tensor dresidual = as_rows(call.dresidual), to = as_rows(call.gradients[0]);
  const Affine<Acc> affine(call.norm);
  const Acc* g = affine.g();
  const Acc* rstds = call.rstd.const_data_ptr<Acc>();
  const Acc* means = rms || from_output ? nullptr : call.mean.const_data_ptr<Acc>();
  const int64_t chunk_rows = rows_per_chunk(rows, cols);
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  at::Tensor sums;  // of a chunk dweight's, then dbias's
  if (call.gradients[1].defined() || call.gradients[2].defined()) {
    sums = at::zeros({chunks, 2 * cols}, at::kDouble);
  }

  const auto do_block = [&](int64_t chunk, int64_t first, int64_t count, Scratch& scratch) {
    const at::Tensor dy_block = rows_of<Acc>(dy, first, count, scratch[0]);
    at::Tensor source = rows_of<Acc>(saved, first, count, scratch[1]);
    if (from_output) {  // xhat
      source = (source - affine.bias).div_(affine.weight);
      if (lists) source.index_copy_(1, call.columns, call.side.narrow(0, first, count));
    }
    const Acc* d = dy_block.const_data_ptr<Acc>();
    const Acc* from = source.const_data_ptr<Acc>();
    const NewRows<Acc> made(to, first, count, scratch[2]);
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
        Acc* sum = few.data();
        each(cols, [=](int64_t i) {
          sum[i] += d[i] * xhat(i);
          sum[cols + i] += d[i];
        });
        if ((row + 1) % kFewRows == 0 || row + 1 == first + count) {
          each(2 * cols, [=](int64_t i) {
            of_chunk[i] += sum[i];
            sum[i] = 0;
          });
        }
      }
      if (!to.defined()) continue;
      // dx = rstd * (h - mean(h) - xhat * mean(h * xhat)); RMSNorm has no mean(h).
      const Acc mean_h =
          rms ? 0 : row_sum<Acc>(cols, [=](int64_t i) { return double{h(i)}; }) / cols;
      const Acc mean_product =
          row_sum<Acc>(cols, [=](int64_t i) { return double{h(i)} * xhat(i); }) / cols;
      each(cols,
           [=](int64_t i) { dx[i] = rstd_of_row * (h(i) - mean_h - xhat(i) * mean_product); });
    }
    if (!to.defined()) return;
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
  if (!sums.defined()) return;
  const at::Tensor total = at::sum(sums, 0);
  for (int i = 1; i <= 2; ++i) {
    const at::Tensor& gradient = call.gradients[i];
    if (gradient.defined()) gradient.view({cols}).copy_(total.narrow(0, (i - 1) * cols, cols));
  }
}

}  // namespace

void norm_forward(const at::Tensor& x, const NormColumns& norm, double eps, bool rms,
                  const at::Tensor& y, const at::Tensor& mean, const at::Tensor& rstd) {
  in_precision_of(norm.x_dtype,
                  [&](auto acc) { forward<decltype(acc)>(x, norm, eps, rms, y, mean, rstd); });
}

void norm_backward(const NormBackward& call) {
  in_precision_of(call.norm.x_dtype, [&](auto acc) { backward<decltype(acc)>(call); });
}

at::Tensor columns_beyond(const RecoverableLimits<double>& limits, const NormColumns& norm) {
  std::vector<int64_t> beyond;
  in_precision_of(norm.x_dtype, [&](auto acc) {
    using Acc = decltype(acc);
    const Affine<Acc> affine(norm);
    const Acc *g = affine.g(), *b = affine.b();
    for (int64_t col = 0; col < norm.cols; ++col) {
      if (!meets<double>(limits, g[col], b[col])) beyond.push_back(col);
    }
  });
  return at::tensor(beyond, at::kLong);
}

}  // namespace fused_norm::cpu
