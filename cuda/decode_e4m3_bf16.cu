#include "decode.cuh"
#include "decode.h"

namespace jax_varlen {

template <>
cudaError_t Decode<DType::kBF16, DType::kE4M3>(const FwdParams& params, const DecodeList& list, const Partials& partials,
                                               cudaStream_t stream) {
  return LaunchDecode<__nv_bfloat16, E4M3>(params, list, partials, stream);
}

}  // namespace jax_varlen
