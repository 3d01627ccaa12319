#include "simd_generic.h"
// The vectors come first: everything below is written in them.
#include "simd_math.h"
#include "fwd_strip.h"
#include "fwd_fetch.h"
#include "fwd_matmul.h"
#include "fwd_softmax.h"
#include "fwd_fma.h"
#include "fwd_item.h"

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
