// What the decode kernel knows of a tile: its rows, and the shares that it lies in.
#pragma once

#include <climits>

#include "params.h"
#include "schedule.h"
#include "sequence.cuh"
#include "softmax.cuh"

namespace jax_varlen {

__device__ __forceinline__ int64_t ShareBegin(const DecodeHead& head, int share) {
  return share * head.share_units + min(static_cast<int64_t>(share), head.longer);
}

// The share that holds a unit.
__device__ __forceinline__ int ShareOf(const DecodeHead& head, int64_t unit) {
  const int64_t of_longer = head.longer * (head.share_units + 1);
  return static_cast<int>(unit < of_longer ? Quotient(unit, head.share_units + 1)
                                           : head.longer + Quotient(unit - of_longer, head.share_units));
}

// The place of the partial result of a share: that of a tile and head that begins in it and goes on elsewhere, or of one that
// began elsewhere.
__device__ __forceinline__ int SlotOf(int share, bool begins) {
  return 2 * share + begins;
}

__device__ __forceinline__ int RowsOf(const FwdParams& p, const Tile& tile) {
  return min(kDecodeRows, tile.q_used * p.group_size - tile.row);
}

// One row of a tile.
struct DecodeRow {
  int query;  // of the sequence
  int head;   // of q

  __device__ __forceinline__ DecodeRow(const FwdParams& p, const Tile& tile, int kv_head, int row) {
    const uint32_t group = p.group_size, pair = tile.row + row;
    query = pair / group;
    head = kv_head * group + (pair - query * group);
  }

  // In an array (total_q, num_heads, columns).
  __device__ __forceinline__ int64_t Element(const FwdParams& p, const Tile& tile, int64_t columns) const {
    return ((static_cast<int64_t>(tile.q_begin) + query) * p.num_heads + head) * columns;
  }

  __device__ __forceinline__ float* Lse(const FwdParams& p, const Tile& tile) const {
    return p.lse + head * p.total_q + tile.q_begin + query;
  }

  // Of base 2; -inf where there is none.
  __device__ __forceinline__ float Sink(const FwdParams& p, const Tile& tile) const {
    return p.sinks && tile.sequence < p.batch ? p.sinks[head] * kLog2e : -INFINITY;
  }

  __device__ __forceinline__ float Slope(const FwdParams& p, const Tile& tile) const {
    return p.alibi_slopes && tile.sequence < p.batch ? p.alibi_slopes[tile.sequence * p.alibi_batch_stride + head] : 0.f;
  }
};

}  // namespace jax_varlen
