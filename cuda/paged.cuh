// Keys and values in a pool of blocks: the look-up of their rows in the table, and the copy of such rows to shared memory.
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx.cuh"
#include "sequence.cuh"
#include "tile_io.cuh"

namespace jax_varlen {

// What is known of the keys of a tile before it is copied: their blocks, as the table has them, and their rows in the blocks,
// or -1 for keys that are not seen. Table entries arrive as other copies do.
template <int kKeys>
struct PoolRows {
  int2 block_and_place[kKeys];

  // Entries of keys that are not seen are not read.
  __device__ __forceinline__ void LookUp(const FwdParams& p, int sequence, int key0, const KeyRange& seen) {
    if (threadIdx.x >= kKeys) return;
    const int key = key0 + threadIdx.x;
    const bool is_seen = key >= seen.lo && key < seen.hi;
    const uint32_t block_size = static_cast<uint32_t>(p.block_size), column = static_cast<uint32_t>(key) / block_size;
    int2& mine = block_and_place[threadIdx.x];
    mine.y = is_seen ? static_cast<int>(static_cast<uint32_t>(key) - column * block_size) : -1;
    ptx::CopyAsync4(ptx::SmemAddress(&mine.x), p.block_table + (is_seen ? sequence * p.max_blocks + column : 0), is_seen);
  }
};

// Starts the copy of a tile of keys and of values of one head by kThreads threads, as CopyTile does it; either only where its
// flag says so. Keys that are not seen and chunks beyond head_dim become zeros and are not read. E is what the pools hold: a
// tile of one-byte elements has rows of half as many 16-bit columns.
template <typename E, int kHeadDim, int kThreads, int kKeys, bool kCopyK, bool kCopyV>
__device__ __forceinline__ void CopyFromPool(const FwdParams& p, const PoolRows<kKeys>& rows, int kv_head, uint32_t smem_k,
                                             uint32_t smem_v) {
  constexpr int kColumns = kHeadDim * sizeof(E) / 2, kPerChunk = 16 / sizeof(E);
  constexpr int kChunks = kHeadDim / kPerChunk, kRowsPerPass = kThreads / kChunks;
  static_assert(kKeys % kRowsPerPass == 0);
  const int chunk = threadIdx.x % kChunks, row0 = threadIdx.x / kChunks;
  const uint32_t stride_k = static_cast<uint32_t>(p.num_kv_heads * p.head_dim * sizeof(E));
  const uint32_t stride_v = static_cast<uint32_t>(p.num_kv_heads * p.head_dim_v * sizeof(E));
  const char* pool_k = static_cast<const char*>(p.k) + (kv_head * p.head_dim + chunk * kPerChunk) * sizeof(E);
  const char* pool_v = static_cast<const char*>(p.v) + (kv_head * p.head_dim_v + chunk * kPerChunk) * sizeof(E);
#pragma unroll
  for (int i = 0; i < kKeys / kRowsPerPass; ++i) {
    const int2 key = rows.block_and_place[row0 + i * kRowsPerPass];
    // A table entry that is no block of the pool gives no row, as a key that is not seen.
    const bool valid = key.y >= 0 && static_cast<uint32_t>(key.x) < static_cast<uint32_t>(p.num_blocks);
    const uint32_t row = valid ? key.x * static_cast<uint32_t>(p.block_size) + key.y : 0;
    const uint32_t place = SmemOffset<kColumns>(row0 + i * kRowsPerPass, chunk);
    if constexpr (kCopyK)
      ptx::CopyAsync16(smem_k + place, pool_k + static_cast<uint64_t>(row) * stride_k, valid && chunk * kPerChunk < p.head_dim);
    if constexpr (kCopyV)
      ptx::CopyAsync16(smem_v + place, pool_v + static_cast<uint64_t>(row) * stride_v,
                       valid && chunk * kPerChunk < p.head_dim_v);
  }
}

}  // namespace jax_varlen
