// Tiles in shared memory: the copy from device memory and the operand fragments of mma.sync.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace jax_varlen {

// A tile is rows of kHeadDim 16-bit elements in 16-byte chunks. Chunk c of row r stands at place c ^ (r % 8): eight rows of one
// chunk, which ldmatrix reads at once, then lie in different banks. Of 64-byte rows two share the banks, so that r / 2 decides.
template <int kHeadDim>
__device__ __forceinline__ uint32_t SmemOffset(int row, int chunk) {
  static_assert(kHeadDim == 32 || kHeadDim % 64 == 0);
  return row * (2 * kHeadDim) + ((chunk ^ (kHeadDim == 32 ? row / 2 % 4 : row % 8)) * 16);
}

// Starts the copy of kRows rows, `row_stride` elements apart. Rows outside [lo, hi) and chunks beyond `columns` become zeros
// and are not read: what stands there belongs to somebody else, and 0 * NaN is NaN.
template <int kHeadDim, int kThreads, int kRows, typename T>
__device__ __forceinline__ void CopyTile(uint32_t smem, const T* gmem, int64_t row_stride, int lo, int hi, int columns) {
  constexpr int kChunks = kHeadDim / 8;
  constexpr int kRowsPerPass = kThreads / kChunks;
  static_assert(kRows % kRowsPerPass == 0);
  const int chunk = threadIdx.x % kChunks, row0 = threadIdx.x / kChunks;
  const T* source = gmem + row0 * row_stride + chunk * 8;
  const int first = row0 - lo;
  const unsigned valid_rows = chunk * 8 < columns && lo < hi ? hi - lo : 0;
#pragma unroll
  for (int i = 0; i < kRows / kRowsPerPass; ++i) {
    const uint32_t place = smem + SmemOffset<kHeadDim>(row0 + i * kRowsPerPass, chunk);
    ptx::CopyAsync16(place, source, static_cast<unsigned>(first + i * kRowsPerPass) < valid_rows);
    source += kRowsPerPass * row_stride;
  }
}

// Stores the first `rows` of a warp's 16 rows in shared memory, `row_stride` elements apart, in whole 16-byte chunks.
template <int kHeadDim, typename T>
__device__ __forceinline__ void StoreRows(T* gmem, int64_t row_stride, int rows, int columns, uint32_t smem_rows) {
  constexpr int kChunks = kHeadDim / 8;
  static_assert(kChunks <= 32);
  const int lane = threadIdx.x % 32, chunk = lane % kChunks;
#pragma unroll
  for (int i = 0; i < kChunks / 2; ++i) {
    const int row = i * (32 / kChunks) + lane / kChunks;
    if (row < rows && chunk * 8 < columns) {
      uint32_t words[4];
      ptx::LoadShared16(words, smem_rows + SmemOffset<kHeadDim>(row, chunk));
      *reinterpret_cast<uint4*>(gmem + row * row_stride + chunk * 8) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Operands of mma.sync. The four 8x8 matrices that ldmatrix reads at once have row addresses from the lanes. A step of 16
// columns along a tile changes the chunk alone, and since tiles are aligned to their rows it does so by an exclusive or:
// At(address, step), with steps of disjoint bits applied in any order. Going down by a multiple of 8 rows adds a constant.

__device__ __forceinline__ uint32_t At(uint32_t address, int step) {
  return address ^ (32 * step);
}

// For LoadMatrix4, the A operand: rows row0 .. row0 + 15 of the tile, 16 columns a step. For LoadMatrix4Transposed, two B
// operands of a product with the tile: rows row0 .. row0 + 15, two times 8 columns a step.
template <int kHeadDim>
__device__ __forceinline__ uint32_t AddressA(uint32_t tile, int row0) {
  const int lane = threadIdx.x % 32;
  return tile + SmemOffset<kHeadDim>(row0 + lane % 16, lane / 16);
}

// For LoadMatrix4, two B operands of a product with the tile's transpose: rows row0 .. row0 + 7 and row0 + 8 .. row0 + 15, 16
// columns a step. For LoadMatrix4Transposed, the A operand of the tile's transpose: 16 columns of the tile a step are its rows.
template <int kHeadDim>
__device__ __forceinline__ uint32_t AddressB(uint32_t tile, int row0) {
  const int lane = threadIdx.x % 32;
  return tile + SmemOffset<kHeadDim>(row0 + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

}  // namespace jax_varlen
