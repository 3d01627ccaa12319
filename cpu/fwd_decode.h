// The forward pass of few rows, as in decoding: a token or two of a sequence and the query heads of one kv head.
//
// With a row to a lane half of the lanes or more would idle, and packing would cost more than the products. So here lanes are
// dims in both products and keys between them, and k and v are read where they lie, once: time is what the memory takes to
// deliver them.
//
//   s[row][key] = scale * sum over dims of k * q        o[row][dim] += sum over keys of v * p
#pragma once

#include "fwd_fma.h"
#include "fwd_softmax.h"
#include "fwd_split.h"
#include "fwd_tiles.h"
#include "scratch.h"

namespace jax_varlen {
namespace {

constexpr int64_t kMaxDecodeRows = kLanes / 2;
constexpr int64_t kDecodeKeys = 32;                     // of a tile: those of all heads stay in the cache
constexpr int64_t kScoreStride = kDecodeKeys + kLanes;  // of s: keys are scored kLanes at a time, from any key on
constexpr int kAccumulators = kMaxVectors == 2 ? 8 : 16;

// One kv head.
struct DecodeHead {
  Strip strip;
  LogitRule rule;
  int64_t kv_head;
  float* q;  // [dim / kLanes][row][lane]
  float* o;  // [row][dim]
};

struct DecodeBuffers {
  int64_t q_stride, o_stride;
  DecodeHead* heads;
  float* s;           // [row][key]
  float* transposed;  // [dim][lane]

  DecodeBuffers(const FwdParams& p, int64_t num_heads, char** scratch)
      : q_stride(RoundUp(p.head_dim, kLanes)), o_stride(RoundUp(p.head_dim_v, kLanes)) {
    heads = Take<DecodeHead>(num_heads, scratch);
    s = Take<float>(kMaxDecodeRows * kScoreStride, scratch);
    transposed = Take<float>(o_stride * kLanes, scratch);
    for (int64_t h = 0; h < num_heads; ++h) {
      heads[h].q = Take<float>(kMaxDecodeRows * q_stride, scratch);
      heads[h].o = Take<float>(kMaxDecodeRows * o_stride, scratch);
    }
  }

  static int64_t Bytes(const FwdParams& p) {
    constexpr int64_t kCacheLine = 64, kPieces = 3 + 2 * kMaxDecodeHeads;
    const int64_t q_stride = RoundUp(p.head_dim, kLanes), o_stride = RoundUp(p.head_dim_v, kLanes);
    const int64_t of_head = sizeof(DecodeHead) + 4 * kMaxDecodeRows * (q_stride + o_stride);
    return Min(p.num_kv_heads, kMaxDecodeHeads) * of_head + 4 * (kMaxDecodeRows * kScoreStride + o_stride * kLanes) +
           kPieces * kCacheLine;
  }
};

inline F SumOfEach(F (&r)[kLanes]) {
  Transpose(r);
  F sum = r[0];
  for (int i = 1; i < kLanes; ++i) sum += r[i];
  return sum;
}

// R rows against K keys: acc[row][key] holds a sum in each lane.
template <typename Kv, int R, int K>
inline void DecodeDots(const typename Kv::T* const (&keys)[K], const float* q, int64_t c, int64_t there, F (&acc)[R][K]) {
#pragma GCC unroll 16
  for (int i = 0; i < K; ++i) {
    const F x = LoadSome<Kv>(keys[i] + c, there);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r][i] += x * Load(q + c * kMaxDecodeRows + r * kLanes);
  }
}

template <typename Kv>
struct DecodeScores {
  KeyTile<typename Kv::T> k;
  const float* q;
  int64_t dims;
  float scale;
  int64_t begin, end;
  float* s;
  Fetcher* fetcher;
  int64_t lines_per_key;  // that are asked for
  template <int R>
  void operator()(int64_t row) const {
    constexpr int K = kAccumulators / R < kLanes ? kAccumulators / R : kLanes;  // keys at a time
    const float* rows = q + row * kLanes;
    for (int64_t n = begin; n < end; n += kLanes) {
      F sums[R][kLanes];
      for (int first = 0; first < kLanes; first += K) {
        const typename Kv::T* keys[K];
        for (int i = 0; i < K; ++i) keys[i] = k[Min(n + first + i, end - 1)];  // the mask drops those beyond the end
        F acc[R][K] = {};
        int64_t c = 0;
        for (; c + kLanes <= dims; c += kLanes) DecodeDots<Kv, R, K>(keys, rows, c, kLanes, acc);
        if (c < dims) DecodeDots<Kv, R, K>(keys, rows, c, dims - c, acc);
        for (int r = 0; r < R; ++r)
          for (int i = 0; i < K; ++i) sums[r][first + i] = acc[r][i];
        fetcher->Some(K * lines_per_key);
      }
      for (int r = 0; r < R; ++r) Store(s + (row + r) * kScoreStride + n, SumOfEach(sums[r]) * scale);
    }
  }
};

template <typename Kv, int R>
struct DecodeColumns {
  KeyTile<typename Kv::T> v;
  const float* p;
  int64_t begin, end;
  const float* alpha;
  float* o;
  int64_t o_stride;
  Fetcher* fetcher;
  int64_t lines_per_vector;  // that are asked for

  // V vectors of dims; whole, or one of which n dims are there.
  template <int V>
  void operator()(int64_t vector, int64_t n = kLanes) const {
    F acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int i = 0; i < V; ++i) acc[r][i] = Load(o + r * o_stride + (vector + i) * kLanes) * alpha[r];
    for (int64_t key = begin; key < end; ++key) {
      const typename Kv::T* row = v[key] + vector * kLanes;
#pragma GCC unroll 16
      for (int i = 0; i < V; ++i) {
        const F x = LoadSome<Kv>(row + i * kLanes, n);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[r][i] += x * p[r * kScoreStride + key];
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int i = 0; i < V; ++i) Store(o + r * o_stride + (vector + i) * kLanes, acc[r][i]);
    fetcher->Some(V * lines_per_vector);
  }
};

template <typename Kv>
struct DecodeOutput {
  KeyTile<typename Kv::T> v;
  const float* p;
  int64_t begin, end, dims;
  const float* alpha;
  float* o;
  int64_t o_stride;
  Fetcher* fetcher;
  int64_t lines_per_vector;
  template <int R>
  void operator()(int64_t row) const {
    constexpr int V = kAccumulators / R < 8 ? kAccumulators / R : 8;
    const DecodeColumns<Kv, R> columns{v,       p + row * kScoreStride, begin, end, alpha + row, o + row * o_stride, o_stride,
                                       fetcher, lines_per_vector};
    ForRegisterTiles<V>(0, dims / kLanes, columns);
    if (dims % kLanes != 0) columns.template operator()<1>(dims / kLanes, dims % kLanes);
  }
};

// Scaled scores of one row for keys begin .. end become logits. Their maximum is that of the lanes of the result.
inline F DecodeLogits(const LogitRule& rule, const Strip& strip, int64_t row, int64_t tile, int64_t begin, int64_t end,
                      float* s) {
  const I first = Set(static_cast<int32_t>(Max(strip.first[row] - tile, begin)));
  const I last = Set(static_cast<int32_t>(Min(strip.last[row] - tile, end - 1)));
  const U position = U{} + static_cast<uint32_t>(strip.position[row] - tile);
  I key;
  for (int i = 0; i < kLanes; ++i) key[i] = static_cast<int32_t>(begin) + i;
  F high = Set(-kInf);
  for (int64_t n = begin; n < end; n += kLanes, key += kLanes) {
    F x = Load(s + n);
    if (rule.softcap) x = Tanh(x) * rule.cap;
    if (rule.alibi) x -= Abs(__builtin_convertvector(Bits<I>(position - Bits<U>(key)), F)) * strip.slope[row];
    x = first <= key ? x : Set(-kInf);
    x = last >= key ? x : Set(-kInf);
    Store(s + n, x);
    high = RunningMax(high, x);
  }
  return high;
}

// exp2(s - row_max) of one row, in place. Their sum is that of the lanes of the result.
inline F DecodeProbabilities(float row_max, int64_t begin, int64_t end, float* s) {
  F sum = {};
  for (int64_t n = begin; n < end; n += kLanes) {
    const F x = Exp2(Load(s + n) - row_max);
    Store(s + n, x);
    sum += x;
  }
  return sum;
}

// As Probabilities, with the rows of the strip in the lanes where they are told.
inline void DecodeSoftmax(const LogitRule& rule, int64_t tile, int64_t begin, int64_t end, float* s, Strip* strip) {
  F of_row[kLanes];
  for (int64_t r = 0; r < kLanes; ++r)
    of_row[r] = r < strip->rows ? DecodeLogits(rule, *strip, r, tile, begin, end, s + r * kScoreStride) : Set(-kInf);
  Transpose(of_row);
  const F old_max = Load(strip->row_max);
  F high = old_max;
  for (int i = 0; i < kLanes; ++i) high = RunningMax(high, of_row[i]);
  Store(strip->row_max, high);
  high = high == -kInf ? F{} : high;
  const F alpha = Exp2(old_max - high);
  Store(strip->alpha, alpha);
  for (int64_t r = 0; r < kLanes; ++r)
    of_row[r] = r < strip->rows ? DecodeProbabilities(high[r], begin, end, s + r * kScoreStride) : F{};
  Store(strip->row_sum, Load(strip->row_sum) * alpha + SumOfEach(of_row));
}

template <typename D>
void InitHead(const FwdParams& p, const FwdItem& item, int64_t kv_head, const DecodeBuffers& sizes, DecodeHead* head) {
  head->rule = MakeLogitRule(p, kv_head);
  head->kv_head = kv_head;
  Strip* strip = &head->strip;
  InitStrip(p, item, kv_head, item.row_begin, strip);
  for (int64_t r = 0; r < strip->rows; ++r) {
    const typename D::T* row = static_cast<const typename D::T*>(p.q) + strip->offset(r, p.num_heads) * p.head_dim;
    for (int64_t c = 0; c < p.head_dim; c += kLanes)
      Store(head->q + c * kMaxDecodeRows + r * kLanes, LoadSome<D>(row + c, p.head_dim - c));
  }
  memset(head->o, 0, strip->rows * sizes.o_stride * sizeof *head->o);
}

// A kv head meets keys begin .. end of the tile. Half of what is asked for meanwhile is asked for in each product.
template <typename Kv>
void DecodeTile(const FwdParams& p, int64_t tile, int64_t begin, int64_t end, const KeyRows& keys, const DecodeBuffers& buffers,
                Fetcher* fetcher, DecodeHead* head) {
  typedef typename Kv::T T;
  constexpr int64_t kCacheLine = 64;
  Strip* strip = &head->strip;
  float* s = buffers.s;
  const int64_t lines_per_key = (p.head_dim + p.head_dim_v) * sizeof(T) / (2 * kCacheLine) + 1;
  const int64_t lines_per_vector = lines_per_key * kDecodeKeys * kLanes / p.head_dim_v + 1;
  const DecodeScores<Kv> scores{TileOf<T>(p.k, p, head->kv_head, p.head_dim, &keys),
                                head->q,
                                p.head_dim,
                                head->rule.scale,
                                begin,
                                end,
                                s,
                                fetcher,
                                lines_per_key};
  const DecodeOutput<Kv> output{TileOf<T>(p.v, p, head->kv_head, p.head_dim_v, &keys),
                                s,
                                begin,
                                end,
                                p.head_dim_v,
                                strip->alpha,
                                head->o,
                                buffers.o_stride,
                                fetcher,
                                lines_per_vector};
  ForRegisterTiles<kMaxDecodeRows>(0, strip->rows, scores);
  DecodeSoftmax(head->rule, tile, begin, end, s, strip);
  ForRegisterTiles<kMaxDecodeRows>(0, strip->rows, output);
  strip->empty = false;
}

// o as FinishStrip wants it: [dim][lane].
inline void TransposeOutput(const FwdParams& p, const DecodeBuffers& buffers, DecodeHead* head) {
  const float* rows[kLanes];
  for (int64_t r = 0; r < kLanes; ++r) rows[r] = r < head->strip.rows ? head->o + r * buffers.o_stride : nullptr;
  head->strip.o = buffers.transposed;
  TransposeIn(rows, p.head_dim_v, [](const float* row, int64_t c) { return Load(row + c); }, buffers.transposed, kLanes);
}

template <typename Engine>
void Decode(const FwdParams& p, const FwdItem& item, const FwdItem* next, char* scratch) {
  const DecodeBuffers buffers(p, item.num_heads, &scratch);
  DecodeHead* heads = buffers.heads;
  for (int64_t h = 0; h < item.num_heads; ++h) InitHead<typename Engine::Data>(p, item, item.kv_head + h, buffers, heads + h);
  const auto decode_tile = [&](int64_t tile, int64_t begin, int64_t end, const KeyRows& keys, Fetcher* fetcher) {
    for (int64_t h = 0; h < item.num_heads; ++h)
      DecodeTile<typename Engine::KvData>(p, tile, begin, end, keys, buffers, fetcher, heads + h);
  };
  ForEachTile<Engine, kDecodeKeys>(p, item, next, heads[0].strip.key_begin, heads[0].strip.key_end, decode_tile);
  for (int64_t h = 0; h < item.num_heads; ++h) {
    TransposeOutput(p, buffers, heads + h);
    Finish<typename Engine::Data>(p, item, heads[h].kv_head, &heads[h].strip, 1);
  }
}

}  // namespace
}  // namespace jax_varlen
