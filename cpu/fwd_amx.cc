#include "simd_avx512.h"
// The vectors come first: everything below is written in them.
#include "simd_math.h"
#include "fwd_strip.h"
#include "fwd_fetch.h"
#include "fwd_matmul.h"
#include "fwd_softmax.h"
#include "fwd_fma.h"
#include "fwd_bf16.h"
#include "fwd_amx.h"
#include "fwd_item.h"

namespace jax_varlen {

FwdKernel FwdAmx() { return KernelOf<AmxEngine<HardwareTiles>>(); }

}  // namespace jax_varlen
