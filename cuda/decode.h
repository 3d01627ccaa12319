// Decode: few rows of q a sequence, many keys in a pool of blocks. All multiprocessors stream an equal share of the keys,
// wherever the ends of sequences fall, so that memory is the only bound.
//
// The rows of a tile are the query heads of one kv head, of all queries of the sequence. The keys of a tile and a kv head are
// cut into steps; the steps of all tiles and kv heads behind each other, tile by tile and head by head, are cut into equal
// shares, one a CTA, and the end of each into parts, which the CTAs that are done first take. A tile and head that lies in
// several parts leaves a partial result in each; the last CTA to leave one merges them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"
#include "schedule.h"

namespace jax_varlen {

// What the CTAs of the decode kernel leave to be merged: two partial results a part, as only its first and its last tile can go
// on elsewhere. The parts of a share divide its rows.
struct Partials {
  float* out;    // (shares, 2 * rows, head_dim_v), normalised
  float* lse;    // (shares, 2 * rows), of base 2, without the sink
  int* arrived;  // (shares * kPartsOfShare, 2), zeros that the schedule kernel has written: see Combine
  int shares;
  int rows;  // a multiple of kPartsOfShare
};

// The kernel is compiled for pools of q's dtype and of e4m3. head_dim and head_dim_v are multiples of 8 (of
// 16 for e4m3) up to kMaxHeadDim.
template <DType dtype, DType kv_dtype>
cudaError_t Decode(const FwdParams& params, const DecodeList& list, const Partials& partials, cudaStream_t stream);

}  // namespace jax_varlen
