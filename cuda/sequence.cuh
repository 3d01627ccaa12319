// A tile's facts: whose rows it holds, where they are, and which keys they see.
#pragma once

#include <climits>
#include <cstdint>

#include "params.h"
#include "schedule.h"

namespace jax_varlen {

// One entry of the work list: rows of q in the forward pass, keys in the backward pass. Rows that belong to nobody make tiles
// too, with no row used and nothing to see.
struct alignas(16) Tile {
  int sequence;
  int row;      // first row of the tile, within the sequence
  int q_begin;  // first row of the sequence, in the packed array
  int q_owned;  // rows up to the next sequence
  int q_used;   // rows that count
  int k_begin;  // the same for its keys
  int k_owned;
  int k_used;
};

// One entry of the work list of the decode kernel: up to kDecodeRows pairs of a query and a head of its group, and the steps of
// keys that they see. `tile.row` is the first pair; pair r is query r / group and head r % group of every kv head's group. Rows
// that belong to nobody are a tile too, of a sequence >= batch without keys.
struct alignas(16) DecodeTile {
  Tile tile;
  int first_step;
  int steps;           // for each kv head, at least one
  int64_t first_unit;  // units of all tiles and kv heads before

  __device__ __forceinline__ int UnitsPerHead(const FwdParams& p) const { return p.batch_invariant ? 1 : steps; }
};

struct KeyRange {
  int lo, hi;  // keys lo .. hi - 1; none where lo >= hi
};

// x / y of numbers that are not negative: 64-bit divisions take long.
__device__ __forceinline__ int64_t Quotient(int64_t x, int64_t y) {
  return x <= INT_MAX && y <= INT_MAX ? static_cast<uint32_t>(x) / static_cast<uint32_t>(y) : x / y;
}

__device__ __forceinline__ int Clamp(int64_t x, int64_t lo, int64_t hi) {
  return static_cast<int>(x < lo ? lo : x > hi ? hi : x);
}

// The diagonal: query i of the sequence sits at key position i + Shift.
__device__ __forceinline__ int Shift(const Tile& tile) {
  return tile.k_used - tile.q_used;
}

// The keys that query i of the sequence sees.
__device__ __forceinline__ KeyRange VisibleTo(const FwdParams& p, const Tile& tile, int i) {
  const int64_t position = static_cast<int64_t>(i) + Shift(tile);
  return {p.window_left == kUnbounded ? 0 : Clamp(position - p.window_left, 0, INT_MAX),
          p.window_right == kUnbounded ? tile.k_used : Clamp(position + p.window_right + 1, 0, tile.k_used)};
}

// The keys that any of the tile's rows sees.
__device__ __forceinline__ KeyRange VisibleToAny(const FwdParams& p, const Tile& tile, int rows) {
  const int last = min(tile.row + rows, tile.q_used) - 1;
  if (last < tile.row) return {0, 0};
  return {VisibleTo(p, tile, tile.row).lo, VisibleTo(p, tile, last).hi};
}

// The keys that all of the tile's rows see.
__device__ __forceinline__ KeyRange VisibleToAll(const FwdParams& p, const Tile& tile, int rows) {
  return {VisibleTo(p, tile, min(tile.row + rows, tile.q_used) - 1).lo, VisibleTo(p, tile, tile.row).hi};
}

// The first query whose keys reach as far as `key`. Queries before that of key 0 see no key.
__device__ __forceinline__ int FirstQuery(const FwdParams& p, const Tile& tile, int key) {
  return p.window_right == kUnbounded ? 0 : Clamp(static_cast<int64_t>(key) - Shift(tile) - p.window_right, 0, INT_MAX);
}

// The queries that see any of the keys key .. key + keys - 1 of the sequence.
__device__ __forceinline__ KeyRange QueriesOfAny(const FwdParams& p, const Tile& tile, int key, int keys) {
  const int64_t last = static_cast<int64_t>(min(key + keys, tile.k_used)) - 1;
  if (last < key) return {0, 0};
  return {FirstQuery(p, tile, key),
          p.window_left == kUnbounded ? tile.q_used : Clamp(last - Shift(tile) + p.window_left + 1, 0, tile.q_used)};
}

}  // namespace jax_varlen
