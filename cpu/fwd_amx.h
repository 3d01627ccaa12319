// The engine of the tile registers. A register holds 16 rows of 64 bytes; one instruction adds to a 16 x 16 tile of
// floats the product of 16 rows of 32 bfloat16 and 16 pairs of rows in 16 lanes. What is packed for the dot instruction
// serves here too, but for v, whose rows must be dims: it is transposed as it is packed.
#pragma once

#include "fwd_bf16.h"

namespace jax_varlen {
namespace {

constexpr int64_t kTileRows = 16, kTileWords = 16;

// tile 0..3: sums, 4..5: rows of k or v, 6..7: lanes of q or p.
struct HardwareTiles {
  static void Configure() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof config == 64, "as the processor reads it");
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  static void Release() { asm volatile("tilerelease"); }

  template <int T>
  static void Zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  static void Load(const void* p, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(T) : "memory");
  }
  template <int T>
  static void Store(void* p, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_bytes), "i"(T) : "memory");
  }
  template <int Sum, int A, int B>
  static void MultiplyAdd() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
  }
};

// sum[16 * RA][16 * RB] = (from_zero ? 0 : sum) + a * b over `words` words. b and sum have `stride` words to a row.
template <typename Tiles, int RA, int RB>
inline void TileProduct(Rows<uint32_t> a, const float* b, int64_t words, bool from_zero, float* sum, int64_t stride) {
  float* const lower = sum + kTileRows * stride;
  const int64_t bytes = stride * 4, a_bytes = a.stride * 4;
  if (from_zero) {
    Tiles::template Zero<0>(), Tiles::template Zero<1>(), Tiles::template Zero<2>(), Tiles::template Zero<3>();
  } else {
    Tiles::template Load<0>(sum, bytes);
    if (RB > 1) Tiles::template Load<1>(sum + kTileWords, bytes);
    if (RA > 1) Tiles::template Load<2>(lower, bytes);
    if (RA > 1 && RB > 1) Tiles::template Load<3>(lower + kTileWords, bytes);
  }
  for (int64_t w = 0; w < words; w += kTileWords) {
    const uint32_t* aw = a.data + w;
    const float* bw = b + w * stride;
    Tiles::template Load<4>(aw, a_bytes);
    Tiles::template Load<6>(bw, bytes);
    Tiles::template MultiplyAdd<0, 4, 6>();
    if (RB > 1) Tiles::template Load<7>(bw + kTileWords, bytes);
    if (RB > 1) Tiles::template MultiplyAdd<1, 4, 7>();
    if (RA > 1) Tiles::template Load<5>(aw + kTileRows * a.stride, a_bytes);
    if (RA > 1) Tiles::template MultiplyAdd<2, 5, 6>();
    if (RA > 1 && RB > 1) Tiles::template MultiplyAdd<3, 5, 7>();
  }
  Tiles::template Store<0>(sum, bytes);
  if (RB > 1) Tiles::template Store<1>(sum + kTileWords, bytes);
  if (RA > 1) Tiles::template Store<2>(lower, bytes);
  if (RA > 1 && RB > 1) Tiles::template Store<3>(lower + kTileWords, bytes);
}

constexpr int64_t kLinesPerProduct = 8;

// The product for rows [0, rows) of a and all lanes.
template <typename Tiles>
void TileProducts(Rows<uint32_t> a, const float* b, int64_t words, bool from_zero, int64_t rows, int64_t stride, float* sum,
                  Fetcher* fetcher) {
  for (int64_t r = 0; r < rows; r += 2 * kTileRows) {
    const bool two_a = r + kTileRows < rows;
    for (int64_t lane = 0; lane < stride; lane += 2 * kTileWords) {
      const bool two_b = lane + kTileWords < stride;
      const auto product = two_a ? (two_b ? TileProduct<Tiles, 2, 2> : TileProduct<Tiles, 2, 1>)
                                 : (two_b ? TileProduct<Tiles, 1, 2> : TileProduct<Tiles, 1, 1>);
      product({a.data + r * a.stride, a.stride}, b + lane, words, from_zero, sum + r * stride + lane, stride);
      fetcher->Some(kLinesPerProduct);
    }
  }
}

template <typename Tiles, typename Kv>
struct AmxEngine {
  typedef Bf16 Data;
  typedef Kv KvData;
  typedef Bf16Op Op;
  typedef uint32_t Word;
  static constexpr int64_t kAlign = 2 * kTileWords;

  static F LoadWords(const uint16_t* row, int64_t word, int64_t dims) { return Bf16Engine<Kv>::LoadWords(row, word, dims); }

  static int64_t Words(int64_t head_dim) { return RoundUp((head_dim + 1) / 2, kTileWords); }
  static int64_t OutputRows(int64_t dims) { return RoundUp(dims, kTileRows); }
  static int64_t KWords(int64_t head_dim) { return kTileKeys * RowStride(Words(head_dim)); }
  static int64_t VWords(int64_t dims) { return RoundUp(dims, kTileRows) * (kTileKeys / 2); }
  static void Begin() { Tiles::Configure(); }
  static void End() { Tiles::Release(); }

  static Rows<Word> PackK(const KeyTile<typename Kv::T>& k, int64_t dims, int64_t begin, int64_t end, Word* packed) {
    const int64_t stride = RowStride(Words(dims));
    for (int64_t n = begin / kAlign * kAlign; n < RoundUp(end, kAlign); ++n) {
      const bool real = n >= begin && n < end;
      for (int64_t w = 0; w < Words(dims); w += kTileWords)
        Store(packed + n * stride + w, real ? LoadWords16<Kv>(k[n], w, dims) : U{});
    }
    return {packed, stride};
  }

  static Rows<Word> PackV(const KeyTile<typename Kv::T>& v, int64_t dims, int64_t begin, int64_t end, Word* packed) {
    constexpr int64_t kStride = kTileKeys / 2;
    const auto row = [&](int64_t n) { return n >= begin && n < end ? v[n] : nullptr; };
    for (int64_t n = begin / kAlign * kAlign; n < end; n += kAlign)
      for (int64_t c = 0; c < dims; c += kTileRows) {
        F r[kLanes];
        for (int i = 0; i < kLanes; ++i) r[i] = Bits<F>(LoadPairs<Kv>(row(n + 2 * i), row(n + 2 * i + 1), c, dims));
        Transpose(r);
        for (int i = 0; i < kLanes; ++i) Store(packed + (c + i) * kStride + n / 2, r[i]);
      }
    return {packed, kStride};
  }

  static void Score(const Strip& strip, Rows<Word> k, int64_t words, float scale, int64_t begin, int64_t end, float* s,
                    Fetcher* fetcher) {
    const int64_t stride = strip.stride();
    TileProducts<Tiles>({k.data + begin * k.stride, k.stride}, strip.q, words, true, end - begin, stride, s + begin * stride,
                        fetcher);
    for (int64_t i = begin * stride; i < end * stride; i += kLanes) Store(s + i, Load(s + i) * scale);
  }

  static void Accumulate(Strip* strip, Rows<Word> v, const float* p, int64_t dims, int64_t begin, int64_t end,
                         Fetcher* fetcher) {
    const int64_t stride = strip->stride();
    if (!strip->empty) Rescale(strip, OutputRows(dims));
    TileProducts<Tiles>({v.data + begin, v.stride}, p + begin * stride, end - begin, strip->empty, OutputRows(dims), stride,
                        strip->o, fetcher);
  }

  static void Rescale(Strip* strip, int64_t dims) {
    for (int64_t lane = 0; lane < strip->stride(); lane += kLanes) {
      const F alpha = Load(strip->alpha + lane);
      if (_mm512_cmp_ps_mask((__m512)alpha, (__m512)Set(1.0f), _CMP_NEQ_UQ) == 0) continue;
      for (int64_t c = 0; c < dims; ++c) {
        float* o = strip->o + c * strip->stride() + lane;
        Store(o, Load(o) * alpha);
      }
    }
  }
};

}  // namespace
}  // namespace jax_varlen
