// The sizes of the forward tiles, by head_dim.
#pragma once

namespace jax_varlen {

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

}  // namespace jax_varlen
