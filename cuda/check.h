// What JAX_VARLEN_CHECK=1 adds to a call: the values of the offsets and of the block table are looked into, as on a CPU.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "params.h"

namespace jax_varlen {

// `wrong` becomes a sentence about the first wrong value in the arrays of `params`, which are on the device, or stays empty.
// Waits for the stream. Of `params` it reads the offsets, the used lengths, the block table and the sizes that these count in.
cudaError_t CheckOnDevice(FwdParams params, cudaStream_t stream, std::string* wrong);
cudaError_t CheckOnDevice(AppendParams params, cudaStream_t stream, std::string* wrong);

}  // namespace jax_varlen
