// What a thread of Hopper's forward kernel does with its rows: the online softmax, and the store of out and lse.
#pragma once

#include "params.h"
#include "ptx.cuh"
#include "sequence.cuh"
#include "softmax.cuh"

namespace jax_varlen {

// The running state of a thread's two rows, in the exponent's units.
struct RowState {
  float shift[2] = {-INFINITY, -INFINITY};  // what probabilities are relative to; -inf until a row has seen a key
  float row_sum[2] = {0.f, 0.f};            // of this thread's columns alone
};

// Takes the maxima of a tile of logits into the state. A shift stays where it is until a logit is kSlack powers of two above
// it: probabilities are then above 1, which harms neither their sums nor the relative error of their rounding, and the output
// is seldom rescaled. Returns what the sums so far are to be multiplied by.
template <int kN>
__device__ __forceinline__ float2 UpdateShift(const float (&acc_s)[kN][4], RowState& state, float exponent_scale) {
  constexpr float kSlack = 8.f;
  float rescale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top[2] = {fmaxf(acc_s[0][2 * r], acc_s[0][2 * r + 1]), fmaxf(acc_s[1][2 * r], acc_s[1][2 * r + 1])};
#pragma unroll
    for (int n = 2; n < kN; ++n) top[n % 2] = fmaxf(top[n % 2], fmaxf(acc_s[n][2 * r], acc_s[n][2 * r + 1]));
    const float shift = __fmul_rn(QuadMax(fmaxf(top[0], top[1])), exponent_scale);
    const bool moves = shift - kSlack > state.shift[r];
    rescale[r] = moves ? ptx::Exp2(state.shift[r] - shift) : 1.f;
    if (moves) state.shift[r] = shift;
    state.row_sum[r] *= rescale[r];
  }
  return {rescale[0], rescale[1]};
}

// In place: the probabilities of a tile, not normalised and not rounded, and their sums.
template <int kN>
__device__ __forceinline__ void Exponentials(float (&acc_s)[kN][4], RowState& state, float exponent_scale) {
  float sums[4] = {}, shift[2];
  for (int r = 0; r < 2; ++r) shift[r] = state.shift[r] == -INFINITY ? 0.f : state.shift[r];
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      acc_s[n][e] = ptx::Exp2(fmaf(acc_s[n][e], exponent_scale, -shift[e / 2]));
      sums[e] += acc_s[n][e];
    }
  state.row_sum[0] += sums[0] + sums[1];
  state.row_sum[1] += sums[2] + sums[3];
}

// A 4x4 exchange in a quad: word i of lane c becomes word c of lane i.
__device__ __forceinline__ void TransposeQuad(uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
    words[i] = odd ? other : words[i];
    words[i + 1] = odd ? words[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, high ? words[i] : words[i + 2], 2);
    words[i] = high ? other : words[i];
    words[i + 2] = high ? words[i + 2] : other;
  }
}

// Stores a thread's part of 16 rows of out and lse, from `row0` of the sequence on.
template <typename T, int kHeadDim>
__device__ __forceinline__ void StoreRows16(const float (&acc_o)[kHeadDim / 8][4], const RowState& state, const FwdParams& p,
                                            const Tile& tile, int head, int row0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row0 + lane / 4 + 8 * r;
    RowResult result = FinishRow(state.shift[r], state.row_sum[r], p.sinks ? p.sinks + head : nullptr);
    if (row >= tile.q_used) result = {0.f, -INFINITY};
    if (p.v_scale) result.out_scale *= p.v_scale[head / p.group_size];
    const bool owned = row < tile.q_owned;
    if (lane % 4 == 0 && owned) p.lse[head * p.total_q + tile.q_begin + row] = result.lse;
    T* out = static_cast<T*>(p.out) + ((static_cast<int64_t>(tile.q_begin) + row) * p.num_heads + head) * p.head_dim_v;
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; d += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float lo = result.out_scale == 0.f ? 0.f : acc_o[d + i][2 * r] * result.out_scale;
        const float hi = result.out_scale == 0.f ? 0.f : acc_o[d + i][2 * r + 1] * result.out_scale;
        words[i] = ptx::Pack2<T>(lo, hi);
      }
      TransposeQuad(words);
      const int column = 8 * (d + lane % 4);
      if (owned && column < p.head_dim_v)
        *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Stores 16 rows of an item that sees no key: the sink is all that a row has, if it counts.
template <typename T>
__device__ __forceinline__ void StoreNothing(const FwdParams& p, const Tile& tile, int head, int row0) {
  const int lane = threadIdx.x % 32;
  for (int row = row0; row < min(row0 + 16, tile.q_owned); ++row) {
    T* out = static_cast<T*>(p.out) + ((static_cast<int64_t>(tile.q_begin) + row) * p.num_heads + head) * p.head_dim_v;
    if (8 * lane < p.head_dim_v) *reinterpret_cast<uint4*>(out + 8 * lane) = make_uint4(0, 0, 0, 0);
    if (lane == 0) p.lse[head * p.total_q + tile.q_begin + row] = p.sinks && row < tile.q_used ? p.sinks[head] : -INFINITY;
  }
}

}  // namespace jax_varlen
