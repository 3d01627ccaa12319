#include "fwd_sm90.cuh"
#include "fwd_sm90.h"

namespace jax_varlen {

template <>
cudaError_t FwdSm90<DType::kF16>(const FwdParams& params, const WorkList& list, const Device& device, cudaStream_t stream) {
  return LaunchFwdSm90<__half>(params, list, device, stream);
}

}  // namespace jax_varlen
