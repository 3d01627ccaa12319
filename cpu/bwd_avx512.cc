// clang-format off: the vectors come first, everything else is written in them.
#include "simd_avx512.h"
#include "fwd_fma.h"
#include "bwd_item.h"
// clang-format on

namespace jax_varlen {

BwdKernel BwdAvx512(DType dtype) {
  return BwdKernelOf(dtype);
}

}  // namespace jax_varlen
