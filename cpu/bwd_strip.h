// A strip of the backward pass: the rows of the forward's strip, with what the gradients of their logits need.
#pragma once

#include "bwd_kernel.h"
#include "bwd_matmul.h"
#include "fwd_fma.h"
#include "scratch.h"

namespace jax_varlen {
namespace {

struct BwdStrip {
  Strip rows;                         // q is [dim][lane], o is dq, [dim][lane]
  alignas(64) float lse[kStripRows];  // in base 2; +inf where a row has no probabilities
  float delta[kStripRows];
  float* dout;       // [dim][lane]
  Matrix q_rows;     // [lane][dim]
  Matrix dout_rows;  // [lane][dim]
};

inline int64_t StripFloats(const FwdParams& p) {
  const int64_t whole = RoundUp(p.head_dim, kLanes), whole_v = RoundUp(p.head_dim_v, kLanes);
  return kStripRows * (2 * whole + whole_v + RowStride(p.head_dim) + RowStride(p.head_dim_v));
}

inline BwdStrip* TakeStrip(const FwdParams& p, char** scratch) {
  BwdStrip* strip = Take<BwdStrip>(1, scratch);
  const int64_t stride = RowStride(p.head_dim), stride_v = RowStride(p.head_dim_v);
  strip->rows.q = Take<float>(RoundUp(p.head_dim, kLanes) * kStripRows, scratch);
  strip->rows.o = Take<float>(RoundUp(p.head_dim, kLanes) * kStripRows, scratch);
  strip->dout = Take<float>(RoundUp(p.head_dim_v, kLanes) * kStripRows, scratch);
  strip->q_rows = {Take<float>(stride * kStripRows, scratch), stride};
  strip->dout_rows = {Take<float>(stride_v * kStripRows, scratch), stride_v};
  for (float& alpha : strip->rows.alpha) alpha = 1.0f;
  return strip;
}

// Rows of an array (total, heads, dims) as floats, zeros behind the last dim.
template <typename D>
inline void PackRow(const typename D::T* row, int64_t dims, float* to) {
  for (int64_t c = 0; c < dims; c += kLanes) Store(to + c, LoadSome<D>(row + c, dims - c));
}

// Rows that see no key become zeros: nothing of theirs, NaN included, reaches a product.
template <typename D>
void PackStrip(const BwdParams& params, const FwdItem& rows, int64_t row_begin, BwdStrip* strip) {
  typedef typename D::T T;
  typedef FmaEngine<D> Engine;
  const FwdParams& p = params.fwd;
  const T *q = static_cast<const T*>(p.q), *dout = static_cast<const T*>(params.dout);
  InitStrip(p, rows, rows.kv_head, row_begin, &strip->rows);
  const Strip& s = strip->rows;
  PackTransposed<Engine>(q, p.head_dim, p.num_heads, s, strip->rows.q);
  PackTransposed<Engine>(dout, p.head_dim_v, p.num_heads, s, strip->dout);
  for (int64_t lane = 0; lane < s.stride(); ++lane) {
    float *q_row = strip->q_rows.data + lane * strip->q_rows.stride,
          *dout_row = strip->dout_rows.data + lane * strip->dout_rows.stride;
    strip->lse[lane] = kInf;
    strip->delta[lane] = 0;
    if (!s.sees_any(lane)) {
      memset(q_row, 0, strip->q_rows.stride * sizeof(float));
      memset(dout_row, 0, strip->dout_rows.stride * sizeof(float));
      continue;
    }
    const int64_t row = s.offset(lane, p.num_heads), statistic = s.head[lane] * p.total_q + s.q_row[lane];
    PackRow<D>(q + row * p.head_dim, p.head_dim, q_row);
    PackRow<D>(dout + row * p.head_dim_v, p.head_dim_v, dout_row);
    const float lse = p.lse[statistic];
    strip->lse[lane] = lse == -kInf ? kInf : lse * kLog2E;
    strip->delta[lane] = params.delta[statistic];
  }
}

// dq of the strip: added to what the items of earlier keys have summed up, and written out behind the last of them.
template <typename D>
void FinishDq(const BwdParams& params, const Strip& strip, float* sum, bool first, bool last) {
  const FwdParams& p = params.fwd;
  const float scale = *p.softmax_scale;
  for (int64_t lane = 0; lane < strip.stride(); lane += kLanes) {
    for (int64_t c = 0; c < p.head_dim; c += kLanes) {
      const int64_t dims = Min<int64_t>(kLanes, p.head_dim - c);
      F r[kLanes];
      for (int i = 0; i < kLanes; ++i) r[i] = i < dims ? Load(strip.o + (c + i) * strip.stride() + lane) * scale : F{};
      Transpose(r);
      for (int64_t i = 0; i < kLanes && lane + i < strip.rows; ++i) {
        const int64_t element = strip.offset(lane + i, p.num_heads) * p.head_dim + c;
        if (!first) r[i] += LoadSome<F32>(sum + element, dims);
        if (last)
          StoreSome<D>(r[i], static_cast<typename D::T*>(params.dq) + element, dims);
        else
          StoreSome<F32>(r[i], sum + element, dims);
      }
    }
  }
}

}  // namespace
}  // namespace jax_varlen
