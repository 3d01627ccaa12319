// The engine of the bfloat16 dot instruction: a word is two bfloat16, and a product adds both to a float.
#pragma once

#include "fwd_fma.h"

namespace jax_varlen {
namespace {

// kLanes bfloat16, each in 32 bits; those beyond n are zeros. Every float8_e4m3fn is a bfloat16 too.
template <typename D>
inline U LoadHalves(const typename D::T* p, int64_t n) {
  return Bits<U>(LoadSome<D>(p, n)) >> 16;
}

// kLanes words of a row, from its word `word` on; zeros beyond dims.
template <typename D>
inline U LoadWords16(const typename D::T* row, int64_t word, int64_t dims) {
  const int64_t n = dims - 2 * word;
  if constexpr (sizeof(typename D::T) == sizeof(uint16_t))
    if (n >= 2 * kLanes) return LoadAs<U>(row + 2 * word);
  uint16_t words[2 * kLanes] = {};
  for (int64_t i = 0; i < 2 * kLanes && i < n; i += kLanes)
    Store(words + i, __builtin_convertvector(LoadHalves<D>(row + 2 * word + i, n - i), H));
  return LoadAs<U>(words);
}

// Two rows of v, dims c .. c + kLanes, as pairs. A null row is zeros.
template <typename D>
inline U LoadPairs(const typename D::T* low, const typename D::T* high, int64_t c, int64_t dims) {
  const U first = low == nullptr ? U{} : LoadHalves<D>(low + c, dims - c);
  const U second = high == nullptr ? U{} : LoadHalves<D>(high + c, dims - c);
  return first | (second << 16);
}

struct Bf16Op {
  typedef uint32_t Word;
  static constexpr int kPair = 2;

  static F Dot(F acc, F b, uint32_t a) {
    return (F)_mm512_dpbf16_ps((__m512)acc, Bits<__m512bh>(b), Bits<__m512bh>(_mm512_set1_epi32(a)));
  }

  static F PackPair(F a, F b) {
    const U low = __builtin_convertvector(Bits<H>(_mm512_cvtneps_pbh((__m512)a)), U);
    const U high = __builtin_convertvector(Bits<H>(_mm512_cvtneps_pbh((__m512)b)), U);
    return Bits<F>(low | (high << 16));
  }
};

template <typename Kv>
struct Bf16Engine {
  typedef Bf16 Data;
  typedef Kv KvData;
  typedef Bf16Op Op;
  typedef uint32_t Word;
  static constexpr int64_t kAlign = 2;

  static int64_t Words(int64_t head_dim) { return (head_dim + 1) / 2; }
  static int64_t OutputRows(int64_t dims) { return RoundUp(dims, kLanes); }
  static int64_t KWords(int64_t head_dim) { return kTileKeys * RowStride(Words(head_dim)); }
  static int64_t VWords(int64_t dims) { return kTileKeys / 2 * RowStride(dims); }
  static void Begin() {}
  static void End() {}

  static F LoadWords(const uint16_t* row, int64_t word, int64_t dims) { return Bits<F>(LoadWords16<Bf16>(row, word, dims)); }

  static Rows<Word> PackK(const KeyTile<typename Kv::T>& k, int64_t dims, int64_t begin, int64_t end, Word* packed) {
    const int64_t stride = RowStride(Words(dims));
    for (int64_t n = begin; n < end; ++n)
      for (int64_t w = 0; w < Words(dims); w += kLanes) Store(packed + n * stride + w, LoadWords16<Kv>(k[n], w, dims));
    return {packed, stride};
  }

  static Rows<Word> PackV(const KeyTile<typename Kv::T>& v, int64_t dims, int64_t begin, int64_t end, Word* packed) {
    const int64_t stride = RowStride(dims);
    for (int64_t n = begin / 2 * 2; n < end; n += 2) {
      const auto* low = n < begin ? nullptr : v[n];
      const auto* high = n + 1 < end ? v[n + 1] : nullptr;
      for (int64_t c = 0; c < dims; c += kLanes) Store(packed + n / 2 * stride + c, LoadPairs<Kv>(low, high, c, dims));
    }
    return {packed, stride};
  }

  static void Score(const Strip& strip, Rows<Word> k, int64_t words, float scale, int64_t begin, int64_t end, float* s,
                    Fetcher* fetcher) {
    Scores<Bf16Op>(strip.vectors, k, strip.q, words, scale, begin, end, s, fetcher);
  }

  static void Accumulate(Strip* strip, Rows<Word> v, const float* p, int64_t dims, int64_t begin, int64_t end,
                         Fetcher* fetcher) {
    Output<Bf16Op>(strip->vectors, v, p, begin, end, dims, strip->empty ? nullptr : strip->alpha, strip->o, fetcher);
  }
};

}  // namespace
}  // namespace jax_varlen
