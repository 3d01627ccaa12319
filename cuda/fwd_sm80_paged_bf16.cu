#include "fwd_sm80.cuh"
#include "fwd_sm80.h"

namespace jax_varlen {

template <>
cudaError_t FwdSm80<DType::kBF16, true>(const FwdParams& params, const FwdWorkspace& workspace, const Device& device,
                                        cudaStream_t stream) {
  return LaunchFwdSm80<__nv_bfloat16, true>(params, workspace, device, stream);
}

}  // namespace jax_varlen
