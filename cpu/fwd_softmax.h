// One step of the online softmax: raw scores of some keys become probabilities, and the strip learns of them.
#pragma once

namespace jax_varlen {
namespace {

// From q.k to a logit in base 2: pre * q.k, or post * tanh(pre * q.k) with softcap; then ALiBi, then the mask.
struct LogitRule {
  float pre, post;
  bool softcap, alibi;
};

inline LogitRule MakeLogitRule(const FwdParams& p) {
  const bool softcap = p.softcap > 0;
  const float scale = *p.softmax_scale;
  return {softcap ? scale / p.softcap : scale * kLog2E, p.softcap * kLog2E, softcap, p.alibi_slopes != nullptr};
}

// Logits of one vector of rows in place; returns their maximum. plain: neither softcap, ALiBi nor mask.
inline F PlainLogits(const LogitRule& rule, int64_t keys, int64_t stride, F row_max, float* s) {
  F other = row_max;
  int64_t n = 0;
  for (; n + 2 <= keys; n += 2) {
    const F a = Load(s + n * stride) * rule.pre, b = Load(s + (n + 1) * stride) * rule.pre;
    Store(s + n * stride, a);
    Store(s + (n + 1) * stride, b);
    row_max = RunningMax(row_max, a);
    other = RunningMax(other, b);
  }
  for (; n < keys; ++n) {
    const F a = Load(s + n * stride) * rule.pre;
    Store(s + n * stride, a);
    row_max = RunningMax(row_max, a);
  }
  return RunningMax(row_max, other);
}

inline F RuledLogits(const LogitRule& rule, const Strip& strip, int64_t lane, int64_t key, int64_t keys, bool masked,
                     F row_max, float* s) {
  const I first = LoadAs<I>(strip.first + lane), last = LoadAs<I>(strip.last + lane);
  const U position = LoadAs<U>(strip.position + lane);
  const F slope = Load(strip.slope + lane);
  for (int64_t n = 0; n < keys; ++n, s += strip.stride()) {
    const int32_t j = static_cast<int32_t>(key + n);
    F x = Load(s) * rule.pre;
    if (rule.softcap) x = Tanh(x) * rule.post;
    if (rule.alibi) x -= slope * Abs(__builtin_convertvector(Bits<I>(position - static_cast<uint32_t>(j)), F));
    if (masked) x = (first <= j) & (last >= j) ? x : Set(-kInf);
    Store(s, x);
    row_max = RunningMax(row_max, x);
  }
  return row_max;
}

// exp2(s - base) of one vector of rows, in place; returns their sum. With two keys to a word, word n / 2 takes the place
// of a float that was read before.
template <typename Op>
inline F Probabilities(int64_t begin, int64_t end, int64_t stride, F base, float* s) {
  F sum = {};
  if constexpr (Op::kPair == 1) {
    for (int64_t n = begin; n < end; ++n) {
      const F x = Exp2(Load(s + n * stride) - base);
      Store(s + n * stride, x);
      sum += x;
    }
  } else {
    for (int64_t n = begin; n < end; n += 2) {
      const F a = Exp2(Load(s + n * stride) - base), b = Exp2(Load(s + (n + 1) * stride) - base);
      Store(s + n / 2 * stride, Op::PackPair(a, b));
      sum += a + b;
    }
  }
  return sum;
}

// s holds scores of keys begin .. end of the tile, [key][lane]; afterwards it holds probabilities in words.
template <typename Op>
void Softmax(const LogitRule& rule, int64_t tile, int64_t begin, int64_t end, float* s, Strip* strip) {
  const bool masked = tile + begin < strip->full_begin || tile + end > strip->full_end;
  const bool plain = !masked && !rule.softcap && !rule.alibi;
  const int64_t keys = end - begin, stride = strip->stride();
  for (int64_t lane = 0; lane < stride; lane += kLanes) {
    const F old_max = Load(strip->row_max + lane);
    float* logits = s + begin * stride + lane;
    const F row_max = plain ? PlainLogits(rule, keys, stride, old_max, logits)
                            : RuledLogits(rule, *strip, lane, tile + begin, keys, masked, old_max, logits);
    const F base = row_max == -kInf ? F{} : row_max;
    const F alpha = Exp2(old_max - base);
    const F sum = Probabilities<Op>(begin, end, stride, base, s + lane);
    Store(strip->row_max + lane, row_max);
    Store(strip->row_sum + lane, Load(strip->row_sum + lane) * alpha + sum);
    Store(strip->alpha + lane, alpha);
  }
}

}  // namespace
}  // namespace jax_varlen
