// The inner product that the forward pass does not have: a sum over query rows, with head dims in the lanes.
//
//   dv[key][dim] += sum over rows of p * dout        dk[key][dim] += sum over rows of ds * q
//
// Probabilities are broadcast and vectors of dout and q are loaded, so [key][row] is as good an order for them here as it is
// for the products over keys.
#pragma once

#include "fwd_matmul.h"

namespace jax_varlen {
namespace {

// One matrix of rows of floats.
struct Matrix {
  float* data;
  int64_t stride;
};

template <int R, int V>
inline void RowSumTile(const float* p, int64_t p_stride, Matrix x, int64_t rows, Matrix sum) {
  F acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) acc[r][v] = Load(sum.data + r * sum.stride + v * kLanes);
  const float* weights[(R + 2) / 3];  // as in ScoreTile
  for (int r = 0; r < R; r += 3) weights[r / 3] = p + r * p_stride;
  for (int64_t i = 0; i < rows; ++i) {
    F b[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) b[v] = Load(x.data + i * x.stride + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float a = weights[r / 3][r % 3 * p_stride];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[r][v] += b[v] * a;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r += 3) ++weights[r / 3];
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) Store(sum.data + r * sum.stride + v * kLanes, acc[r][v]);
}

template <int V>
struct RowSumKeys {
  const float* p;
  int64_t p_stride;
  Matrix x;
  int64_t rows;
  Matrix sum;
  Fetcher* fetcher;
  template <int R>
  void operator()(int64_t key) const {
    RowSumTile<R, V>(p + key * p_stride, p_stride, x, rows, {sum.data + key * sum.stride, sum.stride});
    fetcher->Some(kLinesPerTile);
  }
};

template <int V>
void RowSumColumns(const float* p, int64_t p_stride, Matrix x, int64_t rows, int64_t keys, Matrix sum, Fetcher* fetcher) {
  ForRegisterTiles<RegisterRows(V)>(0, keys, RowSumKeys<V>{p, p_stride, x, rows, sum, fetcher});
}

// sum[key][dim] += sum over rows of p[key][row] * x[row][dim], for whole vectors of dims.
inline void RowSums(const float* p, int64_t p_stride, Matrix x, int64_t rows, int64_t keys, int64_t dims, Matrix sum,
                    Fetcher* fetcher) {
  for (int64_t left = (dims + kLanes - 1) / kLanes; left > 0;) {
    int64_t vectors = Min<int64_t>(left, kMaxVectors);
    if constexpr (kMaxVectors == 4) {
      if (left == 5) vectors = 3;  // and 2: one vector alone leaves the multipliers waiting
      if (vectors == 4) RowSumColumns<4>(p, p_stride, x, rows, keys, sum, fetcher);
      if (vectors == 3) RowSumColumns<3>(p, p_stride, x, rows, keys, sum, fetcher);
    }
    if (vectors == 2) RowSumColumns<2>(p, p_stride, x, rows, keys, sum, fetcher);
    if (vectors == 1) RowSumColumns<1>(p, p_stride, x, rows, keys, sum, fetcher);
    left -= vectors;
    x.data += vectors * kLanes;
    sum.data += vectors * kLanes;
  }
}

}  // namespace
}  // namespace jax_varlen
