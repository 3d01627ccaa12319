// The engine of vector multiply-adds: words are floats, whatever the dtype of the arrays.
#pragma once

#include "fwd_matmul.h"
#include "fwd_strip.h"

namespace jax_varlen {
namespace {

struct F32 {
  typedef float T;
  static F LoadVector(const float* p) { return Load(p); }
  static void StoreVector(F x, float* p) { Store(p, x); }
};

struct Bf16 {
  typedef uint16_t T;
  static F LoadVector(const uint16_t* p) { return FromBf16(p); }
  static void StoreVector(F x, uint16_t* p) { ToBf16(x, p); }
};

struct F16 {
  typedef uint16_t T;
  static F LoadVector(const uint16_t* p) { return FromF16(p); }
  static void StoreVector(F x, uint16_t* p) { ToF16(x, p); }
};

struct E4M3 {
  typedef uint8_t T;
  static F LoadVector(const uint8_t* p) { return FromE4M3(p); }
};

// kLanes elements of which only n are there.
template <typename D>
inline F LoadSome(const typename D::T* p, int64_t n) {
  if (n >= kLanes) return D::LoadVector(p);
  typename D::T padded[kLanes] = {};
  memcpy(padded, p, n * sizeof *p);
  return D::LoadVector(padded);
}

struct FmaOp {
  typedef float Word;
  static constexpr int kPair = 1;  // keys, or dims, to a word
  static F Dot(F acc, F b, float a) { return acc + b * a; }
};

// D is the dtype of q and out, Kv that of k and v.
template <typename D, typename Kv = D>
struct FmaEngine {
  typedef D Data;
  typedef Kv KvData;
  typedef FmaOp Op;
  typedef float Word;
  static constexpr int64_t kAlign = 1;  // of the keys that the inner products take at a time

  static int64_t Words(int64_t head_dim) { return head_dim; }
  static int64_t OutputRows(int64_t dims) { return RoundUp(dims, kLanes); }
  static int64_t KWords(int64_t head_dim) { return kTileKeys * RowStride(head_dim); }
  static int64_t VWords(int64_t dims) { return kTileKeys * RowStride(dims); }
  static void Begin() {}
  static void End() {}

  static F LoadWords(const typename D::T* row, int64_t word, int64_t dims) { return LoadSome<D>(row + word, dims - word); }

  // Keys begin .. end as floats. Rows of floats serve as they lie, where they are read along their length.
  static Rows<Word> PackK(const KeyTile<typename Kv::T>& k, int64_t dims, int64_t begin, int64_t end, Word* packed) {
    if constexpr (sizeof(typename Kv::T) == sizeof(Word))
      if (k.keys->consecutive) return {k[begin] - begin * k.stride, k.stride};
    return PackV(k, dims, begin, end, packed);
  }

  static Rows<Word> PackV(const KeyTile<typename Kv::T>& v, int64_t dims, int64_t begin, int64_t end, Word* packed) {
    const int64_t stride = RowStride(dims);
    for (int64_t n = begin; n < end; ++n) {
      const typename Kv::T* row = v[n];
      Word* to = packed + n * stride;
      int64_t c = 0;
      for (; c + kLanes <= dims; c += kLanes) Store(to + c, Kv::LoadVector(row + c));
      if (c < dims) Store(to + c, LoadSome<Kv>(row + c, dims - c));
    }
    return {packed, stride};
  }

  static void Score(const Strip& strip, Rows<Word> k, int64_t words, float scale, int64_t begin, int64_t end, float* s,
                    Fetcher* fetcher) {
    Scores<FmaOp>(strip.vectors, k, strip.q, words, scale, begin, end, s, fetcher);
  }

  static void Accumulate(Strip* strip, Rows<Word> v, const float* p, int64_t dims, int64_t begin, int64_t end,
                         Fetcher* fetcher) {
    Output<FmaOp>(strip->vectors, v, p, begin, end, dims, strip->empty ? nullptr : strip->alpha, strip->o, fetcher);
  }
};

}  // namespace
}  // namespace jax_varlen
