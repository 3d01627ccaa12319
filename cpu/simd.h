// Vectors of kLanes floats in the vector extensions of GCC and Clang. Included by simd_<isa>.h, which sets kLanes
// first.
//
// Every translation unit of an instruction set includes its own copy in an anonymous namespace, so that no function
// compiled for a newer processor can be merged by the linker with one that an older processor runs. For the same reason
// nothing here uses the inline functions of the standard library.
#pragma once

#include <cstdint>
#include <cstring>

namespace jax_varlen {
namespace {

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));
typedef uint8_t B __attribute__((vector_size(kLanes)));

constexpr float kInf = __builtin_inff();
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

template <typename T>
T Min(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
T Max(T a, T b) {
  return a < b ? b : a;
}

template <typename T>
void Swap(T* a, T* b) {
  const T c = *a;
  *a = *b, *b = c;
}

constexpr int64_t RoundUp(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

template <typename V, typename T>
inline V LoadAs(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline F Load(const float* p) {
  return LoadAs<F>(p);
}

template <typename V, typename T>
inline void Store(T* p, V v) {
  memcpy(p, &v, sizeof v);
}

template <typename To, typename From>
inline To Bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "one size");
  To to;
  memcpy(&to, &v, sizeof to);
  return to;
}

inline F Set(float x) {
  return x - F{};
}  // x - 0 is x for every x, so this is a broadcast alone
inline I Set(int32_t x) {
  return I{} + x;
}

// NaN in b is passed over, so that a running maximum stays a number.
inline F RunningMax(F a, F b) {
  return b > a ? b : a;
}
inline F Abs(F x) {
  return Bits<F>(Bits<U>(x) & 0x7fffffffu);
}

// Rounds to nearest even; NaN stays NaN.
inline U Bf16Bits(F x) {
  const U u = Bits<U>(x);
  const U rounded = (u + (((u >> 16) & 1u) + 0x7fffu)) >> 16;
  return x == x ? rounded : U{} + 0x7fc0u;
}

inline F PortableFromBf16(const uint16_t* p) {
  return Bits<F>(__builtin_convertvector(LoadAs<H>(p), U) << 16);
}
inline void ToBf16(F x, uint16_t* p) {
  Store(p, __builtin_convertvector(Bf16Bits(x), H));
}

// float16 in integer arithmetic: XLA's threads flush float32 subnormals, which is where a float16 subnormal would pass.
inline F PortableFromF16(const uint16_t* p) {
  const U h = __builtin_convertvector(LoadAs<H>(p), U);
  const U magnitude = h & 0x7fffu;
  const U normal = (magnitude << 13) + (U{} + (112u << 23));
  const U special = (magnitude << 13) | 0x7f800000u;
  const U subnormal = Bits<U>(__builtin_convertvector(Bits<I>(magnitude), F) * 0x1p-24f);
  const U bits = magnitude < 0x400u ? subnormal : magnitude < 0x7c00u ? normal : special;
  return Bits<F>(bits | ((h & 0x8000u) << 16));
}

inline void PortableToF16(F x, uint16_t* p) {
  const U u = Bits<U>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  const U subnormal = Bits<U>(Bits<F>(magnitude) + 0.5f) - 0x3f000000u;
  const U normal = (magnitude - (112u << 23) + (((magnitude >> 13) & 1u) + 0xfffu)) >> 13;
  const U finite = magnitude < 0x38800000u ? subnormal : normal;
  const U infinite = U{} + 0x7c00u, nan = U{} + 0x7e00u;
  const U bits = magnitude < 0x47800000u ? finite : magnitude <= 0x7f800000u ? infinite : nan;
  Store(p, __builtin_convertvector(bits | sign, H));
}

// float8_e4m3fn in integer arithmetic, but for a subnormal, which is the difference of two normal numbers.
inline F PortableFromE4M3(const uint8_t* p) {
  const U x = __builtin_convertvector(LoadAs<B>(p), U);
  const U magnitude = x & 0x7fu;
  const U normal = (magnitude << 20) + (U{} + (120u << 23));
  const U subnormal = Bits<U>(Bits<F>(normal + (1u << 23)) - 0x1p-6f);
  const U bits = magnitude < 8u ? subnormal : magnitude < 0x7fu ? normal : U{} + 0x7fc00000u;
  return Bits<F>(bits | ((x & 0x80u) << 24));
}

// float8_e4m3fn: rounds to nearest even; what lies beyond 448 becomes 448, and NaN stays NaN.
inline void ToE4M3(F x, uint8_t* p) {
  const U u = Bits<U>(x), sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
  const U subnormal = Bits<U>(Bits<F>(magnitude) + 0x1p14f) - 0x46800000u;  // in units of 2^-9
  const U normal = (magnitude - (120u << 23) + (((magnitude >> 20) & 1u) + 0x7ffffu)) >> 20;
  const U finite = magnitude < 0x3c800000u ? subnormal : normal;
  const U largest = U{} + 0x7eu, nan = U{} + 0x7fu;
  const U bits = magnitude < 0x43e00000u ? finite : magnitude <= 0x7f800000u ? largest : nan;
  Store(p, __builtin_convertvector(bits | sign, B));
}

// p * 2^n for n = rint(x), p in [0.7, 1.5] and x <= 127; 0 for x < -125, NaN for NaN. shifter holds n in its low bits.
// In integers, because a floating-point result that underflows takes some processors a hundred times as long.
inline F PortableScale(F p, F shifter, F x) {
  const F scaled = Bits<F>(Bits<U>(p) + (Bits<U>(shifter) << 23));
  const F zero_or_nan = 0.0f > x ? F{} : x;
  return x >= -125.0f ? scaled : zero_or_nan;
}

}  // namespace
}  // namespace jax_varlen
