// The combine kernel: partial results of the decode kernel become rows of out and lse.
#pragma once

#include "decode.h"
#include "decode_tile.cuh"

namespace jax_varlen {

// One CTA for a tile and kv head and some rows: where it lies in several shares, it merges their partial results. A warp has a
// row at a time.
constexpr int kCombineWarps = 4;

template <typename T>
__global__ __launch_bounds__(32 * kCombineWarps) void combine_kernel(const __grid_constant__ FwdParams p,
                                                                     const __grid_constant__ DecodeList list,
                                                                     const __grid_constant__ Partials partials) {
  const DecodeHead head = *list.head;
  const int lane = threadIdx.x % 32, t = blockIdx.x / static_cast<int>(p.num_kv_heads);
  if (t >= head.count) return;
  const int kv_head = blockIdx.x - t * static_cast<int>(p.num_kv_heads);
  const DecodeTile& entry = list.tiles[t];
  const Tile& tile = entry.tile;
  const int rows = RowsOf(p, tile), row0 = blockIdx.y * kCombineWarps + threadIdx.x / 32;
  if (row0 >= rows) return;
  const int units_per_head = entry.UnitsPerHead(p);
  const int64_t begin = entry.first_unit + static_cast<int64_t>(kv_head) * units_per_head;
  const int first = ShareOf(head, begin), parts = ShareOf(head, begin + units_per_head - 1) - first + 1;
  if (parts == 1) return;
  const int columns = static_cast<int>(p.head_dim_v);

  for (int row = row0; row < rows; row += gridDim.y * kCombineWarps) {
    // The first part stands where its share ends, the others where theirs begin.
    auto place = [&](int i) { return (2 * (first + i) + (i == 0)) * partials.rows + row; };
    const DecodeRow where(p, tile, kv_head, row);
    const float sink = where.Sink(p, tile);
    float top = sink, sum = 0.f;
    for (int i = lane; i < parts; i += 32) top = fmaxf(top, partials.lse[place(i)]);
    for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float shift = top == -INFINITY ? 0.f : top;
    for (int i = lane; i < parts; i += 32) sum += ptx::Exp2(partials.lse[place(i)] - shift);
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    sum += ptx::Exp2(sink - shift);
    const float scale = sum == 0.f ? 0.f : 1.f / sum;
    T* out = static_cast<T*>(p.out) + where.Element(p, tile, columns);
    for (int column0 = 0; column0 < columns; column0 += 128) {
      const int column = column0 + 4 * lane;
      float4 acc = {0.f, 0.f, 0.f, 0.f};
      for (int i0 = 0; i0 < parts; i0 += 32) {
        const float mine = i0 + lane < parts ? ptx::Exp2(partials.lse[place(i0 + lane)] - shift) * scale : 0.f;
#pragma unroll 4
        for (int i = i0; i < min(parts, i0 + 32); ++i) {
          const float weight = __shfl_sync(~0u, mine, i - i0);
          if (column >= columns) continue;
          const float4 x = *reinterpret_cast<const float4*>(partials.out + place(i) * columns + column);
          acc = {fmaf(x.x, weight, acc.x), fmaf(x.y, weight, acc.y), fmaf(x.z, weight, acc.z), fmaf(x.w, weight, acc.w)};
        }
      }
      if (column < columns)
        *reinterpret_cast<uint2*>(out + column) = {ptx::Pack2<T>(acc.x, acc.y), ptx::Pack2<T>(acc.z, acc.w)};
    }
    if (lane == 0) *where.Lse(p, tile) = sum == 0.f ? -INFINITY : (shift + ptx::Log2(sum)) * kLn2;
  }
}

}  // namespace jax_varlen
