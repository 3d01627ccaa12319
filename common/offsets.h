// The values of cu_seqlens, seqused and block_table, which XLA only knows when it runs.
#pragma once

#include <string>

#include "params.h"

namespace jax_varlen {

// A sentence about the first wrong value in the offsets, the used lengths and the block table; empty when all are right.
std::string CheckOffsets(const FwdParams& params);

// The same about the first token that has no place in the pools.
std::string CheckAppend(const AppendParams& params);

// The rows of a sequence that count. One of the two may be null.
int64_t UsedLength(const int32_t* cu_seqlens, const int32_t* seqused, int64_t sequence);

}  // namespace jax_varlen
