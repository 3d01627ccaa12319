// The forward kernels of the portable family, one source file for each dtype.
#pragma once

#include <cuda_runtime.h>

#include "params.h"
#include "schedule.h"

namespace jax_varlen {

// head_dim and head_dim_v are multiples of 8 up to kMaxHeadDim; smem_bytes is what a CTA of the device may use.
template <DType dtype>
cudaError_t FwdSm80(const FwdParams& params, const WorkList& list, int smem_bytes, cudaStream_t stream);

}  // namespace jax_varlen
