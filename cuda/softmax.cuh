// From logits to probabilities: scale, softcap, ALiBi, the mask, and the online softmax of one tile.
//
// A thread holds, of each 16x8 accumulator atom, two neighbouring columns of two rows: element e is row lane / 4 + 8 * (e / 2),
// column 2 * (lane % 4) + e % 2.
#pragma once

#include <cmath>

#include "params.h"
#include "ptx.cuh"
#include "sequence.cuh"

namespace jax_varlen {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// How raw products q.k become logits. The plain case, a positive scale alone, costs nothing: the scale goes into the exponent.
struct Logits {
  float scale;
  float slope;
  bool plain;
  float exponent_scale;  // 2^(x * exponent_scale) is exp of the logit, for x as ScaleLogits leaves it

  __device__ Logits(const FwdParams& p, const Tile& tile, int head) : Logits(p, head) {
    if (p.alibi_slopes && tile.sequence < p.batch) slope = p.alibi_slopes[tile.sequence * p.alibi_batch_stride + head];
    Finish(p, slope != 0.f);
  }

  // Without a slope, where rows of several heads meet.
  __device__ Logits(const FwdParams& p, int head) : scale(*p.softmax_scale), slope(0.f) {
    if (p.k_scale) scale *= p.k_scale[head / p.group_size];
    Finish(p, p.alibi_slopes != nullptr);
  }

 private:
  __device__ void Finish(const FwdParams& p, bool biased) {
    // The maximum of scaled logits is the scaled maximum only for a scale that is positive and no denormal.
    plain = p.softcap == 0.f && !biased && scale > 1e-30f;
    exponent_scale = plain ? scale * kLog2e : kLog2e;
  }
};

// The running state of the rows of one 16-row atom that a thread shares with the three others of its quad.
struct SoftmaxState {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};  // of this thread's columns alone, until FinishRow
  float shift[2];                 // the maximum in the exponent's units
};

// c * tanh(t). Near 0 by its series, elsewhere by 1 - 2 / (e^(2 t) + 1): right to 2e-7 of the result, where the tanh
// instruction has an error of 5e-4 * c, and the second form alone one of 1e-7 * c, which is large for a cap that is never
// reached.
__device__ __forceinline__ float Cap(float t, float softcap) {
  const float t2 = t * t;
  const float series = t * fmaf(t2, fmaf(t2, fmaf(t2, fmaf(t2, 62.f / 2835, -17.f / 315), 2.f / 15), -1.f / 3), 1.f);
  const float quotient = fmaf(-2.f, ptx::Reciprocal(ptx::Exp2(t * (2.f * kLog2e)) + 1.f), 1.f);
  return softcap * (fabsf(t) < 0.3f ? series : quotient);
}

// Scale and softcap, for logits that are not plain.
template <int kN>
__device__ __forceinline__ void ScaleLogits(float (&acc_s)[kN][4], const Logits& logits, float softcap) {
  const float factor = softcap == 0.f ? logits.scale : logits.scale / softcap;
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float x = acc_s[n][e] * factor;
      acc_s[n][e] = softcap == 0.f ? x : Cap(x, softcap);
    }
}

// ALiBi. `distance` is that of the thread's first row from the atoms' first column, in tokens.
template <int kN>
__device__ __forceinline__ void AddAlibi(float (&acc_s)[kN][4], const Logits& logits, int distance) {
  if (logits.slope == 0.f) return;
  distance -= 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      acc_s[n][e] = fmaf(-logits.slope, static_cast<float>(abs(distance + 8 * (e / 2) - 8 * n - e % 2)), acc_s[n][e]);
}

// Hides the keys that a row does not see.
template <int kN>
__device__ __forceinline__ void MaskLogits(float (&acc_s)[kN][4], const FwdParams& p, const Tile& tile, int row, int key0) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const KeyRange visible = VisibleTo(p, tile, row + 8 * r);
    const int column = key0 + 2 * (threadIdx.x % 4), lo = visible.lo - column, hi = visible.hi - column;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * n + c < lo || 8 * n + c >= hi) acc_s[n][2 * r + c] = -INFINITY;
  }
}

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Takes the maxima of one tile of logits into the state. Returns, for each of the thread's two rows, what the sums so far must
// be multiplied by.
template <int kN>
__device__ __forceinline__ float2 UpdateMax(const float (&acc_s)[kN][4], SoftmaxState& state, float exponent_scale) {
  float rescale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_max = fmaxf(acc_s[0][2 * r], acc_s[0][2 * r + 1]);
#pragma unroll
    for (int n = 1; n < kN; ++n) row_max = fmaxf(row_max, fmaxf(acc_s[n][2 * r], acc_s[n][2 * r + 1]));
    row_max = fmaxf(state.row_max[r], QuadMax(row_max));
    // A row that has seen no key yet has the maximum -inf; 0 in its place keeps -inf - -inf out of the exponent. Both shifts
    // are rounded before they meet: a maximum that stays gives exactly 1, and no error that grows from tile to tile.
    state.shift[r] = row_max == -INFINITY ? 0.f : __fmul_rn(row_max, exponent_scale);
    rescale[r] = ptx::Exp2(__fsub_rn(__fmul_rn(state.row_max[r], exponent_scale), state.shift[r]));
    state.row_max[r] = row_max;
    state.row_sum[r] *= rescale[r];
  }
  return {rescale[0], rescale[1]};
}

// The A operand of P V for 16 columns of P, two atoms of acc_s: unnormalised probabilities, which enter the row sums unrounded.
template <typename T>
__device__ __forceinline__ void Probabilities(uint32_t (&p)[4], const float (&left)[4], const float (&right)[4],
                                              SoftmaxState& state, float exponent_scale) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float (&s)[4] = e < 2 ? left : right;
    const int r = e % 2;
    const float lo = ptx::Exp2(fmaf(s[2 * r], exponent_scale, -state.shift[r]));
    const float hi = ptx::Exp2(fmaf(s[2 * r + 1], exponent_scale, -state.shift[r]));
    state.row_sum[r] += lo + hi;
    p[e] = ptx::Pack2<T>(lo, hi);
  }
}

struct RowResult {
  float out_scale;  // what the accumulated output is multiplied by
  float lse;
};

// Ends a row. Its sum over the quad's columns is relative to `shift`, in units of log 2; the sink is one more term of the
// denominator.
__device__ __forceinline__ RowResult FinishRow(float shift, float row_sum, const float* sink) {
  row_sum = QuadSum(row_sum);
  float out_scale = 1.f;
  if (sink) {
    const float sink_log2 = *sink * kLog2e;
    const float with_sink = fmaxf(shift, sink_log2);
    if (with_sink == -INFINITY) return {0.f, -INFINITY};
    out_scale = ptx::Exp2(shift - with_sink);
    row_sum = fmaf(row_sum, out_scale, ptx::Exp2(sink_log2 - with_sink));
    shift = with_sink;
  }
  if (row_sum == 0.f) return {0.f, -INFINITY};
  return {out_scale * ptx::Reciprocal(row_sum), (shift + ptx::Log2(row_sum)) * kLn2};
}

}  // namespace jax_varlen
