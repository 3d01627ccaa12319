#include "fwd_plan.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "offsets.h"
#include "units.h"

namespace jax_varlen {
namespace {

constexpr int64_t kKeyStep = 96;    // whole tiles, packed or not
constexpr int64_t kMaxSplits = 64;  // so that states are few beside the keys

int64_t Bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kE4M3 ? 1 : 2;
}

int64_t CeilDiv(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

FwdPlan::FwdPlan(const FwdParams& params, const FwdKernel& kernel, int64_t num_threads)
    : params_(params), kernel_(kernel), group_size_(params.num_heads / params.num_kv_heads) {
  const int64_t rows_per_item = RowsPerItem(num_threads);
  scratch_bytes_ = kernel.scratch_bytes(params, rows_per_item);
  AddNobody(0, params.cu_seqlens_q[0]);
  for (int64_t b = 0; b < params.batch; ++b) AddSequence(b, rows_per_item);
  AddNobody(params.cu_seqlens_q[params.batch], params.total_q);
  SortByCost(&chunks_);
  unit_begin_ = CutUnits(chunks_, params.num_kv_heads, num_threads);
  states_.reset(new float[num_states_]);
  finished_.reset(new int32_t[num_finished_]());
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

// How many keys an item of few rows takes: those that keep a thread busy for some 100 microseconds. It depends on shapes and on
// the sequence itself, so that no other sequence changes the bits of this one.
int64_t FwdPlan::KeysPerSplit(const FwdItem& s) const {
  constexpr int64_t kMaxRows = 64, kDecodeBytes = 3 << 19, kProducts = 1 << 22;
  const int64_t dims = params_.head_dim + params_.head_dim_v;
  if (s.decode) return CeilDiv(kDecodeBytes, std::min(params_.num_kv_heads, kMaxDecodeHeads) * dims * Bytes(params_.kv_dtype));
  if (s.row_end == 0 || s.row_end > kMaxRows) return std::numeric_limits<int32_t>::max();
  return CeilDiv(kProducts, dims * s.row_end);
}

void FwdPlan::AddSequence(int64_t sequence, int64_t rows_per_item) {
  const FwdItem s = SequenceOf(sequence);
  Chunk chunk{};
  chunk.sequence = sequence;
  chunk.heads = s.decode ? kMaxDecodeHeads : 1;
  const int64_t first_key = FirstKey(s, 0) / kKeyStep * kKeyStep, keys = s.len_k - first_key;
  const int64_t wanted = std::clamp<int64_t>(keys / KeysPerSplit(s), 1, kMaxSplits);
  const int64_t keys_per_split = CeilDiv(std::max<int64_t>(1, keys), wanted * kKeyStep) * kKeyStep;
  chunk.num_splits = std::max<int64_t>(1, CeilDiv(keys, keys_per_split));
  for (; chunk.row_begin < s.row_end; chunk.row_begin += rows_per_item) {
    chunk.row_end = std::min(s.row_end, chunk.row_begin + rows_per_item);
    chunk.first_state = num_states_;
    chunk.first_finished = num_finished_;
    for (chunk.split = 0; chunk.split < chunk.num_splits; ++chunk.split) {
      chunk.key_begin = first_key + chunk.split * keys_per_split;
      chunk.key_end = std::min(s.len_k, chunk.key_begin + keys_per_split);
      chunk.cost = Cost(s, chunk);
      chunks_.push_back(chunk);
    }
    if (chunk.num_splits == 1) continue;
    num_states_ += params_.num_kv_heads * chunk.num_splits * StateFloats(chunk);
    num_finished_ += params_.num_kv_heads;
  }
  AddNobody(s.first_q + s.len_q, params_.cu_seqlens_q[sequence + 1]);
}

void FwdPlan::AddNobody(int64_t begin, int64_t end) {
  constexpr int64_t kRows = 1024;
  for (; begin < end; begin += kRows) {
    Chunk chunk{};
    chunk.sequence = kNobody;
    chunk.row_begin = begin;
    chunk.row_end = std::min(end, begin + kRows);
    chunk.heads = 1;
    chunk.cost = static_cast<double>((chunk.row_end - begin) * params_.head_dim_v);
    chunks_.push_back(chunk);
  }
}

int64_t FwdPlan::FirstKey(const FwdItem& s, int64_t token) const {
  if (params_.window_left < 0) return 0;
  return std::min(s.len_k, std::max<int64_t>(0, token + s.len_k - s.len_q - params_.window_left));
}

double FwdPlan::Cost(const FwdItem& s, const Chunk& chunk) const {
  constexpr int64_t kPerRow = 16;  // packing q and writing out, in keys
  const int64_t rows = std::max(chunk.row_end - chunk.row_begin, kernel_.lanes);
  const int64_t first = std::max(chunk.key_begin, FirstKey(s, chunk.row_begin / group_size_));
  int64_t last = chunk.key_end;
  if (params_.window_right >= 0 && params_.window_right < last)
    last = std::min(last, (chunk.row_end - 1) / group_size_ + s.len_k - s.len_q + params_.window_right + 1);
  const double keys = static_cast<double>(std::max<int64_t>(0, last - first) + kPerRow);
  return static_cast<double>(rows) * keys * static_cast<double>(params_.head_dim + params_.head_dim_v);
}

int64_t FwdPlan::StateFloats(const Chunk& chunk) const {
  return CeilDiv(chunk.row_end - chunk.row_begin, kernel_.lanes) * kernel_.lanes * (2 + params_.head_dim_v);
}

// All rows and keys of one kv head.
FwdItem FwdPlan::SequenceOf(int64_t sequence) const {
  FwdItem s{};
  s.sequence = sequence;
  s.num_heads = 1;
  s.first_q = params_.cu_seqlens_q[sequence];
  s.first_k = params_.block_size > 0 ? 0 : params_.cu_seqlens_k[sequence];
  s.len_q = UsedLength(params_.cu_seqlens_q, params_.seqused_q, sequence);
  s.len_k = s.key_end = UsedLength(params_.cu_seqlens_k, params_.seqused_k, sequence);
  s.row_end = s.len_q * group_size_;
  s.decode = s.row_end <= kernel_.decode_rows && s.len_k > s.row_end;
  return s;
}

// Item i, and with it those behind it, before item `end`, that one call takes.
FwdItem FwdPlan::ItemAt(int64_t i, int64_t end) const {
  const Chunk& chunk = chunks_[i / params_.num_kv_heads];
  FwdItem item = SequenceOf(chunk.sequence);
  item.kv_head = i % params_.num_kv_heads;
  item.num_heads = std::min({chunk.heads, end - i, params_.num_kv_heads - item.kv_head});
  item.key_begin = chunk.key_begin;
  item.key_end = chunk.key_end;
  item.row_begin = chunk.row_begin;
  item.row_end = chunk.row_end;
  if (chunk.num_splits > 1)
    item.splits = {chunk.split, chunk.num_splits, StateFloats(chunk), states_.get() + chunk.first_state,
                   finished_.get() + chunk.first_finished};
  return item;
}

void FwdPlan::ClearNobody(const Chunk& chunk, int64_t kv_head) const {
  const int64_t head = kv_head * group_size_, head_bytes = params_.head_dim_v * Bytes(params_.dtype);
  for (int64_t row = chunk.row_begin; row < chunk.row_end; ++row)
    std::memset(static_cast<char*>(params_.out) + (row * params_.num_heads + head) * head_bytes, 0, group_size_ * head_bytes);
  for (int64_t h = head; h < head + group_size_; ++h)
    std::fill(params_.lse + h * params_.total_q + chunk.row_begin, params_.lse + h * params_.total_q + chunk.row_end,
              -std::numeric_limits<float>::infinity());
}

void FwdPlan::RunUnit(int64_t unit, char* scratch) const {
  const int64_t end = unit_begin_[unit + 1];
  for (int64_t i = unit_begin_[unit]; i < end;) {
    const Chunk& chunk = chunks_[i / params_.num_kv_heads];
    if (chunk.sequence == kNobody) {
      ClearNobody(chunk, i++ % params_.num_kv_heads);
      continue;
    }
    const FwdItem item = ItemAt(i, end);
    i += item.num_heads;
    // Where the next unit goes to another thread, fetching its first item costs next to nothing.
    const int64_t next = std::min(i, unit_begin_.back() - 1);
    const bool fetch = chunks_[next / params_.num_kv_heads].sequence != kNobody;
    const FwdItem next_item = fetch ? ItemAt(next, std::max(next + 1, end)) : FwdItem{};
    kernel_.run(params_, item, fetch ? &next_item : nullptr, scratch);
  }
}

}  // namespace jax_varlen
