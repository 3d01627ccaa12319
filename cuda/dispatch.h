// From a checked call to the kernel that takes it.
#pragma once

#include <cuda_runtime.h>

#include "bwd_sm80.h"
#include "params.h"

namespace jax_varlen {

constexpr int64_t kMaxHeadDim = 256;

// What the tiles of q (forward) or of k (backward) may need of 32-bit words in the workspace.
int64_t WorkspaceWords(int64_t total, int64_t batch);

// The same for a forward call, which is more where it is paged.
int64_t FwdWorkspaceWords(const FwdParams& params);

// How many tiles of dq there may be, for Turns.
int64_t DqTiles(const FwdParams& params);

cudaError_t Fwd(const FwdParams& params, int32_t* workspace, cudaStream_t stream);

cudaError_t Bwd(const BwdParams& params, int32_t* workspace, const Turns& turns, cudaStream_t stream);

}  // namespace jax_varlen
