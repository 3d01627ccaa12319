// The forward kernels of the Hopper family, one source file for each dtype.
#pragma once

#include <cuda_runtime.h>

#include "device.h"
#include "params.h"
#include "schedule.h"

namespace jax_varlen {

// head_dim and head_dim_v are multiples of 8 up to 128, k and v are packed and hold at least one row.
template <DType dtype>
cudaError_t FwdSm90(const FwdParams& params, const WorkList& list, const Device& device, cudaStream_t stream);

}  // namespace jax_varlen
