// clang-format off: the vectors come first, everything else is written in them.
#include "simd_avx512.h"
#include "fwd_amx.h"
#include "fwd_item.h"
// clang-format on

namespace jax_varlen {

FwdKernel FwdAmx(DType kv_dtype) {
  return kv_dtype == DType::kE4M3 ? KernelOf<AmxEngine<HardwareTiles, E4M3>>() : KernelOf<AmxEngine<HardwareTiles, Bf16>>();
}

}  // namespace jax_varlen
