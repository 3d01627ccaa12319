// The forward kernels of the Hopper family, one source file for each dtype.
#pragma once

#include <cuda_runtime.h>

#include "device.h"
#include "params.h"
#include "schedule.h"

namespace jax_varlen {

constexpr int kSm90SmemBytes = 227 * 1024;  // that a CTA may use on a device that these kernels need

// The packed call, or what a paged call has beside the sequences that the decode kernel takes. head_dim and head_dim_v are
// multiples of 8 up to kMaxHeadDim, block_size is one of 8, and k and v hold at least one row and less than 2^31.
template <DType dtype>
cudaError_t FwdSm90(const FwdParams& params, const FwdWorkspace& workspace, const Device& device, cudaStream_t stream);

}  // namespace jax_varlen
