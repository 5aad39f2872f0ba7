// Tensor maps: what the copy engine is told of a tensor in global memory.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "core/attention/attention.h"

namespace fused_norm::hopper {

// The driver's function, asked for once; null where the driver has none.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// Of a 16-bit tensor (batch, heads, rows, columns) with strides of multiples of 8 elements, for
// tiles of `tile_rows` rows and panels of `panel_columns` columns (SharedTile).
inline cudaError_t make_tensor_map(const AttentionTensor& tensor, DType dtype, int64_t batch,
                                   int64_t heads, int64_t rows, int64_t columns, int tile_rows,
                                   int panel_columns, CUtensorMap* map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  // A dimension of one element may have any stride; the driver wants a multiple of 16 bytes.
  const auto bytes = [](int64_t stride, int64_t size) {
    return static_cast<cuuint64_t>(size > 1 ? 2 * stride : 16);
  };
  const cuuint64_t strides[] = {bytes(tensor.row_stride, rows), bytes(tensor.head_stride, heads),
                                bytes(tensor.batch_stride, batch)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(panel_columns),
                            static_cast<cuuint32_t>(tile_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult result = encode(
      map,
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      4, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      panel_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace fused_norm::hopper
