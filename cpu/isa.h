// Which kernel this machine takes.
#pragma once

#include <string>

#include "bwd_kernel.h"
#include "fwd_kernel.h"

namespace jax_varlen {

enum class Isa { kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmx };

struct IsaChoice {
  Isa isa;
  std::string error;  // of JAX_VARLEN_CPU_ISA; empty: none
};

// The fastest that the processor and the operating system offer, or the one that JAX_VARLEN_CPU_ISA names.
const IsaChoice& ChosenIsa();
const char* IsaName(Isa isa);
FwdKernel FwdKernelFor(Isa isa, const FwdParams& params);
BwdKernel BwdKernelFor(Isa isa, const FwdParams& params);

}  // namespace jax_varlen
