#include "bwd_sm80.cuh"
#include "bwd_sm80.h"

namespace jax_varlen {

template <>
cudaError_t BwdSm80<DType::kF16>(const BwdParams& params, const WorkList& list, const Turns& turns, int smem_bytes,
                                 cudaStream_t stream) {
  return LaunchBwdSm80<__half>(params, list, turns, smem_bytes, stream);
}

}  // namespace jax_varlen
