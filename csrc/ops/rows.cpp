#include "ops/rows.h"

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>

#include "ops/checks.h"

namespace fused_norm::ops {
namespace {

std::optional<RowLayout> find_layout(const at::Tensor& tensor, int64_t row_dims) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const int64_t lead = tensor.dim() - row_dims;

  int64_t expected = 1;
  for (int64_t d = tensor.dim() - 1; d >= lead; --d) {
    if (sizes[d] == 1) continue;
    if (strides[d] != expected) return std::nullopt;
    expected *= sizes[d];
  }

  // Leading dimensions, inner to outer, merged while one stride serves both.
  int64_t size[2] = {1, 1};
  int64_t stride[2] = {0, 0};
  int groups = 0;
  for (int64_t d = lead - 1; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (groups > 0 && strides[d] == stride[groups - 1] * size[groups - 1]) {
      size[groups - 1] *= sizes[d];
      continue;
    }
    if (groups == 2) return std::nullopt;
    size[groups] = sizes[d];
    stride[groups] = strides[d];
    ++groups;
  }
  if (groups < 2) return one_stride(stride[0]);
  if (size[0] * size[1] > std::numeric_limits<int32_t>::max()) return std::nullopt;
  return two_strides(static_cast<uint32_t>(size[0]), stride[0], stride[1]);
}

}  // namespace

Rows as_rows(const at::Tensor& tensor, int64_t row_dims) {
  if (auto layout = find_layout(tensor, row_dims)) return {tensor, *layout};
  at::Tensor copy = tensor.contiguous();
  return {copy, *find_layout(copy, row_dims)};
}

NormRows norm_rows(const at::Tensor& tensor, at::IntArrayRef normalized_shape) {
  const int64_t row_dims = static_cast<int64_t>(normalized_shape.size());
  const auto sizes = tensor.sizes();
  NormRows shape{1, c10::multiply_integers(normalized_shape), row_dims,
                 at::DimVector(sizes.begin(), sizes.end() - row_dims)};
  shape.rows = c10::multiply_integers(shape.stats_shape);
  shape.stats_shape.resize(tensor.dim(), 1);
  TORCH_CHECK(shape.cols <= kMaxCols, "normalized_shape ", normalized_shape, " has ", shape.cols,
              " elements; at most 2^30 are supported");
  return shape;
}

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    default:
      TORCH_INTERNAL_ASSERT(false, "unchecked dtype ", type);
  }
}

at::Tensor aligned_param(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  return aligned ? tensor.contiguous() : tensor.clone(at::MemoryFormat::Contiguous);
}

ParamVector to_param(const at::Tensor& tensor) {
  if (!tensor.defined()) return {nullptr, DType::kFloat32};
  return {tensor.const_data_ptr(), to_dtype(tensor.scalar_type())};
}

}  // namespace fused_norm::ops
