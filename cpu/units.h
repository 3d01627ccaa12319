// Units of work of like size from pieces of any size. A piece has a `cost` of one kv head, in multiply-adds, and a number of
// `heads` that are best done together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace jax_varlen {

// Long pieces first, in buckets of a quarter of an octave: linear in the pieces, and as good as exact for balance. Pieces of
// one bucket keep their order.
template <typename Piece>
void SortByCost(std::vector<Piece>* pieces) {
  constexpr int kBuckets = 256;
  const auto bucket = [](const Piece& piece) {
    return kBuckets - 1 - std::min(static_cast<int>(4 * std::log2(1 + piece.cost)), kBuckets - 1);
  };
  std::vector<uint8_t> bucket_of(pieces->size());
  int64_t begin[kBuckets + 1] = {};
  for (size_t i = 0; i < pieces->size(); ++i) ++begin[(bucket_of[i] = static_cast<uint8_t>(bucket((*pieces)[i]))) + 1];
  for (int i = 0; i < kBuckets; ++i) begin[i + 1] += begin[i];
  std::vector<Piece> sorted(pieces->size());
  for (size_t i = 0; i < pieces->size(); ++i) sorted[begin[bucket_of[i]]++] = (*pieces)[i];
  *pieces = std::move(sorted);
}

// Every piece is num_kv_heads items, item i being head i % num_kv_heads of piece i / num_kv_heads. Unit u is the items
// result[u] .. result[u + 1]: small ones share a unit, so that claiming it costs little beside the work, and so do the heads
// that are done together.
template <typename Piece>
std::vector<int64_t> CutUnits(const std::vector<Piece>& pieces, int64_t num_kv_heads, int64_t num_threads) {
  constexpr double kUnitCost = 1e6, kUnitsPerThread = 16;
  double total = 0;
  for (const Piece& piece : pieces) total += piece.cost * static_cast<double>(num_kv_heads);
  const double quantum = std::min(kUnitCost, total / (static_cast<double>(num_threads) * kUnitsPerThread));
  std::vector<int64_t> unit_begin{0};
  double sum = 0;
  int64_t item = 0;
  for (const Piece& piece : pieces)
    for (int64_t h = 0; h < num_kv_heads; ++h) {
      ++item;
      sum += piece.cost;
      if (sum < quantum || ((h + 1) % piece.heads != 0 && h + 1 < num_kv_heads)) continue;
      unit_begin.push_back(item);
      sum = 0;
    }
  if (unit_begin.back() < item) unit_begin.push_back(item);
  return unit_begin;
}

}  // namespace jax_varlen
