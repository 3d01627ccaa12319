// Where the keys of a tile stand: behind each other, or in the blocks that the block table names.
#pragma once

#include "fwd_kernel.h"
#include "simd.h"

namespace jax_varlen {
namespace {

constexpr int64_t kTileKeys = 96;

// Key n of the tile is row row[n] of k and v.
struct KeyRows {
  int64_t row[kTileKeys];
  bool consecutive;
};

// Keys tile + begin .. tile + end of the sequence. What the table says of others is not looked at.
inline void FindKeys(const FwdParams& p, const FwdItem& item, int64_t tile, int64_t begin, int64_t end, KeyRows* keys) {
  keys->consecutive = true;
  if (p.block_size == 0) {
    for (int64_t n = begin; n < end; ++n) keys->row[n] = item.first_k + tile + n;
    return;
  }
  const int32_t* table = p.block_table + item.sequence * p.max_blocks;
  for (int64_t n = begin; n < end;) {
    const int64_t block = (tile + n) / p.block_size, in_block = (tile + n) % p.block_size;
    const int64_t first_row = int64_t{table[block]} * p.block_size + in_block;
    if (n > begin && first_row != keys->row[n - 1] + 1) keys->consecutive = false;
    const int64_t block_end = Min(end, n + p.block_size - in_block);
    for (int64_t row = first_row; n < block_end; ++n, ++row) keys->row[n] = row;
  }
}

// One kv head of k or v, at the keys of a tile: its element 0 of key n.
template <typename T>
struct KeyTile {
  const T* head;   // in row 0
  int64_t stride;  // from row to row
  const KeyRows* keys;
  const T* operator[](int64_t n) const { return head + keys->row[n] * stride; }
};

template <typename T>
inline KeyTile<T> TileOf(const void* array, const FwdParams& p, int64_t kv_head, int64_t dims, const KeyRows* keys) {
  return {static_cast<const T*>(array) + kv_head * dims, p.num_kv_heads * dims, keys};
}

}  // namespace
}  // namespace jax_varlen
