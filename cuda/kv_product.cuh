// The two products of attention with keys and values that are held as they are multiplied, or as e4m3.
#pragma once

#include "ptx.cuh"
#include "tile_io.cuh"
#include "tile_mma.cuh"

namespace jax_varlen {

// The products of a warp's 16 rows with keys and values that are held as E, T itself or e4m3, which is unpacked into fragments.
// Both are read from tiles as those of 16-bit elements are; then a fragment's columns are not where they would be for T, and
// `Column` says which two columns of the output are values 2 d and 2 d + 1 of a thread, and `QColumn` the same for Q.
template <typename T, typename E, int kHeadDim>
struct KvProduct {
  static constexpr int kColumns = kHeadDim;  // of a tile, in 16-bit elements

  static __device__ __forceinline__ void LoadQ(uint32_t (&q)[4], const T* row, int step, int r, bool valid, int columns) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = 16 * step + 8 * c + 2 * (threadIdx.x % 4);
      q[r + 2 * c] = valid && column < columns ? *reinterpret_cast<const uint32_t*>(row + column) : 0;
    }
  }

  template <int kN>
  static __device__ __forceinline__ void Logits(float (&acc_s)[1][kN][4], const uint32_t (&q)[kHeadDim / 16][4],
                                                uint32_t address_k) {
    MultiplyTransposed<T, kHeadDim, false>(
        acc_s,
        [&](uint32_t (&fragment)[4], int, int kk) {
#pragma unroll
          for (int e = 0; e < 4; ++e) fragment[e] = q[kk][e];
        },
        address_k);
  }

  template <int kSteps, typename LoadP>
  static __device__ __forceinline__ void Output(float (&acc_o)[1][kHeadDim / 8][4], LoadP load_p, uint32_t address_v) {
    Accumulate<T, kHeadDim, kSteps, true>(acc_o, load_p, address_v);
  }

  static __device__ __forceinline__ int Column(int d) { return 8 * d + 2 * (threadIdx.x % 4); }

  static __device__ __forceinline__ float2 Values(const float (&acc_o)[kHeadDim / 8][4], int r, int d) {
    return {acc_o[d][2 * r], acc_o[d][2 * r + 1]};
  }
};

struct E4M3 {
  uint8_t bits;
};

template <typename T, int kHeadDim>
struct KvProduct<T, E4M3, kHeadDim> {
  static constexpr int kColumns = kHeadDim / 2;

  // A thread holds four neighbouring columns of 16: the even ones where the first half of a fragment is, then the odd ones.
  static __device__ __forceinline__ void LoadQ(uint32_t (&q)[4], const T* row, int step, int r, bool valid, int columns) {
    const int column = 16 * step + 4 * (threadIdx.x % 4);
    uint2 four = {0, 0};
    if (valid && column < columns) four = *reinterpret_cast<const uint2*>(row + column);
    q[r] = __byte_perm(four.x, four.y, 0x5410);
    q[r + 2] = __byte_perm(four.x, four.y, 0x7632);
  }

  template <int kN>
  static __device__ __forceinline__ void Logits(float (&acc_s)[1][kN][4], const uint32_t (&q)[kHeadDim / 16][4],
                                                uint32_t address_k) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_s[0][n][e] = 0.f;
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 32; ++kk)
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) {
        uint32_t words[4];
        ptx::LoadMatrix4(words, At(address_k, kk) + n * (32 * kColumns));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t even, odd;
          ptx::UnpackE4M3<T>(words[i], &even, &odd);
          ptx::Mma16x8x16<T>(acc_s[0][2 * n + i / 2], q[2 * kk + i % 2], even, odd);
        }
      }
  }

  template <int kSteps, typename LoadP>
  static __device__ __forceinline__ void Output(float (&acc_o)[1][kHeadDim / 8][4], LoadP load_p, uint32_t address_v) {
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      uint32_t p[4];
      load_p(p, 0, kk);
#pragma unroll
      for (int d = 0; d < kHeadDim / 32; ++d) {
        uint32_t words[4];
        ptx::LoadMatrix4Transposed(words, At(address_v, d) + kk * (32 * kColumns));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t even[2], odd[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) ptx::UnpackE4M3<T>(words[2 * i + half], &even[half], &odd[half]);
          ptx::Mma16x8x16<T>(acc_o[0][4 * d + 2 * i], p, even[0], even[1]);
          ptx::Mma16x8x16<T>(acc_o[0][4 * d + 2 * i + 1], p, odd[0], odd[1]);
        }
      }
    }
  }

  static __device__ __forceinline__ int Column(int d) { return 16 * (d / 2) + 4 * (threadIdx.x % 4) + 2 * (d % 2); }

  static __device__ __forceinline__ float2 Values(const float (&acc_o)[kHeadDim / 8][4], int r, int d) {
    return {acc_o[d / 2 * 2][2 * r + d % 2], acc_o[d / 2 * 2 + 1][2 * r + d % 2]};
  }
};

}  // namespace jax_varlen
