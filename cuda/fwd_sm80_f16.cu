#include "fwd_sm80.cuh"
#include "fwd_sm80.h"

namespace jax_varlen {

template <>
cudaError_t FwdSm80<DType::kF16, false>(const FwdParams& params, const FwdWorkspace& workspace, const Device& device,
                                        cudaStream_t stream) {
  return LaunchFwdSm80<__half, false>(params, workspace, device, stream);
}

}  // namespace jax_varlen
