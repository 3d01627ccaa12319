#include "fwd_sm90.cuh"
#include "fwd_sm90.h"

namespace jax_varlen {

template <>
cudaError_t FwdSm90<DType::kF16>(const FwdParams& params, const FwdWorkspace& workspace, const Device& device,
                                 cudaStream_t stream) {
  return params.block_size == 0 ? LaunchFwdSm90<__half, false>(params, workspace, device, stream)
                                : LaunchFwdSm90<__half, true>(params, workspace, device, stream);
}

}  // namespace jax_varlen
