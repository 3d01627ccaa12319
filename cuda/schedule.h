// The work list: which tiles of q there are, longest first. It is made on the device from the offsets, so that the host
// knows no length, a compiled call serves any lengths, and a captured graph replays with new ones.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace jax_varlen {

struct Tile;

struct WorkList {
  int32_t* count;  // of tiles; every tile is one item of work for each head
  Tile* tiles;
  int64_t capacity;
};

// The work list in a workspace of 32-bit words: the count, alone in the first kWordsPerTile words, then the tiles.
constexpr int kWordsPerTile = 8;

inline WorkList WorkListIn(int32_t* workspace, int64_t words) {
  return {workspace, reinterpret_cast<Tile*>(workspace + kWordsPerTile), words / kWordsPerTile - 1};
}

// The tiles that a batch can have at most: no sequence has more than one tile that is not full, and rows of nobody stand before
// the first and after the last sequence.
inline int64_t MaxTiles(const FwdParams& p, int tile_m) {
  return p.total_q / tile_m + p.batch + 2;
}

cudaError_t LaunchSchedule(const FwdParams& params, int tile_m, int tile_n, const WorkList& list, cudaStream_t stream);

}  // namespace jax_varlen
