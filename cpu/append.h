// Writes new tokens into a paged KV cache.
#pragma once

#include "params.h"

namespace jax_varlen {

// How many rows of k and v are worth the work of one thread.
int64_t AppendRowsPerUnit(const AppendParams& params);

// Writes the rows begin .. end - 1 of k and v, which belong to sequences and have a place: see CheckAppend.
void Append(const AppendParams& params, int64_t begin, int64_t end);

}  // namespace jax_varlen
