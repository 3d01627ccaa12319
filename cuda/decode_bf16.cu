#include "decode.cuh"
#include "decode.h"

namespace jax_varlen {

template <>
cudaError_t Decode<DType::kBF16, DType::kBF16>(const FwdParams& params, const DecodeList& list, const Partials& partials,
                                               cudaStream_t stream) {
  return LaunchDecode<__nv_bfloat16, __nv_bfloat16>(params, list, partials, stream);
}

}  // namespace jax_varlen
