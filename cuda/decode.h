// Decode: few rows of q a sequence, many keys in a pool of blocks. All multiprocessors stream an equal share of the keys,
// wherever the ends of sequences fall, so that memory is the only bound.
//
// The rows of a tile are the query heads of one kv head, of all queries of the sequence. The keys of a tile and a kv head are
// cut into steps; the steps of all tiles and kv heads behind each other, tile by tile and head by head, are cut into equal
// shares, one a CTA. A tile and head that lies in several shares leaves a partial result in each; the last CTA to leave one
// merges them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"
#include "schedule.h"

namespace jax_varlen {

// What the CTAs of the decode kernel leave to be merged: two partial results each, as only the first and the last tile of a
// share can go on elsewhere.
struct Partials {
  float* out;    // (2 * shares, rows, head_dim_v), normalised
  float* lse;    // (2 * shares, rows), of base 2, without the sink
  int* arrived;  // (2 * shares,), zeros that the schedule kernel has written: see Combine
  int shares;
  int rows;
};

// The kernel is compiled for pools of q's dtype and of e4m3. head_dim and head_dim_v are multiples of 8 (of
// 16 for e4m3) up to kMaxHeadDim.
template <DType dtype, DType kv_dtype>
cudaError_t Decode(const FwdParams& params, const DecodeList& list, const Partials& partials, cudaStream_t stream);

}  // namespace jax_varlen
