// Tensor maps: how the copy engine of Hopper finds boxes of an array.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace jax_varlen {

constexpr int kBoxColumns = 64;  // 128 bytes, what the copy engine swizzles

// A map of rows of heads (rows, heads, columns) for boxes of kBoxColumns columns of one head.
inline cudaError_t EncodeMap(CUtensorMap* map, const void* data, DType dtype, int64_t rows, int64_t heads, int64_t columns,
                             int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(2 * columns), static_cast<cuuint64_t>(2 * columns * heads)};
  const cuuint32_t box[3] = {kBoxColumns, 1, static_cast<cuuint32_t>(box_rows)}, steps[3] = {1, 1, 1};
  const auto type = dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(map, type, 3, const_cast<void*>(data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_varlen
