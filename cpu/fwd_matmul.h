// The two inner products of a tile, with query rows in the lanes and both results held in registers.
//
//   Scores: s[key][row] = scale * sum over d of k * q        Output: o[dim][row] += sum over keys of v * p
//
// Elements of k and v are broadcast and vectors of q and p are loaded, so k and v are used in the order in which they
// lie in memory, and maxima and sums over keys never cross lanes. An element is a word of 32 bits: one float, or two
// bfloat16 neighbours in the sum, as Op says.
#pragma once

namespace jax_varlen {
namespace {

constexpr int64_t kTileKeys = 96;    // keys of a tile
constexpr int64_t kChunkWords = 64;  // k lies in chunks [key][kChunkWords], so that its row stride is a constant

constexpr int64_t kLinesPerTile = 24;  // asked for during one register tile

// Rows of the register tile beside its vectors of lanes: as many accumulators as the registers hold, and never so few
// that the latency of a multiply-add shows.
constexpr int RegisterRows(int vectors) {
  if (kMaxVectors == 2) return 6;
  return vectors == 4 ? 6 : vectors == 3 ? 8 : 12;
}

template <typename Op, int R, int V>
inline void ScoreTile(const typename Op::Word* k, const float* q, int64_t words, float scale, float* s) {
  F acc[R][V] = {};
  while (words > 0) {
    const int64_t n = Min(words, kChunkWords);
    for (int64_t i = 0; i < n; ++i) {
      F b[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) b[v] = Load(q + (i * V + v) * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) acc[r][v] = Op::Dot(acc[r][v], b[v], k[r * kChunkWords + i]);
    }
    q += n * V * kLanes;
    k += kTileKeys * kChunkWords;
    words -= n;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) Store(s + (r * V + v) * kLanes, acc[r][v] * scale);
}

// alpha rescales what o held; null where o holds nothing yet.
template <typename Op, int R, int V>
inline void OutputTile(const typename Op::Word* v_tile, int64_t v_stride, const float* p, int64_t words,
                       const float* alpha, float* o) {
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
      for (int v = 0; v < V; ++v) acc[r][v] = Op::Dot(acc[r][v], b[v], v_tile[i * v_stride + r]);
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
  if (end - begin >= 8 && R > 8) f.template operator()<8>(begin), begin += 8;
  if (end - begin >= 4) f.template operator()<4>(begin), begin += 4;
  if (end - begin >= 2) f.template operator()<2>(begin), begin += 2;
  if (end - begin >= 1) f.template operator()<1>(begin);
}

template <typename Op, int V>
struct ScoreRows {
  const typename Op::Word* k;
  const float* q;
  int64_t words;
  float scale;
  float* s;
  Fetcher* fetcher;
  template <int R>
  void operator()(int64_t key) const {
    ScoreTile<Op, R, V>(k + key * kChunkWords, q, words, scale, s + key * V * kLanes);
    fetcher->Some(kLinesPerTile);
  }
};

template <typename Op, int V>
struct OutputRows {
  const typename Op::Word* v;
  int64_t v_stride;
  const float* p;
  int64_t words;
  const float* alpha;
  float* o;
  Fetcher* fetcher;
  template <int R>
  void operator()(int64_t dim) const {
    OutputTile<Op, R, V>(v + dim, v_stride, p, words, alpha, o + dim * V * kLanes);
    fetcher->Some(kLinesPerTile);
  }
};

// s for keys [begin, end) of the tile.
template <typename Op, int V = kMaxVectors>
void Scores(int vectors, const typename Op::Word* k, const float* q, int64_t words, float scale,
            int64_t begin, int64_t end, float* s, Fetcher* fetcher) {
  if constexpr (V > 1)
    if (vectors < V) return Scores<Op, V - 1>(vectors, k, q, words, scale, begin, end, s, fetcher);
  ForRegisterTiles<RegisterRows(V)>(begin, end, ScoreRows<Op, V>{k, q, words, scale, s, fetcher});
}

// o for dims [0, dims), from words [begin, end) of the keys of the tile.
template <typename Op, int V = kMaxVectors>
void Output(int vectors, const typename Op::Word* v, int64_t v_stride, const float* p, int64_t begin, int64_t end,
            int64_t dims, const float* alpha, float* o, Fetcher* fetcher) {
  if constexpr (V > 1)
    if (vectors < V) return Output<Op, V - 1>(vectors, v, v_stride, p, begin, end, dims, alpha, o, fetcher);
  ForRegisterTiles<RegisterRows(V)>(
      0, dims, OutputRows<Op, V>{v + begin * v_stride, v_stride, p + begin * V * kLanes, end - begin, alpha, o, fetcher});
}

}  // namespace
}  // namespace jax_varlen
