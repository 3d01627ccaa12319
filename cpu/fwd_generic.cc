// clang-format off: the vectors come first, everything else is written in them.
#include "simd_generic.h"
#include "fwd_fma.h"
#include "fwd_item.h"
// clang-format on

namespace jax_varlen {

FwdKernel FwdGeneric(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return KernelOf<FmaEngine<Bf16>>();
    case DType::kF16:
      return KernelOf<FmaEngine<F16>>();
    default:
      return KernelOf<FmaEngine<F32>>();
  }
}

}  // namespace jax_varlen
