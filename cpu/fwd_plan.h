// How a ragged batch becomes units of work of like size, long ones first. Memory is linear in sequences and rows.
#pragma once

#include <memory>
#include <vector>

#include "fwd_kernel.h"

namespace jax_varlen {

class FwdPlan {
 public:
  FwdPlan(const FwdParams& params, const FwdKernel& kernel, int64_t num_threads);

  int64_t num_units() const { return static_cast<int64_t>(unit_begin_.size()) - 1; }
  size_t scratch_bytes() const { return scratch_bytes_; }

  // Writes the rows of out and lse that belong to the unit. scratch: scratch_bytes(), 64-byte aligned.
  void RunUnit(int64_t unit, char* scratch) const;

 private:
  // Rows of one sequence (FwdItem::row_begin, row_end) and some of its keys, for every kv head; or rows of q that belong to
  // nobody.
  struct Chunk {
    int64_t sequence;  // kNobody for the latter
    int64_t row_begin, row_end;
    int64_t key_begin, key_end;
    int64_t heads;  // that a call takes at a time
    int64_t split, num_splits;
    int64_t first_state, first_finished;  // in the arrays below
    double cost;                          // of one kv head, in multiply-adds
  };
  static constexpr int64_t kNobody = -1;

  int64_t RowsPerItem(int64_t num_threads) const;
  int64_t KeysPerSplit(const FwdItem& sequence) const;
  void AddSequence(int64_t sequence, int64_t rows_per_item);
  void AddNobody(int64_t begin, int64_t end);
  int64_t FirstKey(const FwdItem& sequence, int64_t token) const;
  double Cost(const FwdItem& sequence, const Chunk& chunk) const;
  int64_t StateFloats(const Chunk& chunk) const;
  FwdItem SequenceOf(int64_t sequence) const;
  FwdItem ItemAt(int64_t i, int64_t end) const;
  void ClearNobody(const Chunk& chunk, int64_t kv_head) const;

  FwdParams params_;
  FwdKernel kernel_;
  int64_t group_size_;
  size_t scratch_bytes_;
  std::vector<Chunk> chunks_;
  std::vector<int64_t> unit_begin_;  // item i is chunk i / num_kv_heads, kv head i % num_kv_heads
  int64_t num_states_ = 0, num_finished_ = 0;
  std::unique_ptr<float[]> states_;  // see FwdSplits
  std::unique_ptr<int32_t[]> finished_;
};

}  // namespace jax_varlen
