// Tiles in shared memory: the copy from device memory and the operand fragments of mma.sync.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace jax_varlen {

// A tile is rows of kHeadDim 16-bit elements in 16-byte chunks. Chunk c of row r stands at place c ^ (r % 8): eight rows of
// one chunk, which ldmatrix reads at once, then lie in different banks.
template <int kHeadDim>
__device__ __forceinline__ uint32_t SmemOffset(int row, int chunk) {
  return row * (2 * kHeadDim) + ((chunk ^ (row % 8)) * 16);
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
    if (row < rows && chunk * 8 < columns)
      *reinterpret_cast<int4*>(gmem + row * row_stride + chunk * 8) =
          ptx::LoadShared16(smem_rows + SmemOffset<kHeadDim>(row, chunk));
  }
}

// A operand: rows row0 .. row0 + 15, columns 16 kk .. 16 kk + 15.
template <int kHeadDim>
__device__ __forceinline__ void LoadA(uint32_t (&a)[4], uint32_t tile, int row0, int kk) {
  const int lane = threadIdx.x % 32;
  ptx::LoadMatrix4(a, tile + row0 * (2 * kHeadDim) + SmemOffset<kHeadDim>(lane % 16, 2 * kk + lane / 16));
}

// A operand from a tile that holds its transpose: rows 16 m .. 16 m + 15, columns (rows of the tile) column0 .. column0 + 15.
template <int kTileColumns>
__device__ __forceinline__ void LoadATransposed(uint32_t (&a)[4], uint32_t tile, int m, int column0) {
  const int lane = threadIdx.x % 32;
  const int row = lane % 8 + lane / 16 * 8, chunk = 2 * m + lane / 8 % 2;
  ptx::LoadMatrix4Transposed(a, tile + column0 * (2 * kTileColumns) + SmemOffset<kTileColumns>(row, chunk));
}

// Two B operands of Q K^T: keys row0 .. row0 + 7 and row0 + 8 .. row0 + 15, columns 16 kk .. 16 kk + 15.
template <int kHeadDim>
__device__ __forceinline__ void LoadB(uint32_t (&b)[4], uint32_t tile, int row0, int kk) {
  const int lane = threadIdx.x % 32;
  ptx::LoadMatrix4(b, tile + row0 * (2 * kHeadDim) + SmemOffset<kHeadDim>(lane % 8 + lane / 16 * 8, 2 * kk + lane / 8 % 2));
}

// Two B operands of P V: keys row0 .. row0 + 15, columns 16 d .. 16 d + 7 and 16 d + 8 .. 16 d + 15.
template <int kHeadDim>
__device__ __forceinline__ void LoadBTransposed(uint32_t (&b)[4], uint32_t tile, int row0, int d) {
  const int lane = threadIdx.x % 32;
  ptx::LoadMatrix4Transposed(b, tile + row0 * (2 * kHeadDim) + SmemOffset<kHeadDim>(lane % 16, 2 * d + lane / 16));
}

}  // namespace jax_varlen
