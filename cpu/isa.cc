#include "isa.h"

#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jax_varlen {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16", "amx"};
constexpr int kNumIsas = 5;

#if defined(__x86_64__) && defined(__linux__)
// Linux hands out the tile registers to a process that asks.
bool RequestTileRegisters() {
  constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

bool HasAmx() {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d & kAmxBf16) && (d & kAmxTile) && RequestTileRegisters();
}
#else
bool HasAmx() {
  return false;
}
#endif

#if defined(__x86_64__)
// AMD's processors double their rate with the bfloat16 dot instruction. On Intel's Sapphire Rapids generation it was
// measured slower than float32 products of the converted values, which are more exact too.
bool FastBf16Dot() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
}
#else
bool FastBf16Dot() {
  return false;
}
#endif

Isa HighestIsa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kGeneric;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl"))
    return Isa::kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
  return HasAmx() ? Isa::kAmx : Isa::kAvx512Bf16;
#else
  return Isa::kGeneric;
#endif
}

IsaChoice Choose() {
  const Isa highest = HighestIsa();
  const char* wanted = std::getenv("JAX_VARLEN_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return {highest == Isa::kAvx512Bf16 && !FastBf16Dot() ? Isa::kAvx512 : highest, ""};
  std::string offered;
  for (int i = 0; i <= static_cast<int>(highest); ++i) {
    if (std::string(wanted) == kNames[i]) return {static_cast<Isa>(i), ""};
    offered += std::string(i ? ", " : "") + kNames[i];
  }
  return {highest, std::string("JAX_VARLEN_CPU_ISA must be one of ") + offered + " on this machine, got \"" + wanted + "\"."};
}

}  // namespace

const IsaChoice& ChosenIsa() {
  static const IsaChoice choice = Choose();
  return choice;
}

const char* IsaName(Isa isa) {
  static_assert(static_cast<int>(Isa::kAmx) == kNumIsas - 1, "a name for each");
  return kNames[static_cast<int>(isa)];
}

FwdKernel FwdKernelFor(Isa isa, const FwdParams& p) {
#if defined(__x86_64__)
  if (p.dtype == DType::kBF16 && isa == Isa::kAmx) return FwdAmx(p.kv_dtype);
  if (p.dtype == DType::kBF16 && isa == Isa::kAvx512Bf16) return FwdAvx512Bf16(p.kv_dtype);
  if (isa >= Isa::kAvx512) return FwdAvx512(p.dtype, p.kv_dtype);
  if (isa == Isa::kAvx2) return FwdAvx2(p.dtype, p.kv_dtype);
#endif
  (void)isa;
  return FwdGeneric(p.dtype, p.kv_dtype);
}

// In float32 products, whatever the dtype: dS rounded to bfloat16 would lose what dP - delta leaves.
BwdKernel BwdKernelFor(Isa isa, const FwdParams& p) {
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512) return BwdAvx512(p.dtype);
  if (isa == Isa::kAvx2) return BwdAvx2(p.dtype);
#endif
  (void)isa;
  return BwdGeneric(p.dtype);
}

}  // namespace jax_varlen
