// What the CPU operators share: blocks of rows in the accumulation type Acc (float, or double for
// fp64), to and from which ATen converts them while they are in cache, and loops over a row that
// are compiled for several instruction sets.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

// Extensions are compiled for the oldest x86-64. As in torch's own CPU operators, each loop exists
// for several instruction sets and is chosen at run time.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FUSED_NORM_SIMD __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FUSED_NORM_SIMD
#endif

// In each source of its own: functions in several versions, one for each kind of chip.
namespace fused_norm::cpu {
namespace {

// Elements that are worth another thread, as in ATen, and of a block of rows: the second-level
// cache holds a few blocks.
constexpr int64_t kGrain = 32768, kBlock = 32768;

template <typename Acc>
constexpr at::ScalarType kType = c10::CppTypeToScalarType<Acc>::value;

template <typename Acc>
constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();

// Calls function(Acc()) with the accumulation type for tensors of this dtype.
template <typename Function>
void in_precision_of(at::ScalarType type, const Function& function) {
  const at::NoGradGuard no_grad;
  if (type == at::kDouble) {
    function(double{});
  } else {
    function(float{});
  }
}

// Calls function(i) for the n columns of a row, in any order.
template <typename Function>
FUSED_NORM_SIMD void each(int64_t n, Function function) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) function(i);
}

// The columns of a row in another type. ATen's conversion of bf16 takes longer than the work on the
// row.
template <typename From, typename To>
void convert(const From* from, To* to, int64_t n) {
  each(n, [=](int64_t i) {
    if constexpr (std::is_arithmetic_v<To>) {
      to[i] = from[i];
    } else {  // a store to To itself calls its constructor, and gcc then gives up vectorising
      to[i].x = To(static_cast<float>(from[i])).x;
    }
  });
}

// The sum of term(i) over the n columns of a row: of sums over blocks of columns in term's type,
// few enough for fp32 to lose little, with what their addition rounds off (Neumaier). A double sum
// of many doubles would lose digits that fp64 rows show, all the more where they are alike and
// round alike. fp64 has shorter blocks, of few additions in each lane of a vector (RMSNorm of 5000
// columns around 1e4, four lanes: y off by 9.6 u with blocks of 512, by 3.5 u with these).
template <typename Acc, typename Term>
FUSED_NORM_SIMD double row_sum(int64_t n, Term term) {
  constexpr int64_t kTerms = std::is_same_v<Acc, double> ? 32 : 512;
  double sum = 0, rest = 0;
  for (int64_t begin = 0; begin < n; begin += kTerms) {
    const int64_t end = std::min(begin + kTerms, n);
    std::invoke_result_t<Term, int64_t> of_block = 0;
#pragma omp simd reduction(+ : of_block)
    for (int64_t i = begin; i < end; ++i) of_block += term(i);
    const double more = of_block, next = sum + more;
    rest += std::abs(sum) >= std::abs(more) ? (sum - next) + more : (more - next) + sum;
    sum = next;
  }
  return std::isfinite(rest) ? sum + rest : sum;
}

// NaN counts as nothing.
template <typename Acc>
FUSED_NORM_SIMD Acc largest_of(const Acc* x, int64_t n) {
  Acc largest = -kInfinity<Acc>;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

// A thread's memory for the converted rows of up to three tensors, which each block uses again.
using Scratch = std::array<at::Tensor, 3>;

// Calls function(first, count) for blocks of the rows [begin, end), in order.
template <typename Function>
void in_blocks(int64_t begin, int64_t end, int64_t cols, const Function& function) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t step = std::max<int64_t>(kBlock / cols, 1);
  for (int64_t first = begin; first < end; first += step) {
    function(first, std::min(step, end - first));
  }
}

// `memory` as rows of a block's size; the first block is the largest.
template <typename Acc>
at::Tensor in_scratch(at::Tensor& memory, at::IntArrayRef sizes) {
  if (!memory.defined()) memory = at::empty(sizes, kType<Acc>);
  return memory.narrow(0, 0, sizes[0]);
}

// Rows of a 2-D tensor, contiguous: in place where they are that already.
template <typename Acc>
at::Tensor rows_of(const at::Tensor& from, int64_t first, int64_t count, at::Tensor& memory) {
  const at::Tensor rows = from.narrow(0, first, count);
  if (rows.scalar_type() == kType<Acc> && rows.is_contiguous()) return rows;
  const at::Tensor values = in_scratch<Acc>(memory, rows.sizes());
  if (rows.scalar_type() != at::kBFloat16 || rows.stride(1) != 1) return values.copy_(rows);
  const auto* row = rows.const_data_ptr<at::BFloat16>();
  Acc* to = values.mutable_data_ptr<Acc>();
  for (int64_t i = 0, cols = rows.size(1); i < count; ++i, row += rows.stride(0), to += cols) {
    convert(row, to, cols);
  }
  return values;
}

// Rows of a contiguous 2-D tensor that are to be written: in place, or in memory that store()
// rounds into it.
template <typename Acc>
struct NewRows {
  at::Tensor to, values;

  NewRows(const at::Tensor& tensor, int64_t first, int64_t count, at::Tensor& memory) {
    if (!tensor.defined()) return;
    to = tensor.narrow(0, first, count);
    values = to.scalar_type() == kType<Acc> ? to : in_scratch<Acc>(memory, to.sizes());
  }
  Acc* data() const { return values.defined() ? values.template mutable_data_ptr<Acc>() : nullptr; }
  void store() const {
    if (values.is_same(to)) return;
    if (to.scalar_type() == at::kBFloat16) {
      convert(data(), to.mutable_data_ptr<at::BFloat16>(), to.numel());
    } else {
      to.copy_(values);
    }
  }
};

// Calls row_function(its number, a row of each input, where to put the result) over dimension 1 of
// inputs of shape (outer, cols, inner), on ATen's threads. Columns are copied to rows, so that a
// row has the same bits wherever its elements lie.
template <typename Acc, size_t inputs, typename RowFunction>
void over_rows(const std::array<at::Tensor, inputs>& from, const at::Tensor& result,
               const RowFunction& row_function) {
  const int64_t outer = from[0].size(0), cols = from[0].size(1), inner = from[0].size(2);
  const int64_t rows = outer * inner;
  std::array<at::Tensor, inputs> rows_from;
  for (size_t i = 0; i < inputs; ++i) rows_from[i] = from[i].transpose(1, 2).reshape({rows, cols});
  const at::Tensor rows_made =
      inner == 1 ? result.view({rows, cols}) : at::empty({rows, cols}, result.options());
  const int64_t grain = std::max<int64_t>(kGrain / cols, 1);
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    in_blocks(begin, end, cols, [&](int64_t first, int64_t count) {
      const NewRows<Acc> made(rows_made, first, count, scratch[inputs]);
      std::array<at::Tensor, inputs> blocks;
      std::array<const Acc*, inputs> data;
      for (size_t i = 0; i < inputs; ++i) {
        blocks[i] = rows_of<Acc>(rows_from[i], first, count, scratch[i]);
        data[i] = blocks[i].template const_data_ptr<Acc>();
      }
      Acc* to = made.data();
      for (int64_t row = first; row < first + count; ++row, to += cols) {
        row_function(row, data, to);
        for (const Acc*& from : data) from += cols;
      }
      made.store();
    });
  });
  if (inner == 1) return;
  result.view({outer, cols, inner}).copy_(rows_made.view({outer, inner, cols}).transpose(1, 2));
}

}  // namespace
}  // namespace fused_norm::cpu
