// Writes new tokens into a paged KV cache.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace jax_varlen {

// Tokens that have no place in the pools are left out.
cudaError_t Append(const AppendParams& params, cudaStream_t stream);

}  // namespace jax_varlen
