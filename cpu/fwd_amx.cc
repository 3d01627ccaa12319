// clang-format off: the vectors come first, everything else is written in them.
#include "simd_avx512.h"
#include "fwd_amx.h"
#include "fwd_item.h"
// clang-format on

namespace jax_varlen {

FwdKernel FwdAmx() {
  return KernelOf<AmxEngine<HardwareTiles>>();
}

}  // namespace jax_varlen
