// The work list: which tiles of q (forward) or of k (backward) there are, in the order in which they start. It is made on the
// device from the offsets, so that the host knows no length, a compiled call serves any lengths, and a captured graph replays
// with new ones.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace jax_varlen {

struct Tile;

struct WorkList {
  int32_t* count;  // of tiles; every tile is one item of work for each head
  Tile* tiles;
};

// The work list in a workspace of 32-bit words: the count, alone in the first kWordsPerTile words, then the tiles.
constexpr int kWordsPerTile = 8;

inline WorkList WorkListIn(int32_t* workspace) {
  return {workspace, reinterpret_cast<Tile*>(workspace + kWordsPerTile)};
}

// The tiles that a batch can have at most: no sequence has more than one tile that is not full, and rows of nobody stand before
// the first and after the last sequence.
inline int64_t MaxTiles(int64_t total, int64_t batch, int tile_rows) {
  return total / tile_rows + batch + 2;
}

enum class TilesOf { kQueries, kKeys };

// Lists the tiles of `rows` rows of q or k, longest first; what a tile costs is the number of tiles of `other_rows` rows of the
// other side that it meets. Tiles of keys of one sequence stand in their order.
cudaError_t LaunchSchedule(const FwdParams& params, TilesOf side, int rows, int other_rows, const WorkList& list,
                           cudaStream_t stream);

}  // namespace jax_varlen
