#include "fwd_sm90.cuh"
#include "fwd_sm90.h"

namespace jax_varlen {

template <>
cudaError_t FwdSm90<DType::kBF16>(const FwdParams& params, const WorkList& list, const Device& device, cudaStream_t stream) {
  return LaunchFwdSm90<__nv_bfloat16>(params, list, device, stream);
}

}  // namespace jax_varlen
