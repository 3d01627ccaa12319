// The gradient of the softmax: scores and dP of some keys become P and dS.
#pragma once

#include "bwd_strip.h"
#include "fwd_softmax.h"

namespace jax_varlen {
namespace {

// What one vector of rows needs.
struct RowVector {
  F lse, delta, slope;
  I first, last;
  U position;
};

inline RowVector LoadRows(const BwdStrip& strip, int64_t lane) {
  const Strip& rows = strip.rows;
  return {Load(strip.lse + lane),       Load(strip.delta + lane),    Load(rows.slope + lane),
          LoadAs<I>(rows.first + lane), LoadAs<I>(rows.last + lane), LoadAs<U>(rows.position + lane)};
}

// Where P is 0 nothing comes back, whatever dP may be.
inline F LogitGradient(F p, F dp, F delta) {
  return p == 0.0f ? F{} : p * (dp - delta);
}

// With every option; key j is the one of the first vector.
inline void ApplyRuleAndGradient(const LogitRule& rule, const RowVector& rows, bool masked, int32_t j, int64_t keys,
                                 int64_t stride, float* s, float* dp) {
  for (int64_t n = 0; n < keys; ++n, ++j) {
    F x = Load(s + n * stride), slope_of_cap = Set(1.0f);
    if (rule.softcap) {
      const F t = Tanh(x);
      x = t * rule.cap;
      slope_of_cap = 1.0f - t * t;
    }
    if (rule.alibi) x -= rows.slope * Abs(__builtin_convertvector(Bits<I>(rows.position - static_cast<uint32_t>(j)), F));
    if (masked) {
      x = rows.first <= j ? x : Set(-kInf);
      x = rows.last >= j ? x : Set(-kInf);
    }
    const F p = Exp2(x - rows.lse);
    Store(s + n * stride, p);
    Store(dp + n * stride, LogitGradient(p, Load(dp + n * stride), rows.delta) * slope_of_cap);
  }
}

// s and dp are [key][lane]; keys begin .. begin + keys of the sequence. s becomes P and dp becomes dS, in place.
inline void SoftmaxGradient(const LogitRule& rule, const BwdStrip& strip, int64_t begin, int64_t keys, float* s, float* dp) {
  const bool masked = begin < strip.rows.full_begin || begin + keys > strip.rows.full_end;
  const bool plain = !masked && !rule.softcap && !rule.alibi;
  const int64_t stride = strip.rows.stride();
  for (int64_t lane = 0; lane < stride; lane += kLanes) {
    const RowVector rows = LoadRows(strip, lane);
    if (!plain) {
      ApplyRuleAndGradient(rule, rows, masked, static_cast<int32_t>(begin), keys, stride, s + lane, dp + lane);
      continue;
    }
    for (int64_t n = 0; n < keys; ++n) {
      const int64_t at = n * stride + lane;
      const F p = Exp2(Load(s + at) - rows.lse);
      Store(s + at, p);
      Store(dp + at, LogitGradient(p, Load(dp + at), rows.delta));
    }
  }
}

}  // namespace
}  // namespace jax_varlen
