// The backward kernels of the portable family, one source file for each dtype.
#pragma once

#include <cuda_runtime.h>

#include "params.h"
#include "schedule.h"

namespace jax_varlen {

// What keeps the order of additions to dq where gradients must repeat bit for bit: null, or (num_heads, tiles, 2) counters,
// zero at first, of how many tiles of keys have been added to each tile of dq.
struct Turns {
  int32_t* counts;
  int64_t tiles;
};

// head_dim and head_dim_v are multiples of 8 up to kMaxHeadDim, dq is float32 and holds zeros, and is to be scaled afterwards;
// smem_bytes is what a CTA of the device may use.
template <DType dtype>
cudaError_t BwdSm80(const BwdParams& params, const WorkList& list, const Turns& turns, int smem_bytes, cudaStream_t stream);

}  // namespace jax_varlen
