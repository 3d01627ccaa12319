// The end of a forward tile: rows of out and lse.
#pragma once

#include "params.h"
#include "sequence.cuh"
#include "softmax.cuh"
#include "tile_io.cuh"

namespace jax_varlen {

// Stores the rows of one atom that the sequence owns. O passes through 16 rows of shared memory, so that whole 16-byte
// chunks reach device memory.
template <typename T, int kHeadDim>
__device__ __forceinline__ void StoreAtom(const float (&acc_o)[kHeadDim / 8][4], const SoftmaxState& state,
                                          const Logits& logits, const FwdParams& p, const Tile& tile, int head, int row0,
                                          uint32_t smem_rows) {
  constexpr int kChunks = kHeadDim / 8;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int atom_row = lane / 4 + 8 * r, row = row0 + atom_row;
    RowResult result =
        FinishRow(state.row_max[r] * logits.exponent_scale, state.row_sum[r], p.sinks ? p.sinks + head : nullptr);
    if (row >= tile.q_used) result = {0.f, -INFINITY};
    if (p.v_scale) result.out_scale *= p.v_scale[head / p.group_size];
    if (lane % 4 == 0 && row < tile.q_owned) p.lse[head * p.total_q + tile.q_begin + row] = result.lse;
#pragma unroll
    for (int d = 0; d < kChunks; ++d) {
      const float lo = result.out_scale == 0.f ? 0.f : acc_o[d][2 * r] * result.out_scale;
      const float hi = result.out_scale == 0.f ? 0.f : acc_o[d][2 * r + 1] * result.out_scale;
      ptx::StoreShared4(smem_rows + SmemOffset<kHeadDim>(atom_row, d) + lane % 4 * 4, ptx::Pack2<T>(lo, hi));
    }
  }
  __syncwarp();
  T* out = static_cast<T*>(p.out) + ((static_cast<int64_t>(tile.q_begin) + row0) * p.num_heads + head) * p.head_dim_v;
  StoreRows<kHeadDim>(out, p.num_heads * p.head_dim_v, tile.q_owned - row0, p.head_dim_v, smem_rows);
}

}  // namespace jax_varlen
