#include "fwd_sm80.cuh"
#include "fwd_sm80.h"

namespace jax_varlen {

template <>
cudaError_t FwdSm80<DType::kF16>(const FwdParams& params, const WorkList& list, int smem_bytes, cudaStream_t stream) {
  return LaunchFwdSm80<__half>(params, list, smem_bytes, stream);
}

}  // namespace jax_varlen
