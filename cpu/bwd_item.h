// The backward pass of one item: its keys stay, packed, beside the sums of their gradients; strips of rows pass by.
//
// Strips pass from the last row to the first. Where a causal mask leaves the later keys fewer rows, the items of one sequence
// so begin with the rows that they share, and their turns come without waiting.
#pragma once

#include "bwd_softmax.h"

namespace jax_varlen {
namespace {

constexpr int64_t kBwdTileKeys = 48;  // scores and dP of a strip stay in the first level of the cache

struct ItemKeys {
  Matrix k, v, dk, dv;  // [key][dim]
  float *s, *dp;        // of a tile, [key][lane]
};

inline int64_t KeyFloats(const FwdParams& p) {
  return 2 * (RowStride(p.head_dim) + RowStride(p.head_dim_v));
}

inline size_t BwdScratchBytes(const FwdParams& p, int64_t keys) {
  constexpr int64_t kPieces = 12, kCacheLine = 64;
  const int64_t floats = StripFloats(p) + keys * KeyFloats(p) + 2 * kBwdTileKeys * kStripRows;
  return floats * sizeof(float) + sizeof(BwdStrip) + kPieces * kCacheLine;
}

template <typename D>
ItemKeys PackKeys(const FwdParams& p, const BwdItem& item, char** scratch) {
  typedef typename D::T T;
  const int64_t keys = item.key_end - item.key_begin;
  const int64_t stride = RowStride(p.head_dim), stride_v = RowStride(p.head_dim_v);
  const auto take = [&](int64_t row_stride) { return Matrix{Take<float>(keys * row_stride, scratch), row_stride}; };
  const ItemKeys to{take(stride),
                    take(stride_v),
                    take(stride),
                    take(stride_v),
                    Take<float>(kBwdTileKeys * kStripRows, scratch),
                    Take<float>(kBwdTileKeys * kStripRows, scratch)};
  const int64_t row = (item.rows.first_k + item.key_begin) * p.num_kv_heads + item.rows.kv_head;
  for (int64_t n = 0; n < keys; ++n) {
    const int64_t at = row + n * p.num_kv_heads;
    PackRow<D>(static_cast<const T*>(p.k) + at * p.head_dim, p.head_dim, to.k.data + n * stride);
    PackRow<D>(static_cast<const T*>(p.v) + at * p.head_dim_v, p.head_dim_v, to.v.data + n * stride_v);
  }
  memset(to.dk.data, 0, keys * stride * sizeof(float));
  memset(to.dv.data, 0, keys * stride_v * sizeof(float));
  return to;
}

template <typename D>
void StoreKeyGradient(const BwdItem& item, int64_t num_kv_heads, Matrix sum, float scale, int64_t dims, typename D::T* array) {
  for (int64_t n = item.key_begin; n < item.key_end; ++n) {
    typename D::T* row = array + ((item.rows.first_k + n) * num_kv_heads + item.rows.kv_head) * dims;
    const float* from = sum.data + (n - item.key_begin) * sum.stride;
    for (int64_t c = 0; c < dims; c += kLanes) StoreSome<D>(Load(from + c) * scale, row + c, dims - c);
  }
}

// Of the strip after this one.
template <typename D>
void PlanStripFetches(const BwdParams& params, const FwdItem& rows, int64_t row_begin, Fetcher* fetcher) {
  const FwdParams& p = params.fwd;
  fetcher->Clear();
  if (row_begin < rows.row_begin) return;
  FwdItem strip = rows;
  strip.row_begin = row_begin;
  strip.row_end = row_begin + kStripRows;
  FetchRows(p, strip, p.q, p.head_dim, sizeof(typename D::T), fetcher);
  FetchRows(p, strip, params.dout, p.head_dim_v, sizeof(typename D::T), fetcher);
}

inline Matrix From(Matrix x, int64_t row) {
  return {x.data + row * x.stride, x.stride};
}

// A strip meets keys begin .. begin + n of the item: five products, with P and dS between them.
template <typename D>
void AttendBackward(const FwdParams& p, const LogitRule& rule, const BwdItem& item, const ItemKeys& keys, int64_t begin,
                    int64_t n, Fetcher* fetcher, BwdStrip* strip) {
  Strip* rows = &strip->rows;
  const Matrix k = From(keys.k, begin), v = From(keys.v, begin);
  const int64_t stride = rows->stride();
  Scores<FmaOp>(rows->vectors, {k.data, k.stride}, rows->q, p.head_dim, rule.scale, 0, n, keys.s, fetcher);
  Scores<FmaOp>(rows->vectors, {v.data, v.stride}, strip->dout, p.head_dim_v, 1.0f, 0, n, keys.dp, fetcher);
  SoftmaxGradient(rule, *strip, item.key_begin + begin, n, keys.s, keys.dp);
  RowSums(keys.s, stride, strip->dout_rows, rows->rows, n, p.head_dim_v, From(keys.dv, begin), fetcher);
  RowSums(keys.dp, stride, strip->q_rows, rows->rows, n, p.head_dim, From(keys.dk, begin), fetcher);
  Output<FmaOp>(rows->vectors, {k.data, k.stride}, keys.dp, 0, n, p.head_dim, rows->empty ? nullptr : rows->alpha, rows->o,
                fetcher);
  rows->empty = false;
}

template <typename D>
void RunBwdItem(const BwdParams& params, const BwdItem& item, char* scratch) {
  typedef typename D::T T;
  const FwdParams& p = params.fwd;
  const LogitRule rule = MakeLogitRule(p, item.rows.kv_head);
  const ItemKeys keys = PackKeys<D>(p, item, &scratch);
  BwdStrip* strip = TakeStrip(p, &scratch);
  const Strip& rows = strip->rows;
  Fetcher fetcher;

  for (int64_t i = RoundUp(item.rows.row_end, kStripRows) / kStripRows - 1; i * kStripRows >= item.rows.row_begin; --i) {
    PackStrip<D>(params, item.rows, i * kStripRows, strip);
    PlanStripFetches<D>(params, item.rows, (i - 1) * kStripRows, &fetcher);
    const int64_t begin = Max(rows.key_begin, item.key_begin) - item.key_begin;
    const int64_t end = Min(rows.key_end, item.key_end) - item.key_begin;
    for (int64_t n = begin; n < end; n += kBwdTileKeys)
      AttendBackward<D>(p, rule, item, keys, n, Min(end - n, kBwdTileKeys), &fetcher, strip);

    const bool first = rows.key_begin >= item.key_begin, last = rows.key_end <= item.key_end;
    if (!first) WaitForTurn(item.turns, i, (item.key_begin - rows.key_begin + item.keys_per_item - 1) / item.keys_per_item);
    FinishDq<D>(params, rows, item.turns.sum, first, last);
    if (!last) PassTurn(item.turns, i);
  }
  StoreKeyGradient<D>(item, p.num_kv_heads, keys.dk, *p.softmax_scale, p.head_dim, static_cast<T*>(params.dk));
  StoreKeyGradient<D>(item, p.num_kv_heads, keys.dv, 1.0f, p.head_dim_v, static_cast<T*>(params.dv));
}

template <typename D>
constexpr BwdKernel BwdKernelOf() {
  return {RunBwdItem<D>, BwdScratchBytes, kStripRows};
}

inline BwdKernel BwdKernelOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return BwdKernelOf<Bf16>();
    case DType::kF16:
      return BwdKernelOf<F16>();
    default:
      return BwdKernelOf<F32>();
  }
}

}  // namespace
}  // namespace jax_varlen
