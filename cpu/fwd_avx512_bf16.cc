// clang-format off: the vectors come first, everything else is written in them.
#include "simd_avx512.h"
#include "fwd_bf16.h"
#include "fwd_item.h"
// clang-format on

namespace jax_varlen {

FwdKernel FwdAvx512Bf16(DType kv_dtype) {
  return kv_dtype == DType::kE4M3 ? KernelOf<Bf16Engine<E4M3>>() : KernelOf<Bf16Engine<Bf16>>();
}

}  // namespace jax_varlen
