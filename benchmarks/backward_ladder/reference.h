// A LayerNorm backward problem and its solution on the CPU in double, with bounds for fp32 answers.
// Plain C++: tested without a GPU (tests/cpp/backward_ladder_test.cpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace backward_ladder {

template <typename T>
struct Problem {
  int64_t rows;
  int cols;
  std::vector<T> x, dy;       // rows x cols
  std::vector<T> weight;      // cols
  std::vector<T> mean, rstd;  // rows: what forward saves
};

// Numbers without a pattern, the same in every run: x and dy of variance 1, x off its zero, weights
// around 1.
template <typename T>
Problem<T> make_problem(int64_t rows, int cols, double eps = 1e-5) {
  uint64_t state = 0;
  auto uniform = [&] {  // in [-1, 1): splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return static_cast<double>(static_cast<int64_t>(z ^ (z >> 31))) * 0x1p-63;
  };
  Problem<T> problem{rows, cols, {}, {}, {}, {}, {}};
  auto fill = [&](std::vector<T>& values, int64_t count, double center, double reach) {
    values.resize(count);
    for (T& value : values) value = static_cast<T>(center + reach * uniform());
  };
  fill(problem.x, rows * cols, 0.25, std::sqrt(3.0));
  fill(problem.dy, rows * cols, 0.0, std::sqrt(3.0));
  fill(problem.weight, cols, 1.0, 0.5);
  for (int64_t row = 0; row < rows; ++row) {
    const T* const x = &problem.x[row * cols];
    double mean = 0, variance = 0;
    for (int c = 0; c < cols; ++c) mean += x[c];
    mean /= cols;
    for (int c = 0; c < cols; ++c) variance += (x[c] - mean) * (x[c] - mean);
    problem.mean.push_back(static_cast<T>(mean));
    problem.rstd.push_back(static_cast<T>(1 / std::sqrt(variance / cols + eps)));
  }
  return problem;
}

// A result, and how far an fp32 answer may be from it.
struct Bounded {
  std::vector<double> value, bound;
};

struct Gradients {
  Bounded dx, dweight, dbias;
};

// With xhat = (x - mean) * rstd and w = dy * weight:
//   dx = rstd * (w - mean(w) - xhat * mean(w * xhat)), dweight = sum of dy * xhat over the rows,
//   dbias = sum of dy over the rows.
// Bounds hold for sums in any order, also one after the other: k terms of rms s add up to about
// s * sqrt(k), of which each addition rounds a share of u, so that n of them err by u * n * s /
// sqrt(6), rms; four of the whole u * n * s leave room for the worst of all columns. In dx such
// sums are divided by n again, and every other step is a few roundings of its own.
template <typename T>
Gradients solve(const Problem<T>& problem) {
  constexpr double u = std::numeric_limits<float>::epsilon() / 2;
  const int cols = problem.cols;
  const size_t size = problem.rows * static_cast<size_t>(cols);
  Gradients gradients;
  gradients.dx = {std::vector<double>(size), std::vector<double>(size)};
  gradients.dweight = gradients.dbias = {std::vector<double>(cols), std::vector<double>(cols)};
  for (int64_t row = 0; row < problem.rows; ++row) {
    const T* const x = &problem.x[row * cols];
    const T* const dy = &problem.dy[row * cols];
    const double mean = problem.mean[row], rstd = problem.rstd[row];
    double sum_w = 0, sum_wx = 0, squares_w = 0, squares_wx = 0;
    for (int c = 0; c < cols; ++c) {
      const double xhat = (x[c] - mean) * rstd, d = dy[c], w = d * problem.weight[c];
      sum_w += w;
      sum_wx += w * xhat;
      squares_w += w * w;
      squares_wx += w * xhat * (w * xhat);
      gradients.dweight.value[c] += d * xhat;
      gradients.dweight.bound[c] += d * xhat * (d * xhat);
      gradients.dbias.value[c] += d;
      gradients.dbias.bound[c] += d * d;
    }
    const double rms_w = std::sqrt(squares_w / cols), rms_wx = std::sqrt(squares_wx / cols);
    double* const dx = &gradients.dx.value[row * cols];
    double* const bound = &gradients.dx.bound[row * cols];
    for (int c = 0; c < cols; ++c) {
      const double xhat = (x[c] - mean) * rstd, w = static_cast<double>(dy[c]) * problem.weight[c];
      dx[c] = rstd * (w - sum_w / cols - xhat * (sum_wx / cols));
      bound[c] = 8 * u * rstd * (std::abs(w) + rms_w + std::abs(xhat) * rms_wx);
    }
  }
  for (Bounded* of_columns : {&gradients.dweight, &gradients.dbias}) {
    // Until here a sum of squares.
    for (double& bound : of_columns->bound) {
      bound = 4 * u * problem.rows * std::sqrt(bound / problem.rows);
    }
  }
  return gradients;
}

// The largest error as a share of its bound: right up to 1, infinite where there is a NaN.
inline double error_over_bound(const Bounded& expected, const std::vector<float>& got) {
  double worst = 0;
  for (size_t i = 0; i < expected.value.size(); ++i) {
    const double error = std::abs(got[i] - expected.value[i]) / expected.bound[i];
    if (std::isnan(error)) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, error);
  }
  return worst;
}

}  // namespace backward_ladder
