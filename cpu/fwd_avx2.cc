// clang-format off: the vectors come first, everything else is written in them.
#include "simd_avx2.h"
#include "fwd_fma.h"
#include "fwd_item.h"
// clang-format on

namespace jax_varlen {

FwdKernel FwdAvx2(DType dtype, DType kv_dtype) {
  return FmaKernelOf(dtype, kv_dtype);
}

}  // namespace jax_varlen
