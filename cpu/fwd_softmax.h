// One step of the online softmax: raw scores of some keys become probabilities, and the strip learns of them.
#pragma once

#include "fwd_strip.h"

namespace jax_varlen {
namespace {

// From q.k to a logit in base 2: scale * q.k, or cap * tanh(scale * q.k) with softcap; then ALiBi, then the mask. The
// engine of the inner products multiplies by the scale.
struct LogitRule {
  float scale, cap;
  bool softcap, alibi;
};

inline LogitRule MakeLogitRule(const FwdParams& p, int64_t kv_head) {
  const bool softcap = p.softcap > 0;
  const float scale = *p.softmax_scale * (p.k_scale == nullptr ? 1.0f : p.k_scale[kv_head]);
  return {softcap ? scale / p.softcap : scale * kLog2E, p.softcap * kLog2E, softcap, p.alibi_slopes != nullptr};
}

// The rest of the rule for keys begin .. end of a tile that starts at key `tile`, in place, for one vector of rows.
inline void ApplyRule(const LogitRule& rule, const Strip& strip, int64_t lane, int64_t tile, int64_t begin, int64_t end,
                      bool masked, float* s) {
  const I first = LoadAs<I>(strip.first + lane), last = LoadAs<I>(strip.last + lane);
  const U position = LoadAs<U>(strip.position + lane);
  const F slope = Load(strip.slope + lane);
  for (int64_t n = begin; n < end; ++n) {
    const int32_t j = static_cast<int32_t>(tile + n);
    float* logit = s + n * strip.stride() + lane;
    F x = Load(logit);
    if (rule.softcap) x = Tanh(x) * rule.cap;
    if (rule.alibi) x -= slope * Abs(__builtin_convertvector(Bits<I>(position - static_cast<uint32_t>(j)), F));
    if (masked) {
      x = first <= j ? x : Set(-kInf);
      x = last >= j ? x : Set(-kInf);
    }
    Store(logit, x);
  }
}

// exp2(s - row_max) in words, in place, for V vectors of rows. With two keys to a word, word n / 2 takes the place of a
// float that was read before.
template <typename Op, int V>
inline void Probabilities(int64_t begin, int64_t end, float* s, Strip* strip) {
  F high[V], sum[V] = {};
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) high[v] = Load(strip->row_max + v * kLanes);
  for (int64_t n = begin; n < end; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) high[v] = RunningMax(high[v], Load(s + (n * V + v) * kLanes));

#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const F old_max = Load(strip->row_max + v * kLanes);
    Store(strip->row_max + v * kLanes, high[v]);
    high[v] = high[v] == -kInf ? F{} : high[v];
    Store(strip->alpha + v * kLanes, Exp2(old_max - high[v]));
  }

  for (int64_t n = begin; n < end; n += Op::kPair) {
    float* in = s + n * V * kLanes;
    float* out = s + n / Op::kPair * V * kLanes;
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const F x = Exp2(Load(in + v * kLanes) - high[v]);
      if constexpr (Op::kPair == 1) {
        Store(out + v * kLanes, x);
        sum[v] += x;
      } else {
        const F y = Exp2(Load(in + (V + v) * kLanes) - high[v]);
        Store(out + v * kLanes, Op::PackPair(x, y));
        sum[v] += x + y;
      }
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    float* row_sum = strip->row_sum + v * kLanes;
    Store(row_sum, Load(row_sum) * Load(strip->alpha + v * kLanes) + sum[v]);
  }
}

template <typename Op, int V = kMaxVectors>
void ProbabilitiesOf(int vectors, int64_t begin, int64_t end, float* s, Strip* strip) {
  if constexpr (V > 1)
    if (vectors < V) return ProbabilitiesOf<Op, V - 1>(vectors, begin, end, s, strip);
  Probabilities<Op, V>(begin, end, s, strip);
}

// s holds scaled scores of keys begin .. end of the tile, [key][lane]; afterwards it holds probabilities in words.
template <typename Op>
void Softmax(const LogitRule& rule, int64_t tile, int64_t begin, int64_t end, float* s, Strip* strip) {
  const bool masked = tile + begin < strip->full_begin || tile + end > strip->full_end;
  if (masked || rule.softcap || rule.alibi)
    for (int64_t lane = 0; lane < strip->stride(); lane += kLanes) ApplyRule(rule, *strip, lane, tile, begin, end, masked, s);
  ProbabilitiesOf<Op>(strip->vectors, begin, end, s, strip);
}

}  // namespace
}  // namespace jax_varlen
