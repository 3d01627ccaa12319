#include "dispatch.h"

#include "fwd_sm80.h"
#include "schedule.h"

namespace jax_varlen {
namespace {

cudaError_t SmemBytesPerCta(int* bytes) {
  int device;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

}  // namespace

int64_t WorkspaceWords(const FwdParams& params) {
  return kWordsPerTile * (1 + MaxTiles(params.total_q, params.batch, kMinTileM));
}

cudaError_t Fwd(const FwdParams& params, int32_t* workspace, cudaStream_t stream) {
  int smem_bytes;
  if (cudaError_t error = SmemBytesPerCta(&smem_bytes)) return error;
  const WorkList list = WorkListIn(workspace, WorkspaceWords(params));
  return params.dtype == DType::kBF16 ? FwdSm80<DType::kBF16>(params, list, smem_bytes, stream)
                                      : FwdSm80<DType::kF16>(params, list, smem_bytes, stream);
}

}  // namespace jax_varlen
