// Four lanes: what every 64-bit processor that GCC and Clang know has.
#pragma once

namespace jax_varlen {
namespace {
constexpr int kLanes = 4;
#if defined(__aarch64__)
constexpr int kMaxVectors = 4;  // 32 registers
#else
constexpr int kMaxVectors = 2;  // 16 registers
#endif
}  // namespace
}  // namespace jax_varlen

#include "simd.h"

namespace jax_varlen {
namespace {

inline F FromBf16(const uint16_t* p) {
  return PortableFromBf16(p);
}
inline F FromF16(const uint16_t* p) {
  return PortableFromF16(p);
}
inline void ToF16(F x, uint16_t* p) {
  PortableToF16(x, p);
}
inline F FromE4M3(const uint8_t* p) {
  return PortableFromE4M3(p);
}
inline F Scale(F p, F shifter, F x) {
  return PortableScale(p, shifter, x);
}

inline void Transpose(F (&r)[kLanes]) {
  const F a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
  const F c = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  r[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  r[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  r[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

}  // namespace
}  // namespace jax_varlen
