// What a kernel does: one FwdItem per call. A kernel of one instruction set is three facts, kept in a FwdKernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace jax_varlen {

// The items that share one chunk of rows, each with some of the keys.
struct FwdSplits {
  int64_t index = 0, count = 1;
  int64_t floats = 0;           // of one item's state
  float* states = nullptr;      // (num_kv_heads, count, floats)
  int32_t* finished = nullptr;  // (num_kv_heads,): items that have left their state
};

// Some rows of one sequence and one kv head. The query heads of a kv head count as more rows: row r is token
// r / group_size and head kv_head * group_size + r % group_size, so that one pass over k and v serves the whole group.
struct FwdItem {
  int64_t sequence;
  bool decode;                 // few rows, many keys: see fwd_decode.h
  int64_t kv_head, num_heads;  // num_heads kv heads from kv_head on; one, if not decode
  int64_t first_q, first_k;    // rows of the arrays where the sequence begins; first_k is 0 with a block table
  int64_t len_q, len_k;        // used lengths
  int64_t key_begin, key_end;  // of the sequence's keys, those of this item
  int64_t row_begin, row_end;  // row_begin is a multiple of FwdKernel::strip_rows
  FwdSplits splits;            // count 1: these are all keys that the rows see
};

struct FwdKernel {
  // scratch: 64-byte aligned. next: what this thread does afterwards, to be fetched meanwhile, or null.
  void (*run)(const FwdParams& params, const FwdItem& item, const FwdItem* next, char* scratch);
  size_t (*scratch_bytes)(const FwdParams& params, int64_t rows);  // for items of up to this many rows
  int64_t lanes;                                                   // rows to a vector
  int64_t strip_rows;                                              // rows of one softmax step, whole vectors
  int64_t decode_rows;                                             // at most, of a sequence
};

constexpr int64_t kMaxDecodeHeads = 16;  // of an item: those of one key lie together, and so do those of its neighbour

FwdKernel FwdGeneric(DType dtype, DType kv_dtype);
FwdKernel FwdAvx2(DType dtype, DType kv_dtype);
FwdKernel FwdAvx512(DType dtype, DType kv_dtype);
FwdKernel FwdAvx512Bf16(DType kv_dtype);
FwdKernel FwdAmx(DType kv_dtype);

}  // namespace jax_varlen
