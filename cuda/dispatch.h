// From a checked call to the kernel that takes it.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace jax_varlen {

constexpr int64_t kMaxHeadDim = 256;
constexpr int kMinTileM = 64;  // the least rows of a tile, which bounds the number of tiles

// `workspace` has room for WorkspaceWords(params) 32-bit words.
cudaError_t Fwd(const FwdParams& params, int32_t* workspace, cudaStream_t stream);

int64_t WorkspaceWords(const FwdParams& params);

}  // namespace jax_varlen
