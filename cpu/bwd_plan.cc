#include "bwd_plan.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "offsets.h"
#include "units.h"

namespace jax_varlen {
namespace {

// A tile of the kernels takes 48 keys. Many keys share the packing of a strip; few stay in the cache with their gradients, and
// keep 16 threads busy.
int64_t KeysPerItem(const FwdParams& p) {
  constexpr int64_t kStep = 96, kMaxFloats = 3 << 15, kItems = 64;
  const int64_t cached = kMaxFloats / (p.head_dim + p.head_dim_v);
  const int64_t balanced = p.total_k * p.num_kv_heads / kItems;
  return std::max<int64_t>(1, std::min(cached, balanced) / kStep) * kStep;
}

void ClearHeads(void* array, int64_t row, int64_t heads, int64_t first_head, int64_t num_heads, int64_t head_bytes) {
  std::memset(static_cast<char*>(array) + (row * heads + first_head) * head_bytes, 0, num_heads * head_bytes);
}

}  // namespace

void WaitForTurn(const Turns& turns, int64_t strip, int64_t wanted) {
  while (__atomic_load_n(turns.done + strip, __ATOMIC_ACQUIRE) < wanted) {
    if (__atomic_load_n(turns.abandoned, __ATOMIC_RELAXED) != 0) return;
    std::this_thread::yield();
  }
}

void PassTurn(const Turns& turns, int64_t strip) {
  __atomic_fetch_add(turns.done + strip, 1, __ATOMIC_RELEASE);
}

void BwdPlan::Abandon() {
  __atomic_store_n(&abandoned_, 1, __ATOMIC_RELAXED);
}

BwdPlan::BwdPlan(const BwdParams& params, const BwdKernel& kernel, int64_t num_threads)
    : params_(params),
      kernel_(kernel),
      group_size_(params.fwd.num_heads / params.fwd.num_kv_heads),
      element_(params.fwd.dtype == DType::kF32 ? 4 : 2),
      keys_per_item_(KeysPerItem(params.fwd)) {
  const FwdParams& p = params.fwd;
  AddNobody(kRowsOfNobody, 0, p.cu_seqlens_q[0]);
  AddNobody(kKeysOfNobody, 0, p.cu_seqlens_k[0]);
  for (int64_t b = 0; b < p.batch; ++b) AddSequence(b);
  AddNobody(kRowsOfNobody, p.cu_seqlens_q[p.batch], p.total_q);
  AddNobody(kKeysOfNobody, p.cu_seqlens_k[p.batch], p.total_k);
  SortByCost(&pieces_);
  unit_begin_ = CutUnits(pieces_, p.num_kv_heads, num_threads);
  int64_t longest = 0;
  for (const Piece& piece : pieces_)
    if (piece.sequence >= 0) longest = std::max(longest, piece.end - piece.begin);
  scratch_bytes_ = kernel.scratch_bytes(p, longest);
  if (p.dtype != DType::kF32 && !turns_.empty()) sum_.reset(new float[p.total_q * p.num_heads * p.head_dim]);
}

void BwdPlan::AddNobody(int64_t whose, int64_t begin, int64_t end) {
  constexpr int64_t kRows = 1024;
  const double row_cost = static_cast<double>(params_.fwd.head_dim + params_.fwd.head_dim_v);
  for (; begin < end; begin += kRows) {
    const int64_t piece_end = std::min(end, begin + kRows);
    pieces_.push_back({whose, begin, piece_end, row_cost * static_cast<double>(piece_end - begin)});
  }
}

void BwdPlan::AddSequence(int64_t sequence) {
  const FwdParams& p = params_.fwd;
  const FwdItem s = SequenceOf(sequence, 0);
  AddNobody(kRowsOfNobody, s.first_q + s.len_q, p.cu_seqlens_q[sequence + 1]);
  AddNobody(kKeysOfNobody, s.first_k + s.len_k, p.cu_seqlens_k[sequence + 1]);
  turns_begin_.push_back(static_cast<int64_t>(turns_.size()));
  if (s.len_q == 0 && s.len_k == 0) return;
  if (s.len_k > keys_per_item_) {
    const int64_t strips = (s.row_end + kernel_.strip_rows - 1) / kernel_.strip_rows;
    turns_.resize(turns_.size() + strips * p.num_kv_heads);
  }
  int64_t begin = 0;
  double cost = 0;
  do {
    Piece piece{sequence, begin, std::min(s.len_k, begin + keys_per_item_), 0};
    // Never more than that of earlier keys: sorting then keeps the order in which turns are taken.
    cost = piece.cost = begin == 0 ? Cost(piece) : std::min(cost, Cost(piece));
    pieces_.push_back(piece);
    begin = piece.end;
  } while (begin < s.len_k);
}

double BwdPlan::Cost(const Piece& piece) const {
  constexpr double kPerRow = 16, kPerKey = 8;  // packing and writing out, in keys and in rows
  const Range rows = RowsThatSee(SequenceOf(piece.sequence, 0), piece.begin, piece.end);
  const double num_rows = static_cast<double>(rows.end - rows.begin), keys = static_cast<double>(piece.end - piece.begin);
  const double dims = static_cast<double>(params_.fwd.head_dim + params_.fwd.head_dim_v);
  return 2.5 * dims * (num_rows * (keys + kPerRow) + keys * kPerKey);
}

// The whole sequence, as the forward pass would name it.
FwdItem BwdPlan::SequenceOf(int64_t sequence, int64_t kv_head) const {
  const FwdParams& p = params_.fwd;
  FwdItem s{};
  s.sequence = sequence;
  s.kv_head = kv_head;
  s.num_heads = 1;
  s.first_q = p.cu_seqlens_q[sequence];
  s.first_k = p.cu_seqlens_k[sequence];
  s.len_q = UsedLength(p.cu_seqlens_q, p.seqused_q, sequence);
  s.len_k = s.key_end = UsedLength(p.cu_seqlens_k, p.seqused_k, sequence);
  s.row_end = s.len_q * group_size_;
  return s;
}

// The tokens that see one of the keys lie together, because a token's window moves on by one from its neighbour's.
BwdPlan::Range BwdPlan::RowsThatSee(const FwdItem& s, int64_t key_begin, int64_t key_end) const {
  const FwdParams& p = params_.fwd;
  if (key_begin == key_end) return {0, 0};
  const int64_t shift = s.len_k - s.len_q;  // token t stands at key t + shift
  int64_t first = 0, end = s.len_q;
  if (p.window_right >= 0) first = std::max(first, key_begin - std::min(p.window_right, s.len_q + s.len_k) - shift);
  if (p.window_left >= 0) end = std::min(end, key_end + std::min(p.window_left, s.len_q + s.len_k) - shift);
  if (first >= end) return {0, 0};
  const int64_t strip = kernel_.strip_rows;
  return {first * group_size_ / strip * strip, std::min(s.row_end, (end * group_size_ + strip - 1) / strip * strip)};
}

BwdItem BwdPlan::ItemOf(const Piece& piece, int64_t kv_head) {
  FwdItem rows = SequenceOf(piece.sequence, kv_head);
  const int64_t strips = (rows.row_end + kernel_.strip_rows - 1) / kernel_.strip_rows;
  const Range seen = RowsThatSee(rows, piece.begin, piece.end);
  rows.row_begin = seen.begin;
  rows.row_end = seen.end;
  int32_t* turns = turns_.data() + turns_begin_[piece.sequence] + kv_head * strips;
  float* sum = params_.fwd.dtype == DType::kF32 ? static_cast<float*>(params_.dq) : sum_.get();
  return {rows, piece.begin, piece.end, keys_per_item_, {turns, sum, &abandoned_}};
}

void BwdPlan::ClearRowsWithoutKeys(const FwdItem& s) const {
  const Range seen = RowsThatSee(s, 0, s.len_k);
  const auto clear = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      ClearHeads(params_.dq, s.first_q + row / group_size_, params_.fwd.num_heads, s.kv_head * group_size_ + row % group_size_,
                 1, params_.fwd.head_dim * element_);
  };
  clear(0, seen.begin);
  clear(seen.end, s.row_end);
}

void BwdPlan::RunItem(const Piece& piece, int64_t kv_head, char* scratch) {
  const FwdParams& p = params_.fwd;
  if (piece.sequence == kRowsOfNobody) {
    for (int64_t row = piece.begin; row < piece.end; ++row)
      ClearHeads(params_.dq, row, p.num_heads, kv_head * group_size_, group_size_, p.head_dim * element_);
  } else if (piece.sequence == kKeysOfNobody) {
    for (int64_t row = piece.begin; row < piece.end; ++row) {
      ClearHeads(params_.dk, row, p.num_kv_heads, kv_head, 1, p.head_dim * element_);
      ClearHeads(params_.dv, row, p.num_kv_heads, kv_head, 1, p.head_dim_v * element_);
    }
  } else {
    if (piece.begin == 0) ClearRowsWithoutKeys(SequenceOf(piece.sequence, kv_head));
    kernel_.run(params_, ItemOf(piece, kv_head), scratch);
  }
}

void BwdPlan::RunUnit(int64_t unit, char* scratch) {
  for (int64_t i = unit_begin_[unit]; i < unit_begin_[unit + 1]; ++i)
    RunItem(pieces_[i / params_.fwd.num_kv_heads], i % params_.fwd.num_kv_heads, scratch);
}

}  // namespace jax_varlen
