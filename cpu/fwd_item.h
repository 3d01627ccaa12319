// The forward pass of one item: its rows in strips, its keys in tiles, every tile packed once for all strips; or, of few rows,
// as fwd_decode.h does it.
//
// Strips and tiles are cut at fixed multiples of their sizes, and a strip takes of a tile only the keys that one of its
// rows sees. So the bits of a row depend on its own sequence alone, not on how rows were shared out among items.
#pragma once

#include "fwd_decode.h"

namespace jax_varlen {
namespace {

template <typename Engine>
struct Buffers {
  typedef typename Engine::Word Word;
  static constexpr int64_t kCacheLine = 64;

  int64_t q_floats, o_floats;  // of a strip
  int64_t k_words, v_words, s_floats;

  explicit Buffers(const FwdParams& p) {
    q_floats = RoundUp(Engine::Words(p.head_dim), kLanes) * kStripRows;
    o_floats = Engine::OutputRows(p.head_dim_v) * kStripRows;
    k_words = Engine::KWords(p.head_dim);
    v_words = Engine::VWords(p.head_dim_v);
    s_floats = kTileKeys * kStripRows;
  }

  int64_t Bytes(int64_t strips) const {
    return strips * (RoundUp(sizeof(Strip), kCacheLine) + 4 * (q_floats + o_floats)) + 4 * (k_words + v_words + s_floats) +
           5 * kCacheLine;
  }
};

// A strip meets keys begin .. end of the tile. Word n / kPair of s belongs to key n, before and after the softmax.
template <typename Engine>
void AttendTile(const FwdParams& p, const LogitRule& rule, int64_t tile, int64_t begin, int64_t end,
                Rows<typename Engine::Word> k, Rows<typename Engine::Word> v, float* s, Fetcher* fetcher, Strip* strip) {
  constexpr int64_t kPair = Engine::Op::kPair, kAlign = Engine::kAlign;
  const int64_t stride = strip->stride();
  const int64_t aligned_begin = begin / kAlign * kAlign, aligned_end = RoundUp(end, kAlign);
  Engine::Score(*strip, k, Engine::Words(p.head_dim), rule.scale, aligned_begin, aligned_end, s, fetcher);
  // Where an odd key shares its word with one that no row sees, the mask makes that one zero.
  const int64_t pair_begin = begin / kPair * kPair, pair_end = RoundUp(end, kPair);
  Softmax<typename Engine::Op>(rule, tile, pair_begin, pair_end, s, strip);
  if constexpr (kAlign > kPair) {
    const size_t word_bytes = stride * sizeof *s;
    memset(s + aligned_begin / kPair * stride, 0, (pair_begin - aligned_begin) / kPair * word_bytes);
    memset(s + pair_end / kPair * stride, 0, (aligned_end - pair_end) / kPair * word_bytes);
  }
  Engine::Accumulate(strip, v, s, p.head_dim_v, aligned_begin / kPair, aligned_end / kPair, fetcher);
  strip->empty = false;
}

template <typename Engine>
size_t ScratchBytes(const FwdParams& p, int64_t rows) {
  const int64_t attend = Buffers<Engine>(p).Bytes(RoundUp(rows, kStripRows) / kStripRows);
  return Max(attend, DecodeBuffers::Bytes(p));
}

template <typename Engine>
void Attend(const FwdParams& p, const FwdItem& item, const FwdItem* next, char* scratch) {
  typedef typename Engine::Word Word;
  typedef typename Engine::Data::T T;
  typedef typename Engine::KvData::T KvT;
  const Buffers<Engine> sizes(p);
  const LogitRule rule = MakeLogitRule(p, item.kv_head);
  const int64_t num_strips = RoundUp(item.row_end - item.row_begin, kStripRows) / kStripRows;
  Strip* strips = Take<Strip>(num_strips, &scratch);
  Word* k_packed = Take<Word>(sizes.k_words, &scratch);
  Word* v_packed = Take<Word>(sizes.v_words, &scratch);
  float* s = Take<float>(sizes.s_floats, &scratch);

  Engine::Begin();
  int64_t key_begin = item.len_k, key_end = 0;
  for (int64_t i = 0; i < num_strips; ++i) {
    Strip* strip = strips + i;
    strip->q = Take<float>(sizes.q_floats, &scratch);
    strip->o = Take<float>(sizes.o_floats, &scratch);
    InitStrip(p, item, item.kv_head, item.row_begin + i * kStripRows, strip);
    if (strip->key_begin < strip->key_end)
      PackTransposed<Engine>(static_cast<const T*>(p.q), p.head_dim, p.num_heads, *strip, strip->q);
    key_begin = Min(key_begin, strip->key_begin);
    key_end = Max(key_end, strip->key_end);
  }
  const auto attend_tile = [&](int64_t tile, int64_t first, int64_t last, const KeyRows& keys, Fetcher* fetcher) {
    const Rows<Word> k = Engine::PackK(TileOf<KvT>(p.k, p, item.kv_head, p.head_dim, &keys), p.head_dim, first, last, k_packed);
    const Rows<Word> v =
        Engine::PackV(TileOf<KvT>(p.v, p, item.kv_head, p.head_dim_v, &keys), p.head_dim_v, first, last, v_packed);
    for (int64_t i = 0; i < num_strips; ++i) {
      const int64_t begin = Max(strips[i].key_begin - tile, int64_t{0});
      const int64_t end = Min(strips[i].key_end - tile, kTileKeys);
      if (begin < end) AttendTile<Engine>(p, rule, tile, begin, end, k, v, s, fetcher, strips + i);
    }
  };
  ForEachTile<Engine, kTileKeys>(p, item, next, key_begin, key_end, attend_tile);
  Finish<typename Engine::Data>(p, item, item.kv_head, strips, num_strips);
  Engine::End();
}

template <typename Engine>
void RunItem(const FwdParams& p, const FwdItem& item, const FwdItem* next, char* scratch) {
  return (item.decode ? Decode<Engine> : Attend<Engine>)(p, item, next, scratch);
}

template <typename Engine>
constexpr FwdKernel KernelOf() {
  return {RunItem<Engine>, ScratchBytes<Engine>, kLanes, kStripRows, kMaxDecodeRows};
}

template <typename D>
constexpr FwdKernel FmaKernelOf(DType kv_dtype) {
  return kv_dtype == DType::kE4M3 ? KernelOf<FmaEngine<D, E4M3>>() : KernelOf<FmaEngine<D>>();
}

inline FwdKernel FmaKernelOf(DType dtype, DType kv_dtype) {
  switch (dtype) {
    case DType::kBF16:
      return FmaKernelOf<Bf16>(kv_dtype);
    case DType::kF16:
      return FmaKernelOf<F16>(kv_dtype);
    default:
      return FmaKernelOf<F32>(kv_dtype);
  }
}

}  // namespace
}  // namespace jax_varlen
