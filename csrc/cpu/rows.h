// What the CPU operators share: conversion to and from the accumulation type Acc (float, or double
// for fp64), and loops compiled for several instruction sets.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>

// Extensions are compiled for the oldest x86-64. As in torch's own CPU operators, each loop exists
// for several instruction sets and is chosen at run time.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FUSED_NORM_SIMD __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FUSED_NORM_SIMD
#endif

namespace fused_norm::cpu {

// Elements that are worth another thread, as in ATen.
constexpr int64_t kGrain = 32768;

template <typename Acc>
constexpr at::ScalarType kType = c10::CppTypeToScalarType<Acc>::value;

// n consecutive elements of a floating dtype as Acc, and back with one rounding. From or to Acc's
// own dtype this copies; memory must then not overlap.
template <typename Acc>
void widen(at::ScalarType dtype, const void* from, Acc* to, int64_t n);
template <typename Acc>
void narrow(at::ScalarType dtype, const Acc* from, void* to, int64_t n);

// The rows of a 2-D tensor as Acc: in place where that is their type, else through a buffer.
template <typename Acc>
class Rows {
 public:
  explicit Rows(const at::Tensor& t)
      : tensor_(!t.defined() || t.stride(1) == 1 ? t : t.contiguous()) {}

  const Acc* read(int64_t row, Acc* buffer) const {
    if (in_place()) return static_cast<const Acc*>(at_row(row));
    widen(tensor_.scalar_type(), at_row(row), buffer, tensor_.size(1));
    return buffer;
  }

  // Where to put the new values of a row, before write() rounds them into it if it has to.
  Acc* target(int64_t row, Acc* buffer) const {
    return in_place() ? static_cast<Acc*>(at_row(row)) : buffer;
  }

  void write(int64_t row, const Acc* values) const {
    if (!in_place()) narrow(tensor_.scalar_type(), values, at_row(row), tensor_.size(1));
  }

 private:
  bool in_place() const { return tensor_.scalar_type() == kType<Acc>; }

  // Memory that is only read is a const argument's: its constness ends here, not at the caller.
  void* at_row(int64_t row) const {
    const auto* base = static_cast<const char*>(tensor_.const_data_ptr());
    return const_cast<char*>(base) + row * tensor_.stride(0) * tensor_.itemsize();
  }

  at::Tensor tensor_;
};

// A sum over a row, of sums over blocks of columns, with what their addition rounds off (Neumaier):
// a double sum of many doubles would lose digits that fp64 rows show, all the more where they are
// alike and round alike.
class RowSum {
 public:
  void add(double of_block) {
    const double sum = sum_ + of_block;
    const bool larger = std::abs(sum_) >= std::abs(of_block);
    rest_ += larger ? (sum_ - sum) + of_block : (of_block - sum) + sum_;
    sum_ = sum;
  }
  double value() const { return std::isfinite(rest_) ? sum_ + rest_ : sum_; }

 private:
  double sum_ = 0, rest_ = 0;
};

}  // namespace fused_norm::cpu
