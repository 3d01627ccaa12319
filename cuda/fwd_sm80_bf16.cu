#include "fwd_sm80.cuh"
#include "fwd_sm80.h"

namespace jax_varlen {

template <>
cudaError_t FwdSm80<DType::kBF16>(const FwdParams& params, const WorkList& list, int smem_bytes, cudaStream_t stream) {
  return LaunchFwdSm80<__nv_bfloat16>(params, list, smem_bytes, stream);
}

}  // namespace jax_varlen
