// Sixteen lanes: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

namespace jax_varlen {
namespace {
constexpr int kLanes = 16;
constexpr int kMaxVectors = 4;
}  // namespace
}  // namespace jax_varlen

#include "simd.h"

namespace jax_varlen {
namespace {

// The forms with a mask of all lanes: GCC 12 warns of the undefined operand inside the plain ones.
constexpr __mmask16 kAll = 0xffff;

inline F FromBf16(const uint16_t* p) {
  return (F)_mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, _mm256_loadu_si256((const __m256i*)p)), 16);
}
inline F FromF16(const uint16_t* p) {
  return (F)_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256((const __m256i*)p));
}
inline void ToF16(F x, uint16_t* p) {
  Store(p, _mm512_maskz_cvtps_ph(kAll, (__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
// As a float16, whose exponent has one bit more: its value is then 2^-8 of the right one.
inline F FromE4M3(const uint8_t* p) {
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbfff));
  const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_slli_epi16(high, 1), _mm256_set1_epi16((short)0xfe00));
  return (F)_mm512_maskz_cvtph_ps(kAll, _mm256_or_si256(half, is_nan)) * 256.0f;  // all ones are a NaN
}

inline F Scale(F p, F shifter, F x) {
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, (__m512)Set(-125.0f), _CMP_GE_OQ);
  const __m512 zero_or_nan = _mm512_maskz_max_ps(kAll, _mm512_setzero_ps(), (__m512)x);
  const U scaled = Bits<U>(p) + (Bits<U>(shifter) << 23);
  return (F)_mm512_mask_mov_ps(zero_or_nan, kept, Bits<__m512>(scaled));
}

inline void Transpose(F (&r)[kLanes]) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 4) {
    const __m512 a = _mm512_maskz_unpacklo_ps(kAll, (__m512)r[i], (__m512)r[i + 1]);
    const __m512 b = _mm512_maskz_unpackhi_ps(kAll, (__m512)r[i], (__m512)r[i + 1]);
    const __m512 c = _mm512_maskz_unpacklo_ps(kAll, (__m512)r[i + 2], (__m512)r[i + 3]);
    const __m512 d = _mm512_maskz_unpackhi_ps(kAll, (__m512)r[i + 2], (__m512)r[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  // t[4 * i + j] holds, in its 128-bit part p, column 4 * p + j of rows 4 * i .. 4 * i + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512 a = _mm512_maskz_shuffle_f32x4(kAll, t[j], t[j + 4], 0x88),
                 b = _mm512_maskz_shuffle_f32x4(kAll, t[j], t[j + 4], 0xdd);
    const __m512 c = _mm512_maskz_shuffle_f32x4(kAll, t[j + 8], t[j + 12], 0x88);
    const __m512 d = _mm512_maskz_shuffle_f32x4(kAll, t[j + 8], t[j + 12], 0xdd);
    r[j] = (F)_mm512_maskz_shuffle_f32x4(kAll, a, c, 0x88);
    r[j + 8] = (F)_mm512_maskz_shuffle_f32x4(kAll, a, c, 0xdd);
    r[j + 4] = (F)_mm512_maskz_shuffle_f32x4(kAll, b, d, 0x88);
    r[j + 12] = (F)_mm512_maskz_shuffle_f32x4(kAll, b, d, 0xdd);
  }
}

}  // namespace
}  // namespace jax_varlen
