// The work list: which tiles of q (forward) or of k (backward) there are, in the order in which they start. It is made on the
// device from the offsets, so that the host knows no length, a compiled call serves any lengths, and a captured graph replays
// with new ones.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace jax_varlen {

struct Tile;
struct DecodeTile;

struct WorkList {
  int32_t* count;             // of tiles; every tile is one item of work for each head
  unsigned long long* taken;  // how many items CTAs have taken beyond their first, where they take them one by one
  Tile* tiles;
};

// The work list in a workspace of 32-bit words: a head of kWordsPerTile words, then the tiles.
constexpr int kWordsPerTile = 8;

inline WorkList WorkListIn(int32_t* workspace) {
  return {workspace, reinterpret_cast<unsigned long long*>(workspace + 2), reinterpret_cast<Tile*>(workspace + kWordsPerTile)};
}

constexpr int kDecodeRows = 64;  // of a tile of the decode kernel

// What stands before the decode tiles. The steps of keys of all tiles and kv heads, `units` in all, are cut into shares of
// share_units, the first `longer` of them one unit longer. Where a call is batch_invariant, a tile and kv head is one unit with
// all its steps, and so is never divided.
struct DecodeHead {
  int32_t count;   // of tiles
  int32_t shares;  // none without a tile
  int64_t units;
  int64_t share_units;
  int64_t longer;
};

struct DecodeList {
  DecodeHead* head;
  int* arrived;  // kMaxArrived zeros: see Partials
  DecodeTile* tiles;
};

constexpr int kMaxShares = 384;  // CTAs of the decode kernel, whatever the device
constexpr int kMaxArrived = 2 * kMaxShares;

constexpr int kWordsPerDecodeTile = 12;

// The head takes the room of a tile.
inline DecodeList DecodeListIn(int32_t* workspace) {
  int32_t* const arrived = workspace + kWordsPerDecodeTile;
  return {reinterpret_cast<DecodeHead*>(workspace), arrived, reinterpret_cast<DecodeTile*>(arrived + kMaxArrived)};
}

// Whether the decode kernel takes all sequences of a call: their rows are few however they lie, or it alone reads the pools.
inline bool IsAllDecode(const FwdParams& params) {
  if (params.kv_dtype == DType::kE4M3) return true;
  if (params.batch_invariant) return false;
  return params.total_q <= 2 * params.batch || params.total_q * params.group_size <= kDecodeRows;
}

// The decode tiles that a batch can have at most: of each sequence one that is not full for its rows, and one for those that do
// not count.
inline int64_t MaxDecodeTiles(const FwdParams& params) {
  return params.total_q * params.group_size / kDecodeRows + 2 * (params.batch + 1);
}

// What a forward call has beside its arguments: all but the first list of a paged call alone.
struct FwdWorkspace {
  WorkList list;
  DecodeList decode;
  int most_shares;
};

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

// The work lists of a paged call: sequences with few rows of q go to the decode kernel, `step` keys a step, in at most
// `most_shares` shares; the others, and rows that see nothing, are listed as above in tiles of `rows` rows. Where IsAllDecode,
// the first list is left alone.
cudaError_t LaunchPagedSchedule(const FwdParams& params, int rows, int other_rows, const WorkList& list, int step,
                                int most_shares, const DecodeList& decode, cudaStream_t stream);

}  // namespace jax_varlen
