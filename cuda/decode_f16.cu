#include "decode.cuh"
#include "decode.h"

namespace jax_varlen {

template <>
cudaError_t Decode<DType::kF16, DType::kF16>(const FwdParams& params, const DecodeList& list, const Partials& partials,
                                             cudaStream_t stream) {
  return LaunchDecode<__half, __half>(params, list, partials, stream);
}

}  // namespace jax_varlen
