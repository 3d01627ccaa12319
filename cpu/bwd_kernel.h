// What a backward kernel does: one BwdItem per call, the gradients of some keys and their part of dq.
#pragma once

#include "fwd_kernel.h"

namespace jax_varlen {

// The items of one sequence and kv head add to a row of dq one after the other, in the order of their keys, so that the sum
// has the same bits however many threads there are. done[i] says how many have added to strip i.
struct Turns {
  int32_t* done;             // of the sequence and kv head
  float* sum;                // dq as it grows, in float32; of the shape of dq
  const int32_t* abandoned;  // not 0: some item will never come
};

// The calls of the processor's newest kernels too, so these are functions of a file for every processor.
void WaitForTurn(const Turns& turns, int64_t strip, int64_t wanted);
void PassTurn(const Turns& turns, int64_t strip);

struct BwdItem {
  FwdItem rows;                // those of the sequence and kv head that see one of the keys, in whole strips
  int64_t key_begin, key_end;  // of the sequence
  int64_t keys_per_item;       // key_begin is a multiple of it
  Turns turns;
};

struct BwdKernel {
  // Writes dk and dv of the keys, and dq of every row of which these are the last keys. scratch: 64-byte aligned.
  void (*run)(const BwdParams& params, const BwdItem& item, char* scratch);
  size_t (*scratch_bytes)(const FwdParams& params, int64_t keys);  // for items of up to this many keys
  int64_t strip_rows;
};

BwdKernel BwdGeneric(DType dtype);
BwdKernel BwdAvx2(DType dtype);
BwdKernel BwdAvx512(DType dtype);

}  // namespace jax_varlen
