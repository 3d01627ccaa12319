// Takes pieces, each at the start of a cache line, from a thread's memory.
#pragma once

#include "simd_math.h"

namespace jax_varlen {
namespace {

template <typename T>
T* Take(int64_t count, char** scratch) {
  T* p = reinterpret_cast<T*>(*scratch);
  *scratch += RoundUp(count * sizeof(T), 64);
  return p;
}

}  // namespace
}  // namespace jax_varlen
