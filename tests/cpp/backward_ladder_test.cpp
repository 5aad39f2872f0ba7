// What the steps of benchmarks/backward_ladder are checked against is right itself.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "benchmarks/backward_ladder/reference.h"

namespace backward_ladder {
namespace {

constexpr double kEps = 1e-5;

// sum(dy * y) of the forward pass, by its definition.
double loss(const Problem<double>& problem, const std::vector<double>& bias) {
  const int cols = problem.cols;
  double sum = 0;
  for (int64_t row = 0; row < problem.rows; ++row) {
    const double* const x = &problem.x[row * cols];
    double mean = 0, variance = 0;
    for (int c = 0; c < cols; ++c) mean += x[c] / cols;
    for (int c = 0; c < cols; ++c) variance += std::pow(x[c] - mean, 2) / cols;
    for (int c = 0; c < cols; ++c) {
      const double xhat = (x[c] - mean) / std::sqrt(variance + kEps);
      sum += problem.dy[row * cols + c] * (problem.weight[c] * xhat + bias[c]);
    }
  }
  return sum;
}

TEST(BackwardLadder, ReferenceIsTheDerivativeOfTheForwardPass) {
  for (const auto& [rows, cols] : {std::pair{1, 2}, {6, 9}, {3, 64}}) {
    Problem<double> problem = make_problem<double>(rows, cols, kEps);
    std::vector<double> bias(cols, 0.5);
    const Gradients gradients = solve(problem);
    auto expect_derivatives = [&](std::vector<double>& values, const Bounded& derivatives) {
      ASSERT_EQ(derivatives.value.size(), values.size());
      for (size_t i = 0; i < values.size(); ++i) {
        // A central difference errs by h^2 f''' / 6 and by rounding, 2^-53 |f| / h: at this h, with
        // f and its derivatives below 10^3, by less than 1e-6.
        constexpr double h = 1e-5;
        const double value = values[i];
        values[i] = value + h;
        const double above = loss(problem, bias);
        values[i] = value - h;
        const double below = loss(problem, bias);
        values[i] = value;
        EXPECT_NEAR(derivatives.value[i], (above - below) / (2 * h), 1e-6) << i;
      }
    };
    expect_derivatives(problem.x, gradients.dx);
    expect_derivatives(problem.weight, gradients.dweight);
    expect_derivatives(bias, gradients.dbias);
  }
}

// fp32 sums, a row after the other, as plainly as can be.
std::vector<float> sums_of_dy(const Problem<float>& problem, int64_t rows) {
  std::vector<float> sums(problem.cols);
  for (int64_t row = 0; row < rows; ++row) {
    for (int c = 0; c < problem.cols; ++c) sums[c] += problem.dy[row * problem.cols + c];
  }
  return sums;
}

TEST(BackwardLadder, BoundsHoldForSumsInOrderAndFindWhatIsMissing) {
  const Problem<float> problem = make_problem<float>(16384, 64);
  const Bounded dbias = solve(problem).dbias;
  EXPECT_LT(error_over_bound(dbias, sums_of_dy(problem, problem.rows)), 1);
  EXPECT_GT(error_over_bound(dbias, sums_of_dy(problem, problem.rows - 1)), 1);
}

TEST(BackwardLadder, ANanIsAnError) {
  const Bounded expected{{1, 2, 3}, {0.1, 0.1, 0.1}};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(error_over_bound(expected, {1, 2, 3}), 0);
  EXPECT_NEAR(error_over_bound(expected, {1, 2.05f, 3}), 0.5, 1e-5);
  EXPECT_TRUE(std::isinf(error_over_bound(expected, {nan, 2, 3})));
  EXPECT_TRUE(std::isinf(error_over_bound(expected, {1, 2, nan})));
}

}  // namespace
}  // namespace backward_ladder
