// The side of Hopper's forward kernel that moves data: its tiles, the rings in shared memory and their barriers, the thread
// that fetches items and the warp that copies q, K and V.
#pragma once

#include "params.h"
#include "ptx.cuh"
#include "ptx_sm90.cuh"
#include "schedule.h"
#include "sequence.cuh"
#include "tensor_map.h"

namespace jax_varlen {

// What the copy engine's swizzle wants of a tile's address.
constexpr uint32_t kTileAlignment = 1024;

template <int HeadDim, int TileN, int Groups, int Stages, int QStages>
struct Sm90TileConfig {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kTileN = TileN;      // keys
  static constexpr int kGroups = Groups;    // warpgroups with 64 rows of q each
  static constexpr int kStages = Stages;    // tiles of K, and as many of V, in shared memory
  static constexpr int kQStages = QStages;  // tiles of q
  static constexpr int kTileM = 64 * Groups;
  static constexpr int kThreads = 128 * (1 + Groups);
  static constexpr int kConsumers = 128 * Groups;
  static constexpr int kProducerRegisters = Groups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = Groups == 2 ? 232 : 160;
  static constexpr int kBoxes = (HeadDim + kBoxColumns - 1) / kBoxColumns;
  static constexpr uint32_t kRowBytes = 2 * kBoxColumns;
  static constexpr uint32_t kGroupQBytes = 64 * kBoxes * kRowBytes;  // of one warpgroup: (boxes, 64 rows, 128 bytes)
  static constexpr uint32_t kTileQBytes = Groups * kGroupQBytes;
  static constexpr uint32_t kTileKBytes = TileN * kBoxes * kRowBytes;  // (boxes, TileN rows, 128 bytes)
  static constexpr int kSmemBytes = QStages * kTileQBytes + 2 * Stages * kTileKBytes + kTileAlignment;
};

using Sm90Tile64 = Sm90TileConfig<64, 96, 3, 4, 2>;
using Sm90Tile64Causal = Sm90TileConfig<64, 128, 2, 4, 2>;
using Sm90Tile96 = Sm90TileConfig<96, 128, 2, 2, 2>;
using Sm90Tile128 = Sm90TileConfig<128, 128, 2, 2, 2>;
using Sm90Tile192 = Sm90TileConfig<192, 112, 2, 2, 1>;
using Sm90Tile256 = Sm90TileConfig<256, 80, 2, 2, 1>;

struct Sm90Maps {
  CUtensorMap q, k, v;
  int rows_k;  // of a box of keys
};

constexpr int kSm90Slots = 4;  // items that are known at a time

// An item: a tile of q of one head, and the tiles of keys that it meets.
struct Sm90Item {
  Tile tile;
  int head;        // none where negative
  KeyRange any;    // keys that any of its rows sees
  KeyRange tiles;  // tiles of keys with such keys
  KeyRange plain;  // those of them that all rows see whole
};

template <typename Config>
struct Sm90Barriers {
  uint64_t item_full[kSm90Slots], item_empty[kSm90Slots];
  uint64_t q_full[Config::kQStages], q_empty[Config::kQStages];
  uint64_t k_full[Config::kStages], k_empty[Config::kStages];
  uint64_t v_full[Config::kStages], v_empty[Config::kStages];
};

// Named barriers: one for all consumers, and for each warpgroup the one at which it waits for its turn.
enum NamedBarrier { kAllConsumers = 1, kFirstTurn = 2 };

// A place in a ring of kSize, and the parity of its round.
template <int kSize>
struct RingPlace {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Waits until a place of a ring is full; a producer waits for `empty` with the other parity.
template <int kSize>
__device__ __forceinline__ void WaitFull(uint64_t (&full)[kSize], const RingPlace<kSize>& place) {
  ptx::WaitBarrier(ptx::SmemAddress(&full[place.index]), place.parity);
}

template <int kSize>
__device__ __forceinline__ void WaitEmpty(uint64_t (&empty)[kSize], const RingPlace<kSize>& place) {
  ptx::WaitBarrier(ptx::SmemAddress(&empty[place.index]), place.parity ^ 1);
}

// The item at a place of the list, where the heads of a tile stand side by side.
template <typename Config>
__device__ __forceinline__ Sm90Item ItemAt(const FwdParams& p, const WorkList& list, uint32_t place) {
  constexpr int kN = Config::kTileN;
  const uint32_t heads = static_cast<uint32_t>(p.num_heads);
  Sm90Item item;
  item.tile = list.tiles[place / heads];
  item.head = static_cast<int>(place % heads);
  const KeyRange any = VisibleToAny(p, item.tile, Config::kTileM), all = VisibleToAll(p, item.tile, Config::kTileM);
  item.any = any;
  item.tiles = any.lo < any.hi ? KeyRange{any.lo / kN, (any.hi - 1) / kN + 1} : KeyRange{0, 0};
  item.plain = {(all.lo + kN - 1) / kN, all.hi / kN};
  return item;
}

// One thread. The atomic for an item is under way while the tile of the one before is read.
template <typename Config>
__device__ __forceinline__ void FetchItems(const FwdParams& p, const WorkList& list, uint64_t (&full)[kSm90Slots],
                                           uint64_t (&empty)[kSm90Slots], Sm90Item* slots) {
  const uint32_t items = *list.count * static_cast<uint32_t>(p.num_heads);
  RingPlace<kSm90Slots> slot;
  for (uint32_t place = blockIdx.x;; slot.Advance()) {
    const uint32_t next = gridDim.x + static_cast<uint32_t>(atomicAdd(list.taken, 1ull));
    const bool there = place < items;
    Sm90Item item;
    if (there) item = ItemAt<Config>(p, list, place);
    WaitEmpty(empty, slot);
    if (there) {
      slots[slot.index] = item;
    } else {
      slots[slot.index].head = -1;
    }
    ptx::Arrive(ptx::SmemAddress(&full[slot.index]));
    if (!there) return;
    place = next;
  }
}

// One warp: q of each item that sees a key, and K and V of the keys that it sees, from the last tile to the first.
template <typename Config, bool kPaged>
__device__ __forceinline__ void Copy(const FwdParams& p, const Sm90Maps& maps, uint32_t smem, Sm90Barriers<Config>& barriers,
                                     const Sm90Item* slots) {
  constexpr int kTileN = Config::kTileN, kBoxes = Config::kBoxes, kStages = Config::kStages;
  const uint32_t smem_k = smem + Config::kQStages * Config::kTileQBytes, smem_v = smem_k + kStages * Config::kTileKBytes;
  const int lane = threadIdx.x % 32;
  RingPlace<kSm90Slots> slot;
  RingPlace<Config::kQStages> q_stage;
  RingPlace<kStages> stage;
  for (;; slot.Advance()) {
    WaitFull(barriers.item_full, slot);
    const Sm90Item& item = slots[slot.index];
    const int head = item.head, q_row = item.tile.q_begin + item.tile.row, k_begin = item.tile.k_begin;
    const int64_t table_row = item.tile.sequence * p.max_blocks;
    const KeyRange any = item.any, tiles = item.tiles;
    __syncwarp();
    if (lane == 0) ptx::Arrive(ptx::SmemAddress(&barriers.item_empty[slot.index]));
    if (head < 0) return;
    if (tiles.lo >= tiles.hi) continue;
    const int kv_head = head / p.group_size;

    WaitEmpty(barriers.q_empty, q_stage);
    const uint32_t q_full = ptx::SmemAddress(&barriers.q_full[q_stage.index]);
    if (lane == 0) ptx::ArriveExpect(q_full, Config::kTileQBytes);
    __syncwarp();
    if (lane < Config::kGroups * kBoxes) {
      const int group = lane / kBoxes, box = lane % kBoxes;
      ptx::CopyBox3(smem + q_stage.index * Config::kTileQBytes + group * Config::kGroupQBytes + box * 64 * Config::kRowBytes,
                    &maps.q, q_full, box * kBoxColumns, head, q_row + 64 * group);
    }
    q_stage.Advance();

    for (int n = tiles.hi - 1; n >= tiles.lo; --n, stage.Advance()) {
      const auto copy = [&](const CUtensorMap* map, uint64_t (&full)[kStages], uint64_t (&empty)[kStages], uint32_t to) {
        WaitEmpty(empty, stage);
        const uint32_t barrier = ptx::SmemAddress(&full[stage.index]);
        if (lane == 0) ptx::ArriveExpect(barrier, Config::kTileKBytes);
        __syncwarp();
        to += stage.index * Config::kTileKBytes;
        if constexpr (!kPaged) {
          if (lane < kBoxes)
            ptx::CopyBox3(to + lane * kTileN * Config::kRowBytes, map, barrier, lane * kBoxColumns, kv_head,
                          k_begin + n * kTileN);
        } else {
          // Boxes of rows of one block. Entries of keys that are not seen are not read, and a box outside the pool is zeros.
          const int rows = maps.rows_k;
          for (int i = lane; i < kTileN / rows * kBoxes; i += 32) {
            const int box = i % kBoxes, row = i / kBoxes * rows, key = n * kTileN + row;
            const uint32_t block_size = static_cast<uint32_t>(p.block_size), column = static_cast<uint32_t>(key) / block_size;
            int id = -1;
            if (key < any.hi && key + rows > any.lo) id = p.block_table[table_row + column];
            const bool valid = static_cast<uint32_t>(id) < static_cast<uint32_t>(p.num_blocks);
            const int pool_row = id * static_cast<int>(block_size) + static_cast<int>(key - column * block_size);
            ptx::CopyBox3(to + (box * kTileN + row) * Config::kRowBytes, map, barrier, box * kBoxColumns, kv_head,
                          valid ? pool_row : static_cast<int>(p.total_k));
          }
        }
      };
      copy(&maps.k, barriers.k_full, barriers.k_empty, smem_k);
      copy(&maps.v, barriers.v_full, barriers.v_empty, smem_v);
    }
  }
}

}  // namespace jax_varlen
