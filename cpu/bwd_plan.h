// How a ragged batch becomes units of work of the backward pass. Memory is linear in sequences and rows.
#pragma once

#include <memory>
#include <vector>

#include "bwd_kernel.h"

namespace jax_varlen {

// Pieces and their order depend on the shapes and offsets alone, so that the gradients have the same bits for any number of
// threads. Units must be claimed in their order, or an item could wait for one that nobody has begun.
class BwdPlan {
 public:
  BwdPlan(const BwdParams& params, const BwdKernel& kernel, int64_t num_threads);

  int64_t num_units() const { return static_cast<int64_t>(unit_begin_.size()) - 1; }
  size_t scratch_bytes() const { return scratch_bytes_; }

  // Writes the rows of dk and dv that belong to the unit, and its part of dq. scratch: scratch_bytes(), 64-byte aligned.
  void RunUnit(int64_t unit, char* scratch);

  // A unit will not run: those that wait for it go on, with wrong sums.
  void Abandon();

 private:
  // Keys of one sequence, for every kv head; or rows of q, or of k and v, that belong to nobody.
  struct Piece {
    int64_t sequence;
    int64_t begin, end;
    double cost;                         // of one kv head, in multiply-adds
    static constexpr int64_t heads = 1;  // see CutUnits
  };
  static constexpr int64_t kRowsOfNobody = -1, kKeysOfNobody = -2;

  struct Range {
    int64_t begin, end;
  };

  void AddNobody(int64_t whose, int64_t begin, int64_t end);
  void AddSequence(int64_t sequence);
  double Cost(const Piece& piece) const;
  FwdItem SequenceOf(int64_t sequence, int64_t kv_head) const;
  Range RowsThatSee(const FwdItem& sequence, int64_t key_begin, int64_t key_end) const;
  BwdItem ItemOf(const Piece& piece, int64_t kv_head);
  void ClearRowsWithoutKeys(const FwdItem& sequence) const;
  void RunItem(const Piece& piece, int64_t kv_head, char* scratch);

  BwdParams params_;
  BwdKernel kernel_;
  int64_t group_size_, element_;  // query heads of a kv head, bytes of a number
  int64_t keys_per_item_;
  size_t scratch_bytes_;
  std::vector<Piece> pieces_;
  std::vector<int64_t> unit_begin_;   // in items, see CutUnits
  std::vector<int64_t> turns_begin_;  // of each sequence
  std::vector<int32_t> turns_;        // of every strip whose keys are in several items
  std::unique_ptr<float[]> sum_;      // see Turns; null where dq itself is float32, or no turns are taken
  int32_t abandoned_ = 0;
};

}  // namespace jax_varlen
