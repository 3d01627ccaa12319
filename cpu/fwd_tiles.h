// Walks over the keys of an item, tile by tile, and asks for what comes next.
#pragma once

#include "fwd_fetch.h"
#include "fwd_strip.h"

namespace jax_varlen {
namespace {

// While the tile that ends at key `end` is worked on: the next one, whose keys are found with it, or what follows the last.
template <typename Engine, int64_t kTile>
void PlanFetches(const FwdParams& p, const FwdItem& item, const FwdItem* next, int64_t end, int64_t key_end, KeyRows* keys,
                 Fetcher* fetcher) {
  constexpr int64_t kElement = sizeof(typename Engine::Data::T), kKvElement = sizeof(typename Engine::KvData::T);
  fetcher->Clear();
  if (end < key_end) return FetchKeys(p, item, end, 0, Min(key_end - end, kTile), kKvElement, keys, fetcher);
  FetchRows(p, item, p.out, p.head_dim_v, kElement, fetcher);
  if (next == nullptr) return;
  const int64_t token = next->row_begin / (p.num_heads / p.num_kv_heads);
  int64_t first = next->key_begin;
  if (p.window_left >= 0) first = Max(first, token + next->len_k - next->len_q - p.window_left);
  FetchRows(p, *next, p.q, p.head_dim, kElement, fetcher);
  FetchKeys(p, *next, first, 0, Min(next->key_end - first, kTile), kKvElement, keys, fetcher);
}

// Calls step(tile, begin, end, keys, fetcher) for the tiles, cut at multiples of kTile, that hold keys key_begin .. key_end of
// the sequence: those of a tile are its keys begin .. end.
template <typename Engine, int64_t kTile, typename Step>
void ForEachTile(const FwdParams& p, const FwdItem& item, const FwdItem* next, int64_t key_begin, int64_t key_end,
                 const Step& step) {
  KeyRows tile_keys[2];
  KeyRows *keys = tile_keys, *next_keys = tile_keys + 1;
  Fetcher fetcher;
  const int64_t first_tile = key_begin / kTile * kTile;
  FindKeys(p, item, first_tile, key_begin - first_tile, Min(key_end - first_tile, kTile), keys);
  for (int64_t tile = first_tile; tile < key_end; tile += kTile) {
    PlanFetches<Engine, kTile>(p, item, next, tile + kTile, key_end, next_keys, &fetcher);
    step(tile, Max(key_begin - tile, int64_t{0}), Min(key_end - tile, kTile), *keys, &fetcher);
    Swap(&keys, &next_keys);
  }
}

}  // namespace
}  // namespace jax_varlen
