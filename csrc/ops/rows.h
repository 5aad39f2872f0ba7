// Seeing a tensor as rows of `cols` consecutive elements, without a copy where two strides can say
// it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <utility>

#include "core/common/types.h"

namespace fused_norm::ops {

// A tensor and where its rows start. `tensor` owns the memory: the argument itself, or a contiguous
// copy where the rows have no two-stride layout or their elements are not consecutive.
struct Rows {
  at::Tensor tensor;
  RowLayout layout;

  // To fields of a launcher's params.
  void set(const void** data, RowLayout* fields) const {
    *data = tensor.const_data_ptr();
    *fields = layout;
  }
};

// The dimensions before `end`, inner to outer, as the fewest (size, stride) that say the same.
c10::SmallVector<std::pair<int64_t, int64_t>, 4> folded_dims(const at::Tensor& tensor, int64_t end);

// The last `row_dims` dimensions of `tensor` make up a row. The tensor must not be empty.
Rows as_rows(const at::Tensor& tensor, int64_t row_dims);

DType to_dtype(at::ScalarType type);

// `tensor` itself, or a copy where it is not contiguous or does not start on 16 bytes, as kernels
// read parameters. Undefined stays undefined.
at::Tensor aligned_param(const at::Tensor& tensor);

// The kernels' view of an aligned_param().
ParamVector to_param(const at::Tensor& tensor);

}  // namespace fused_norm::ops
