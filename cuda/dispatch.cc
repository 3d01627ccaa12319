#include "dispatch.h"

#include <algorithm>
#include <cstdlib>

#include "fwd_sm80.h"
#include "schedule.h"

namespace jax_varlen {
namespace {

constexpr int kMinTile = 32;  // the least rows of a tile of any kernel, which bounds the number of tiles

// What the device gives a CTA of shared memory, or less where JAX_VARLEN_CUDA_SMEM says so: a large device then runs the
// kernels of a small one, for tests and comparison.
cudaError_t SmemBytesPerCta(int* bytes) {
  int device;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return error;
  if (const char* limit = std::getenv("JAX_VARLEN_CUDA_SMEM")) *bytes = std::min(*bytes, std::atoi(limit));
  return cudaSuccess;
}

}  // namespace

int64_t WorkspaceWords(int64_t total, int64_t batch) {
  return kWordsPerTile * (1 + MaxTiles(total, batch, kMinTile));
}

int64_t DqTiles(const FwdParams& params) {
  return params.total_q / kMinTile + params.batch + 1;
}

cudaError_t Fwd(const FwdParams& params, int32_t* workspace, cudaStream_t stream) {
  int smem_bytes;
  if (cudaError_t error = SmemBytesPerCta(&smem_bytes)) return error;
  const WorkList list = WorkListIn(workspace);
  return params.dtype == DType::kBF16 ? FwdSm80<DType::kBF16>(params, list, smem_bytes, stream)
                                      : FwdSm80<DType::kF16>(params, list, smem_bytes, stream);
}

cudaError_t Bwd(const BwdParams& params, int32_t* workspace, const Turns& turns, cudaStream_t stream) {
  int smem_bytes;
  if (cudaError_t error = SmemBytesPerCta(&smem_bytes)) return error;
  const WorkList list = WorkListIn(workspace);
  return params.fwd.dtype == DType::kBF16 ? BwdSm80<DType::kBF16>(params, list, turns, smem_bytes, stream)
                                          : BwdSm80<DType::kF16>(params, list, turns, smem_bytes, stream);
}

}  // namespace jax_varlen
