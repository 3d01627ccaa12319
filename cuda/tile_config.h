// The sizes of tiles, by head_dim.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_varlen {

// Beside the tiles, a CTA has its entry of the work list in shared memory, and what aligns the tiles to their rows.
constexpr int kStaticSmemBytes = 512;

// A work item is kTileM rows of q of one head. Every warp owns 16 rows of each of kAtoms atoms; a tile of no more than
// kRowsPerAtom rows runs with one atom, so that the tail of a sequence costs half.
template <int HeadDim, int TileN, int Warps, int Atoms, int Stages, int MinCtas, bool QInRegisters>
struct TileConfig {
  static constexpr int kHeadDim = HeadDim;  // of q, k and v; narrower ones are filled with zeros
  static constexpr int kTileN = TileN;      // keys per step
  static constexpr int kThreads = 32 * Warps;
  static constexpr int kAtoms = Atoms;
  static constexpr int kRowsPerAtom = 16 * Warps;
  static constexpr int kTileM = kRowsPerAtom * Atoms;
  static constexpr int kStages = Stages;    // tiles of K and V in shared memory
  static constexpr int kMinCtas = MinCtas;  // per multiprocessor, what the registers must allow
  static constexpr bool kQInRegisters = QInRegisters;
  static constexpr int kSmemBytes = 2 * HeadDim * (kTileM + 2 * Stages * TileN);
};

// Two atoms a warp halve what each product reads of K and V from shared memory, which bounds these kernels; at head_dim 256
// the accumulators of two atoms do not fit into registers. All but the wide one fit into the 99 KB that every device of
// compute capability 8.x and 12.x has; docs/tuning.md has the figures behind each choice.
using FwdTile64 = TileConfig<64, 64, 4, 2, 2, 2, true>;
using FwdTile128 = TileConfig<128, 64, 4, 2, 2, 2, false>;
using FwdTile256 = TileConfig<256, 64, 4, 1, 1, 2, false>;
using FwdTile256Wide = TileConfig<256, 64, 8, 1, 2, 1, false>;  // 192 KB, on devices that have them

// The decode kernel: kKeys keys a step, kStages of them in shared memory. All fit into 99 KB, and twice into Hopper's.
constexpr int kDecodeCtas = 2;  // per multiprocessor

template <int HeadDim, int Keys, int Stages, int ElementBytes>
struct DecodeTileConfig {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kKeys = Keys;
  static constexpr int kStages = Stages;
  static constexpr int kLookUps = 2 * (Stages - 1);  // a step is looked up Stages - 1 steps before it is copied
  static constexpr int kThreads = 128;
  static constexpr int kSmemBytes = 2 * ElementBytes * HeadDim * Keys * Stages;
};

// By the bytes of an element of the pools.
template <int ElementBytes>
struct DecodeTiles {
  using Of64 = DecodeTileConfig<64, 64, 5, 2>;
  using Of128 = DecodeTileConfig<128, 64, 3, 2>;
  using Of256 = DecodeTileConfig<256, 32, 3, 2>;
};

template <>
struct DecodeTiles<1> {
  using Of64 = DecodeTileConfig<64, 64, 6, 1>;
  using Of128 = DecodeTileConfig<128, 64, 5, 1>;
  using Of256 = DecodeTileConfig<256, 64, 3, 1>;
};

// Which of them takes a call, by its head_dim, and the keys of its steps.
constexpr int DecodeHeadDim(int64_t head_dim, int64_t head_dim_v) {
  const int64_t widest = head_dim > head_dim_v ? head_dim : head_dim_v;
  return widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
}

template <typename Tiles>
constexpr int DecodeStepOf(int decode_head_dim) {
  return decode_head_dim == 64 ? Tiles::Of64::kKeys : decode_head_dim == 128 ? Tiles::Of128::kKeys : Tiles::Of256::kKeys;
}

inline int DecodeStep(const FwdParams& params) {
  const int head_dim = DecodeHeadDim(params.head_dim, params.head_dim_v);
  return params.kv_dtype == DType::kE4M3 ? DecodeStepOf<DecodeTiles<1>>(head_dim) : DecodeStepOf<DecodeTiles<2>>(head_dim);
}

// The backward pass: a work item is kTileN keys of one kv head, which meet kTileM rows of q a step. Half of the warps hold dv,
// half dk, each kAtoms blocks of 16 keys.
template <int HeadDim, int TileM, int TileN, int Atoms, int Stages, bool Prefetch>
struct BwdTileConfig {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kTileM = TileM;
  static constexpr int kTileN = TileN;
  static constexpr int kAtoms = Atoms;
  static constexpr int kStages = Stages;  // of tiles of q and dout in shared memory
  static constexpr bool kPrefetch = Prefetch;
  static constexpr int kGroupThreads = 32 * TileN / (16 * Atoms);
  static constexpr int kThreads = 2 * kGroupThreads;
  static constexpr int kQWarps = TileM / 32;  // along the rows of dq, 32 rows each; the others share its columns
  static constexpr int kQColumns = HeadDim / (kThreads / 32 / kQWarps);
  static constexpr int kSmemBytes = 4 * HeadDim * TileN + Stages * (4 * HeadDim * TileM + 8 * TileM) + 6 * TileM * TileN;
};

using BwdTile64 = BwdTileConfig<64, 128, 128, 2, 2, false>;
using BwdTile128 = BwdTileConfig<128, 64, 128, 2, 2, false>;
using BwdTile256 = BwdTileConfig<256, 64, 64, 1, 2, false>;
// For devices with less shared memory than Hopper: they need no more than the 99 KB of compute capability 8.6, 8.9 and 12.x.
using BwdTile64Small = BwdTileConfig<64, 64, 64, 1, 2, true>;
using BwdTile128Small = BwdTileConfig<128, 64, 64, 1, 1, true>;
using BwdTile256Small = BwdTileConfig<256, 32, 32, 1, 1, false>;

}  // namespace jax_varlen
