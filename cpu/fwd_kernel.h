// What a kernel does: one FwdItem per call. A kernel of one instruction set is three facts, kept in a FwdKernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace jax_varlen {

// Some rows of one sequence and one kv head. The query heads of a kv head count as more rows: row r is token
// r / group_size and head kv_head * group_size + r % group_size, so that one pass over k and v serves the whole group.
struct FwdItem {
  int64_t sequence;
  int64_t kv_head;
  int64_t first_q, first_k;    // rows of the arrays where the sequence begins; first_k is 0 with a block table
  int64_t len_q, len_k;        // used lengths
  int64_t row_begin, row_end;  // row_begin is a multiple of FwdKernel::strip_rows
};

struct FwdKernel {
  // scratch: 64-byte aligned. next: what this thread does afterwards, to be fetched meanwhile, or null.
  void (*run)(const FwdParams& params, const FwdItem& item, const FwdItem* next, char* scratch);
  size_t (*scratch_bytes)(const FwdParams& params, int64_t rows);  // for items of up to this many rows
  int64_t strip_rows;
};

FwdKernel FwdGeneric(DType dtype, DType kv_dtype);
FwdKernel FwdAvx2(DType dtype, DType kv_dtype);
FwdKernel FwdAvx512(DType dtype, DType kv_dtype);
FwdKernel FwdAvx512Bf16(DType kv_dtype);
FwdKernel FwdAmx(DType kv_dtype);

}  // namespace jax_varlen
