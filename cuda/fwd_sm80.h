// The forward kernels of the portable family, one source file for each dtype and layout of the keys.
#pragma once

#include <cuda_runtime.h>

#include "device.h"
#include "params.h"
#include "schedule.h"

namespace jax_varlen {

// head_dim and head_dim_v are multiples of 8 up to kMaxHeadDim. A paged call leaves the sequences of workspace.decode, which it
// lists, to the decode kernel.
template <DType dtype, bool kPaged>
cudaError_t FwdSm80(const FwdParams& params, const FwdWorkspace& workspace, const Device& device, cudaStream_t stream);

}  // namespace jax_varlen
