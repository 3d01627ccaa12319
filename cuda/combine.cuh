// Partial results of the decode kernel become rows of out and lse: the last CTA that leaves one of a tile and kv head merges
// all of them, in their order, so that the bits do not depend on who was last. More than kMergedAtOnce are merged in two
// levels, by many CTAs at once.
#pragma once

#include "decode.h"
#include "decode_tile.cuh"

namespace jax_varlen {

constexpr int kMergedAtOnce = 16;

// Whether this CTA is the last of `count` that come here. It then sees what all of them have written before.
__device__ __forceinline__ bool IsLastToArrive(int* arrived, int count) {
  __shared__ bool is_last;
  __syncthreads();  // all threads have written
  if (threadIdx.x == 0) is_last = ptx::AddAcquireRelease(arrived, 1) == count - 1;
  __syncthreads();
  return is_last;
}

// Merges partial results slot(0) .. slot(count - 1) of a tile and kv head into out and lse, or, if not kFinal, into the first.
// `states` has room for the rows of a tile.
template <typename T, int kThreads, bool kFinal, typename Slot>
__device__ __forceinline__ void MergePartials(const FwdParams& p, const Tile& tile, int kv_head, const Partials& partials,
                                              int count, Slot slot, float2* states) {
  const int rows = RowsOf(p, tile), columns = static_cast<int>(p.head_dim_v);
  auto place = [&](int i, int row) { return slot(i) * partials.rows + row; };
  const auto sink_of = [&](int row) { return kFinal ? DecodeRow(p, tile, kv_head, row).Sink(p, tile) : -INFINITY; };

  // The maximum and the sum of each row, all rows at once.
  const int lanes = rows <= kThreads / 32 ? 32 : rows <= kThreads / 8 ? 8 : 2, lane = threadIdx.x % lanes;
  static_assert(kThreads / 2 >= kDecodeRows);
  const int my_row = min(static_cast<int>(threadIdx.x) / lanes, rows - 1);
  const float sink = sink_of(my_row);
  float top = sink, sum = 0.f;
  for (int i = lane; i < count; i += lanes) top = fmaxf(top, __ldcg(partials.lse + place(i, my_row)));
  for (int d = lanes / 2; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float shift = top == -INFINITY ? 0.f : top;
  for (int i = lane; i < count; i += lanes) sum += ptx::Exp2(__ldcg(partials.lse + place(i, my_row)) - shift);
  for (int d = lanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) states[my_row] = {shift, sum + ptx::Exp2(sink - shift)};
  __syncthreads();

  // An item is four columns of a row. Many loads are under way at once.
  constexpr int kItems = 4, kParts = 8;
  const int items_per_row = columns / 4, items = rows * items_per_row;
  for (int item0 = threadIdx.x; item0 < items; item0 += kItems * kThreads) {
    int row[kItems], column[kItems];
    float4 acc[kItems];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int item = min(item0 + k * kThreads, items - 1);
      row[k] = item / items_per_row;
      column[k] = 4 * (item - row[k] * items_per_row);
      acc[k] = {0.f, 0.f, 0.f, 0.f};
    }
    for (int i0 = 0; i0 < count; i0 += kParts) {
      float4 x[kItems][kParts];
      float lse[kItems][kParts];
#pragma unroll
      for (int k = 0; k < kItems; ++k)
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const bool there = i0 + i < count && item0 + k * kThreads < items;
          const int64_t from = there ? place(i0 + i, row[k]) : 0;
          x[k][i] = {0.f, 0.f, 0.f, 0.f};
          if (there) x[k][i] = __ldcg(reinterpret_cast<const float4*>(partials.out + from * columns + column[k]));
          lse[k][i] = there ? __ldcg(partials.lse + from) : -INFINITY;
        }
#pragma unroll
      for (int k = 0; k < kItems; ++k)
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const float2 state = states[row[k]];
          const float weight = ptx::Exp2(lse[k][i] - state.x);
          acc[k].x = fmaf(x[k][i].x, weight, acc[k].x);
          acc[k].y = fmaf(x[k][i].y, weight, acc[k].y);
          acc[k].z = fmaf(x[k][i].z, weight, acc[k].z);
          acc[k].w = fmaf(x[k][i].w, weight, acc[k].w);
        }
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (item0 + k * kThreads >= items) continue;
      const float sum = states[row[k]].y, scale = sum == 0.f ? 0.f : 1.f / sum;
      const float4 y = {acc[k].x * scale, acc[k].y * scale, acc[k].z * scale, acc[k].w * scale};
      if constexpr (kFinal) {
        T* out = static_cast<T*>(p.out) + DecodeRow(p, tile, kv_head, row[k]).Element(p, tile, columns) + column[k];
        *reinterpret_cast<uint2*>(out) = {ptx::Pack2<T>(y.x, y.y), ptx::Pack2<T>(y.z, y.w)};
      } else {
        *reinterpret_cast<float4*>(partials.out + static_cast<int64_t>(place(0, row[k])) * columns + column[k]) = y;
      }
    }
  }
  __syncthreads();  // the logarithms of the sums have been read
  if (threadIdx.x < rows) {
    const float2 state = states[threadIdx.x];
    const float lse = state.y == 0.f ? -INFINITY : state.x + ptx::Log2(state.y);
    if constexpr (kFinal) {
      *DecodeRow(p, tile, kv_head, threadIdx.x).Lse(p, tile) = lse * kLn2;
    } else {
      partials.lse[place(0, threadIdx.x)] = lse;
    }
  }
}

// Called by all threads of the CTA that has left the partial result of part `mine` of a tile and kv head, which lies in parts
// `first` to `last`.
template <typename T, int kThreads>
__device__ __forceinline__ void Combine(const FwdParams& p, const Tile& tile, int kv_head, const Partials& partials, int first,
                                        int last, int mine) {
  __shared__ float2 states[kDecodeRows];
  auto slot = [&](int part) { return SlotOf(part, part == first); };
  int* const arrived = partials.arrived + slot(last);
  const int first_group = first / kMergedAtOnce, groups = last / kMergedAtOnce - first_group + 1;
  if (last - first < kMergedAtOnce) {
    if (!IsLastToArrive(arrived, last - first + 1)) return;
    MergePartials<T, kThreads, true>(
        p, tile, kv_head, partials, last - first + 1, [&](int i) { return slot(first + i); }, states);
    return;
  }
  const int group = mine / kMergedAtOnce, begin = max(first, group * kMergedAtOnce);
  const int members = min(last + 1, (group + 1) * kMergedAtOnce) - begin;
  if (members > 1) {  // else its first may be the last of all, whose counter is that of the groups
    if (!IsLastToArrive(partials.arrived + slot(begin), members)) return;
    MergePartials<T, kThreads, false>(p, tile, kv_head, partials, members, [&](int i) { return slot(begin + i); }, states);
  }
  if (!IsLastToArrive(arrived, groups)) return;
  MergePartials<T, kThreads, true>(
      p, tile, kv_head, partials, groups, [&](int i) { return slot(max(first, (first_group + i) * kMergedAtOnce)); }, states);
}

}  // namespace jax_varlen
