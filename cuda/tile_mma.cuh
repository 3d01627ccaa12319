// Products of tiles in shared memory by mma.sync. A warp holds kAtoms blocks of 16 rows of the result; the A operand comes from
// load_a(fragment, atom, step), from wherever it is, 16 columns a step. The B operand is given by a lane's address: see
// AddressA and AddressB.
#pragma once

#include "ptx.cuh"
#include "tile_io.cuh"

namespace jax_varlen {

// acc = A B^T with kHeadDim columns of both; address_b is AddressB of B's first row. The fragments of the next step are on
// their way while one step is multiplied, if kPrefetch; without it registers are saved.
template <typename T, int kHeadDim, bool kPrefetch, int kAtoms, int kRowAtoms, typename LoadA>
__device__ __forceinline__ void MultiplyTransposed(float (&acc)[kAtoms][kRowAtoms][4], LoadA load_a, uint32_t address_b) {
  constexpr int kSteps = kHeadDim / 16, kBuffers = kPrefetch ? 2 : 1;
  uint32_t fragment_a[kBuffers][kAtoms][4], fragment_b[kBuffers][kRowAtoms / 2][4];
#pragma unroll
  for (int a = 0; a < kAtoms; ++a)
#pragma unroll
    for (int n = 0; n < kRowAtoms; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[a][n][e] = 0.f;

  auto load = [&](int kk) {
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) load_a(fragment_a[kk % kBuffers][a], a, kk);
#pragma unroll
    for (int n = 0; n < kRowAtoms / 2; ++n)
      ptx::LoadMatrix4(fragment_b[kk % kBuffers][n], At(address_b, kk) + n * (32 * kHeadDim));
  };
  if constexpr (kPrefetch) load(0);
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) {
    if constexpr (!kPrefetch) {
      load(kk);
    } else if (kk + 1 < kSteps) {
      load(kk + 1);
    }
#pragma unroll
    for (int n = 0; n < kRowAtoms / 2; ++n)
#pragma unroll
      for (int a = 0; a < kAtoms; ++a) {
        const uint32_t (&fa)[4] = fragment_a[kk % kBuffers][a];
        const uint32_t (&fb)[4] = fragment_b[kk % kBuffers][n];
        ptx::Mma16x8x16<T>(acc[a][2 * n], fa, fb[0], fb[1]);
        ptx::Mma16x8x16<T>(acc[a][2 * n + 1], fa, fb[2], fb[3]);
      }
  }
}

// acc += A B with 16 kSteps rows of B; address_b is AddressA of B's first row, at the first column that is wanted. With
// kPrefetch a fragment of B is on its way while the one before it is multiplied.
template <typename T, int kHeadDim, int kSteps, bool kPrefetch = false, int kAtoms, int kColumnAtoms, typename LoadA>
__device__ __forceinline__ void Accumulate(float (&acc)[kAtoms][kColumnAtoms][4], LoadA load_a, uint32_t address_b) {
  constexpr int kPairs = kColumnAtoms / 2, kBuffers = kPrefetch ? 2 : 1;
  uint32_t fragment_b[kBuffers][4];
  auto load_b = [&](int i) {
    ptx::LoadMatrix4Transposed(fragment_b[i % kBuffers], At(address_b, i % kPairs) + i / kPairs * (32 * kHeadDim));
  };
  if constexpr (kPrefetch) load_b(0);
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) {
    uint32_t fragment_a[kAtoms][4];
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) load_a(fragment_a[a], a, kk);
#pragma unroll
    for (int d = 0; d < kPairs; ++d) {
      const int i = kk * kPairs + d;
      if constexpr (!kPrefetch) {
        load_b(i);
      } else if (i + 1 < kSteps * kPairs) {
        load_b(i + 1);
      }
      const uint32_t (&fb)[4] = fragment_b[i % kBuffers];
#pragma unroll
      for (int a = 0; a < kAtoms; ++a) {
        ptx::Mma16x8x16<T>(acc[a][2 * d], fragment_a[a], fb[0], fb[1]);
        ptx::Mma16x8x16<T>(acc[a][2 * d + 1], fragment_a[a], fb[2], fb[3]);
      }
    }
  }
}

}  // namespace jax_varlen
