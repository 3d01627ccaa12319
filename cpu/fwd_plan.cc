#include "fwd_plan.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "offsets.h"
#include "units.h"

namespace jax_varlen {

FwdPlan::FwdPlan(const FwdParams& params, const FwdKernel& kernel, int64_t num_threads) : params_(params), kernel_(kernel) {
  const int64_t rows_per_item = RowsPerItem(num_threads);
  scratch_bytes_ = kernel.scratch_bytes(params, rows_per_item);
  AddNobody(0, params.cu_seqlens_q[0]);
  for (int64_t b = 0; b < params.batch; ++b) AddSequence(b, rows_per_item);
  AddNobody(params.cu_seqlens_q[params.batch], params.total_q);
  for (Chunk& chunk : chunks_) chunk.cost = Cost(chunk);
  SortByCost(&chunks_);
  unit_begin_ = CutUnits(chunks_, params.num_kv_heads, num_threads);
}

// Many rows share the packing of a tile of keys; few keep all threads busy and the strips in the cache.
int64_t FwdPlan::RowsPerItem(int64_t num_threads) const {
  constexpr int64_t kMaxRows = 256, kMaxFloats = int64_t{1} << 17, kItemsPerThread = 8;
  const int64_t rows = params_.total_q * params_.num_heads;
  const int64_t strip = kernel_.strip_rows;
  const int64_t balanced = rows / (num_threads * kItemsPerThread);
  const int64_t cached = kMaxFloats / (params_.head_dim + params_.head_dim_v);
  return std::max<int64_t>(1, std::min({kMaxRows, balanced, cached}) / strip) * strip;
}

void FwdPlan::AddSequence(int64_t sequence, int64_t rows_per_item) {
  const int64_t used = UsedLength(params_.cu_seqlens_q, params_.seqused_q, sequence);
  const int64_t rows = used * (params_.num_heads / params_.num_kv_heads);
  for (int64_t row = 0; row < rows; row += rows_per_item)
    chunks_.push_back({sequence, row, std::min(rows, row + rows_per_item), 0});
  AddNobody(params_.cu_seqlens_q[sequence] + used, params_.cu_seqlens_q[sequence + 1]);
}

void FwdPlan::AddNobody(int64_t begin, int64_t end) {
  constexpr int64_t kRows = 1024;
  for (; begin < end; begin += kRows) chunks_.push_back({kNobody, begin, std::min(end, begin + kRows), 0});
}

double FwdPlan::Cost(const Chunk& chunk) const {
  constexpr double kPerRow = 16;  // packing q and writing out, in keys
  const double rows = static_cast<double>(chunk.row_end - chunk.row_begin);
  if (chunk.sequence == kNobody) return rows * static_cast<double>(params_.head_dim_v);
  const FwdItem item = ItemOf(chunk, 0);
  const int64_t group_size = params_.num_heads / params_.num_kv_heads;
  const int64_t shift = item.len_k - item.len_q;
  int64_t first = 0, last = item.len_k;
  if (params_.window_left >= 0) first = std::max(first, chunk.row_begin / group_size + shift - params_.window_left);
  if (params_.window_right >= 0 && params_.window_right < last)
    last = std::min(last, (chunk.row_end - 1) / group_size + shift + params_.window_right + 1);
  const double keys = static_cast<double>(std::max<int64_t>(0, last - first));
  return rows * (keys + kPerRow) * static_cast<double>(params_.head_dim + params_.head_dim_v);
}

FwdItem FwdPlan::ItemOf(const Chunk& chunk, int64_t kv_head) const {
  const int64_t b = chunk.sequence;
  return {b,
          kv_head,
          params_.cu_seqlens_q[b],
          params_.block_size > 0 ? 0 : params_.cu_seqlens_k[b],
          UsedLength(params_.cu_seqlens_q, params_.seqused_q, b),
          UsedLength(params_.cu_seqlens_k, params_.seqused_k, b),
          chunk.row_begin,
          chunk.row_end};
}

void FwdPlan::ClearNobody(const Chunk& chunk, int64_t kv_head) const {
  const int64_t element = params_.dtype == DType::kF32 ? 4 : 2;
  const int64_t group_size = params_.num_heads / params_.num_kv_heads, head = kv_head * group_size;
  const int64_t head_bytes = params_.head_dim_v * element;
  for (int64_t row = chunk.row_begin; row < chunk.row_end; ++row)
    std::memset(static_cast<char*>(params_.out) + (row * params_.num_heads + head) * head_bytes, 0, group_size * head_bytes);
  for (int64_t h = head; h < head + group_size; ++h)
    std::fill(params_.lse + h * params_.total_q + chunk.row_begin, params_.lse + h * params_.total_q + chunk.row_end,
              -std::numeric_limits<float>::infinity());
}

void FwdPlan::RunUnit(int64_t unit, char* scratch) const {
  for (int64_t i = unit_begin_[unit]; i < unit_begin_[unit + 1]; ++i) {
    const Chunk& chunk = chunks_[i / params_.num_kv_heads];
    const int64_t kv_head = i % params_.num_kv_heads;
    if (chunk.sequence == kNobody) {
      ClearNobody(chunk, kv_head);
      continue;
    }
    // Where the next unit goes to another thread, fetching its first item costs next to nothing.
    const int64_t next = std::min(i + 1, unit_begin_.back() - 1);
    const Chunk& next_chunk = chunks_[next / params_.num_kv_heads];
    const bool fetch = next_chunk.sequence != kNobody;
    const FwdItem next_item = fetch ? ItemOf(next_chunk, next % params_.num_kv_heads) : FwdItem{};
    kernel_.run(params_, ItemOf(chunk, kv_head), fetch ? &next_item : nullptr, scratch);
  }
}

}  // namespace jax_varlen
