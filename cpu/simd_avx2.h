// Eight lanes: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

namespace jax_varlen {
namespace {
constexpr int kLanes = 8;
constexpr int kMaxVectors = 2;
}  // namespace
}  // namespace jax_varlen

#include "simd.h"

namespace jax_varlen {
namespace {

inline F FromBf16(const uint16_t* p) {
  return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
inline F FromF16(const uint16_t* p) {
  return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
inline void ToF16(F x, uint16_t* p) {
  Store(p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
// As a float16, whose exponent has one bit more: its value is then 2^-8 of the right one.
inline F FromE4M3(const uint8_t* p) {
  const __m128i high = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p));
  const __m128i half = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16((short)0xbfff));
  const __m128i is_nan = _mm_cmpeq_epi16(_mm_slli_epi16(high, 1), _mm_set1_epi16((short)0xfe00));
  return (F)_mm256_cvtph_ps(_mm_or_si128(half, is_nan)) * 256.0f;  // all ones are a NaN
}
inline F Scale(F p, F shifter, F x) {
  return PortableScale(p, shifter, x);
}

inline void Transpose(F (&r)[kLanes]) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 4) {
    const __m256 a = _mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
    const __m256 b = _mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
    const __m256 c = _mm256_unpacklo_ps((__m256)r[i + 2], (__m256)r[i + 3]);
    const __m256 d = _mm256_unpackhi_ps((__m256)r[i + 2], (__m256)r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = (F)_mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = (F)_mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}

}  // namespace
}  // namespace jax_varlen
