// The two inner products of a tile, with query rows in the lanes and both results held in registers.
//
//   Scores: s[key][row] = scale * sum over d of k * q        Output: o[dim][row] += sum over keys of v * p
//
// Elements of k and v are broadcast and vectors of q and p are loaded, so k and v are used in the order in which they
// lie in memory, and maxima and sums over keys never cross lanes. An element is a word of 32 bits: one float, or two
// bfloat16 neighbours in the sum, as Op says.
#pragma once

#include "fwd_fetch.h"

namespace jax_varlen {
namespace {

// What the inner products read of a tile: row n is key n (a dim in AmxEngine's v).
template <typename Word>
struct Rows {
  const Word* data;
  int64_t stride;
};

// Of packed rows of n words. A column of v is read at a time, so its rows must not share a few sets of the cache.
constexpr int64_t RowStride(int64_t words) {
  const int64_t whole = RoundUp(words, kLanes);
  return whole % 128 == 0 ? whole + kLanes : whole;
}

constexpr int64_t kLinesPerTile = 24;  // asked for during one register tile

// Rows of the register tile beside its vectors of lanes: as many accumulators as the registers hold, and never so few
// that the latency of a multiply-add shows.
constexpr int RegisterRows(int vectors) {
  if (kMaxVectors == 2) return 6;
  return vectors == 4 ? 6 : vectors == 3 ? 8 : 12;
}

template <typename Op, int R, int V>
inline void ScoreTile(Rows<typename Op::Word> k, const float* q, int64_t words, float scale, float* s) {
  F acc[R][V] = {};
  // A pointer to every third row: with one and two strides beside it, few registers reach all rows.
  const typename Op::Word* rows[(R + 2) / 3];
  for (int r = 0; r < R; r += 3) rows[r / 3] = k.data + r * k.stride;
  for (int64_t i = 0; i < words; ++i) {
    F b[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) b[v] = Load(q + (i * V + v) * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const typename Op::Word a = rows[r / 3][r % 3 * k.stride];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[r][v] = Op::Dot(acc[r][v], b[v], a);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r += 3) ++rows[r / 3];
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) Store(s + (r * V + v) * kLanes, acc[r][v] * scale);
}

// alpha rescales what o held; null where o holds nothing yet.
template <typename Op, int R, int V>
inline void OutputTile(Rows<typename Op::Word> rows, const float* p, int64_t words, const float* alpha, float* o) {
  F acc[R][V] = {};
  if (alpha != nullptr) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[r][v] = Load(o + (r * V + v) * kLanes) * Load(alpha + v * kLanes);
  }
  for (int64_t i = 0; i < words; ++i) {
    F b[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) b[v] = Load(p + (i * V + v) * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[r][v] = Op::Dot(acc[r][v], b[v], rows.data[i * rows.stride + r]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) Store(o + (r * V + v) * kLanes, acc[r][v]);
}

// Calls f(integral row count, first row) for register tiles that cover [begin, end).
template <int R, typename Fn>
inline void ForRegisterTiles(int64_t begin, int64_t end, const Fn& f) {
  for (; end - begin >= R; begin += R) f.template operator()<R>(begin);
  if constexpr (R > 8)
    if (end - begin >= 8) f.template operator()<8>(begin), begin += 8;
  if constexpr (R > 4)
    if (end - begin >= 4) f.template operator()<4>(begin), begin += 4;
  if constexpr (R > 2)
    if (end - begin >= 2) f.template operator()<2>(begin), begin += 2;
  if constexpr (R > 1)
    if (end - begin >= 1) f.template operator()<1>(begin);
}

template <typename Op, int V>
struct ScoreRows {
  Rows<typename Op::Word> k;
  const float* q;
  int64_t words;
  float scale;
  float* s;
  Fetcher* fetcher;
  template <int R>
  void operator()(int64_t key) const {
    ScoreTile<Op, R, V>({k.data + key * k.stride, k.stride}, q, words, scale, s + key * V * kLanes);
    fetcher->Some(kLinesPerTile);
  }
};

template <typename Op, int V>
struct OutputRows {
  Rows<typename Op::Word> v;
  const float* p;
  int64_t words;
  const float* alpha;
  float* o;
  Fetcher* fetcher;
  template <int R>
  void operator()(int64_t dim) const {
    OutputTile<Op, R, V>({v.data + dim, v.stride}, p, words, alpha, o + dim * V * kLanes);
    fetcher->Some(kLinesPerTile);
  }
};

// s for keys [begin, end) of the tile.
template <typename Op, int V = kMaxVectors>
void Scores(int vectors, Rows<typename Op::Word> k, const float* q, int64_t words, float scale, int64_t begin, int64_t end,
            float* s, Fetcher* fetcher) {
  if constexpr (V > 1)
    if (vectors < V) return Scores<Op, V - 1>(vectors, k, q, words, scale, begin, end, s, fetcher);
  ForRegisterTiles<RegisterRows(V)>(begin, end, ScoreRows<Op, V>{k, q, words, scale, s, fetcher});
}

// o for dims [0, dims), from words [begin, end) of the keys of the tile.
template <typename Op, int V = kMaxVectors>
void Output(int vectors, Rows<typename Op::Word> v, const float* p, int64_t begin, int64_t end, int64_t dims,
            const float* alpha, float* o, Fetcher* fetcher) {
  if constexpr (V > 1)
    if (vectors < V) return Output<Op, V - 1>(vectors, v, p, begin, end, dims, alpha, o, fetcher);
  ForRegisterTiles<RegisterRows(V)>(
      0, dims,
      OutputRows<Op, V>{{v.data + begin * v.stride, v.stride}, p + begin * V * kLanes, end - begin, alpha, o, fetcher});
}

}  // namespace
}  // namespace jax_varlen
