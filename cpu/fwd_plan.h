// How a ragged batch becomes units of work of like size, long ones first. Memory is linear in sequences and rows.
#pragma once

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
  // Rows of one sequence (FwdItem::row_begin, row_end), for every kv head; or rows of q that belong to nobody.
  struct Chunk {
    int64_t sequence;  // kNobody for the latter
    int64_t row_begin, row_end;
    double cost;  // of one kv head
  };
  static constexpr int64_t kNobody = -1;

  int64_t RowsPerItem(int64_t num_threads) const;
  void AddSequence(int64_t sequence, int64_t rows_per_item);
  void AddNobody(int64_t begin, int64_t end);
  double Cost(const Chunk& chunk) const;  // of one kv head, in multiply-adds
  FwdItem ItemOf(const Chunk& chunk, int64_t kv_head) const;
  void ClearNobody(const Chunk& chunk, int64_t kv_head) const;

  FwdParams params_;
  FwdKernel kernel_;
  size_t scratch_bytes_;
  std::vector<Chunk> chunks_;
  std::vector<int64_t> unit_begin_;  // item i is chunk i / num_kv_heads, kv head i % num_kv_heads
};

}  // namespace jax_varlen
