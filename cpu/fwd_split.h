// Few rows that see many keys are shared out among several items, each with some of the keys. An item leaves behind what the
// online softmax knows of its keys; who ends last joins that, in the order of the keys, so the bits do not depend on who it is.
#pragma once

#include "fwd_strip.h"

namespace jax_varlen {
namespace {

// row_max[lane], row_sum[lane], o[dim][lane]
inline int64_t StateFloats(const Strip& strip, int64_t dims) {
  return (2 + dims) * strip.stride();
}

inline void SaveState(const Strip& strip, int64_t dims, float* state) {
  const int64_t stride = strip.stride();
  memcpy(state, strip.row_max, stride * sizeof *state);
  memcpy(state + stride, strip.row_sum, stride * sizeof *state);
  if (strip.empty)
    memset(state + 2 * stride, 0, dims * stride * sizeof *state);
  else
    memcpy(state + 2 * stride, strip.o, dims * stride * sizeof *state);
}

inline void LoadState(const float* state, int64_t dims, Strip* strip) {
  const int64_t stride = strip->stride();
  memcpy(strip->row_max, state, stride * sizeof *state);
  memcpy(strip->row_sum, state + stride, stride * sizeof *state);
  memcpy(strip->o, state + 2 * stride, dims * stride * sizeof *state);
  strip->empty = false;
}

inline void JoinState(const float* state, int64_t dims, Strip* strip) {
  const int64_t stride = strip->stride();
  for (int64_t lane = 0; lane < stride; lane += kLanes) {
    const F ours = Load(strip->row_max + lane), theirs = Load(state + lane), high = RunningMax(ours, theirs);
    const F base = high == -kInf ? F{} : high;
    const F alpha = Exp2(ours - base), beta = Exp2(theirs - base);
    Store(strip->row_max + lane, high);
    Store(strip->row_sum + lane, Load(strip->row_sum + lane) * alpha + Load(state + stride + lane) * beta);
    for (int64_t c = 0; c < dims; ++c) {
      float* o = strip->o + c * stride + lane;
      Store(o, Load(o) * alpha + Load(state + (2 + c) * stride + lane) * beta);
    }
  }
}

// True for the item that ends last; its strips then hold what all of them have seen.
inline bool JoinSplits(const FwdSplits& splits, int64_t head, int64_t dims, Strip* strips, int64_t num_strips) {
  float* of_head = splits.states + head * splits.count * splits.floats;
  float* state = of_head + splits.index * splits.floats;
  for (int64_t i = 0; i < num_strips; state += StateFloats(strips[i++], dims)) SaveState(strips[i], dims, state);
  if (__atomic_add_fetch(splits.finished + head, 1, __ATOMIC_ACQ_REL) < splits.count) return false;
  const float* first = of_head;
  for (int64_t i = 0; i < num_strips; first += StateFloats(strips[i++], dims)) {
    LoadState(first, dims, strips + i);
    for (int64_t n = 1; n < splits.count; ++n) JoinState(first + n * splits.floats, dims, strips + i);
  }
  return true;
}

// The strips of the item's kv head kv_head have met all its keys.
template <typename D>
void Finish(const FwdParams& p, const FwdItem& item, int64_t kv_head, Strip* strips, int64_t num_strips) {
  if (item.splits.count > 1 && !JoinSplits(item.splits, kv_head, p.head_dim_v, strips, num_strips)) return;
  for (int64_t i = 0; i < num_strips; ++i) FinishStrip<D>(p, kv_head, strips[i]);
}

}  // namespace
}  // namespace jax_varlen
