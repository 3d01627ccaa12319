// A strip: up to kLanes * kMaxVectors query rows, the unit of the online softmax. Rows lie in the lanes.
#pragma once

#include "fwd_kernel.h"
#include "simd_math.h"

namespace jax_varlen {
namespace {

constexpr int64_t kStripRows = kLanes * kMaxVectors;

struct Strip {
  alignas(64) float row_max[kStripRows];  // of the logits so far, in base 2
  float row_sum[kStripRows];
  float alpha[kStripRows];    // what the last tile rescaled the rows by
  float slope[kStripRows];    // ALiBi, in base 2
  int32_t first[kStripRows];  // a row sees the keys first .. last of its sequence
  int32_t last[kStripRows];
  int32_t position[kStripRows];  // of the row among the keys
  int64_t q_row[kStripRows];     // which row of q, and which head of it, a row is
  int64_t head[kStripRows];
  float* q;  // [word][lane]
  float* o;  // [dim][lane]
  int64_t rows;
  int64_t key_begin, key_end;    // the item's keys that some row sees
  int64_t full_begin, full_end;  // keys that every row sees
  int vectors;
  bool empty;  // o holds nothing yet

  int64_t offset(int64_t lane, int64_t num_heads) const { return q_row[lane] * num_heads + head[lane]; }
  bool sees_any(int64_t lane) const { return lane < rows && first[lane] <= last[lane]; }
  int64_t stride() const { return int64_t{vectors} * kLanes; }
};

inline void InitRow(const FwdParams& p, const FwdItem& item, int64_t token, int64_t head, int64_t lane, Strip* strip) {
  const int64_t position = token + item.len_k - item.len_q;
  int64_t first = 0, last = item.len_k - 1;
  if (p.window_left >= 0) first = Max(first, position - Min(p.window_left, int64_t{1} << 32));
  if (p.window_right >= 0) last = Min(last, position + Min(p.window_right, int64_t{1} << 32));
  if (first > last) first = 0, last = -1;
  strip->q_row[lane] = item.first_q + token;
  strip->head[lane] = head;
  strip->position[lane] = static_cast<int32_t>(position);
  strip->first[lane] = static_cast<int32_t>(first);
  strip->last[lane] = static_cast<int32_t>(last);
  if (p.alibi_slopes != nullptr) strip->slope[lane] = p.alibi_slopes[item.sequence * p.alibi_batch_stride + head] * kLog2E;
  if (first <= last) {
    strip->key_begin = Min(strip->key_begin, first);
    strip->key_end = Max(strip->key_end, last + 1);
  }
  strip->full_begin = Max(strip->full_begin, first);
  strip->full_end = Min(strip->full_end, last + 1);
}

inline void InitStrip(const FwdParams& p, const FwdItem& item, int64_t kv_head, int64_t row_begin, Strip* strip) {
  strip->rows = Min(kStripRows, item.row_end - row_begin);
  strip->vectors = static_cast<int>((strip->rows + kLanes - 1) / kLanes);
  strip->empty = true;
  strip->key_begin = strip->full_end = item.len_k;
  strip->key_end = strip->full_begin = 0;
  const int64_t group_size = p.num_heads / p.num_kv_heads;
  int64_t token = row_begin / group_size, member = row_begin % group_size;
  for (int64_t lane = 0; lane < strip->rows; ++lane) {
    InitRow(p, item, token, kv_head * group_size + member, lane, strip);
    if (++member == group_size) member = 0, ++token;
  }
  strip->key_begin = Max(strip->key_begin, item.key_begin);
  strip->key_end = Min(strip->key_end, item.key_end);
  for (int64_t lane = 0; lane < strip->stride(); ++lane) {
    strip->row_max[lane] = -kInf;
    strip->row_sum[lane] = 0;
    if (lane < strip->rows) continue;
    strip->position[lane] = strip->first[lane] = 0;
    strip->last[lane] = INT32_MAX;
    strip->slope[lane] = 0;
  }
}

// Takes up to kLanes rows of n 32-bit words, given by pointers (null: zeros), to dst[word][lane].
template <typename T, typename LoadWords>
inline void TransposeIn(const T* const (&rows)[kLanes], int64_t n, const LoadWords& load, float* dst, int64_t stride) {
  for (int64_t w = 0; w < n; w += kLanes) {
    F r[kLanes];
    for (int i = 0; i < kLanes; ++i) r[i] = rows[i] == nullptr ? F{} : load(rows[i], w);
    Transpose(r);
    for (int i = 0; i < kLanes; ++i) Store(dst + (w + i) * stride, r[i]);
  }
}

// The strip's rows of q, or of an array like it, as words [word][lane]; lanes of rows that see no key, or beyond its rows, are
// zero.
template <typename Engine>
void PackTransposed(const typename Engine::Data::T* array, int64_t dims, int64_t num_heads, const Strip& strip, float* dst) {
  const typename Engine::Data::T* rows[kLanes];
  for (int64_t lane = 0; lane < strip.stride(); lane += kLanes) {
    for (int i = 0; i < kLanes; ++i)
      rows[i] = strip.sees_any(lane + i) ? array + strip.offset(lane + i, num_heads) * dims : nullptr;
    TransposeIn(
        rows, Engine::Words(dims), [dims](auto* row, int64_t word) { return Engine::LoadWords(row, word, dims); }, dst + lane,
        strip.stride());
  }
}

// The first n elements of a vector, all where n is more.
template <typename D>
inline void StoreSome(F x, typename D::T* p, int64_t n) {
  if (n >= kLanes) return D::StoreVector(x, p);
  typename D::T padded[kLanes];
  D::StoreVector(x, padded);
  memcpy(p, padded, n * sizeof *p);
}

// The output of kLanes lanes at a time: o / row_sum with the sink counted in, and lse.
struct Finished {
  F row_sum, inverse, lse;
};

inline Finished FinishVector(const FwdParams& p, const Strip& strip, int64_t lane) {
  F row_max = Load(strip.row_max + lane), row_sum = Load(strip.row_sum + lane), factor = Set(1.0f);
  if (p.sinks != nullptr) {
    float sink[kLanes] = {};
    for (int64_t i = 0; i < kLanes && lane + i < strip.rows; ++i) sink[i] = p.sinks[strip.head[lane + i]] * kLog2E;
    const F with_sink = RunningMax(row_max, Load(sink));
    const F base = with_sink == -kInf ? F{} : with_sink;
    factor = Exp2(row_max - base);
    row_sum = row_sum * factor + Exp2(Load(sink) - base);
    row_max = with_sink;
  }
  return {row_sum, factor / row_sum, row_max == -kInf ? row_max + row_sum * 0.0f : row_max * kLn2 + Log(row_sum)};
}

template <typename D>
void FinishStrip(const FwdParams& p, int64_t kv_head, const Strip& strip) {
  typedef typename D::T T;
  const int64_t dims = p.head_dim_v;
  const float v_scale = p.v_scale == nullptr ? 1.0f : p.v_scale[kv_head];
  for (int64_t lane = 0; lane < strip.stride(); lane += kLanes) {
    const int64_t rows = Min<int64_t>(kLanes, strip.rows - lane);
    const Finished done = FinishVector(p, strip, lane);
    const F inverse = done.inverse * v_scale;
    for (int64_t i = 0; i < rows; ++i) p.lse[strip.head[lane + i] * p.total_q + strip.q_row[lane + i]] = done.lse[i];
    for (int64_t c = 0; c < dims; c += kLanes) {
      F r[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        if (strip.empty || c + i >= dims) {
          r[i] = F{};
        } else {
          const F o = Load(strip.o + (c + i) * strip.stride() + lane) * inverse;
          r[i] = done.row_sum == 0.0f ? F{} : o;
        }
      }
      Transpose(r);
      for (int64_t i = 0; i < rows; ++i) {
        T* out = static_cast<T*>(p.out) + strip.offset(lane + i, p.num_heads) * dims + c;
        StoreSome<D>(r[i], out, dims - c);
      }
    }
  }
}

}  // namespace
}  // namespace jax_varlen
