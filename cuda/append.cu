// One warp copies one kv head of one token, of k and of v: at head_dim 128 and 16 bits that is 16 bytes a lane.
//
// Nothing but bandwidth counts: a token is read and written once, and what a warp looks up before (its sequence, the length,
// the block) stays in the caches, as the warps beside it look up the same.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "append.h"

namespace jax_varlen {
namespace {

constexpr int kWarps = 4;

// What one lane moves at once.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Elements {
  T x[kCount];
};

__device__ __forceinline__ float ToFloat(float x) {
  return x;
}
__device__ __forceinline__ float ToFloat(__half x) {
  return __half2float(x);
}
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

// Pools of another dtype than k and v hold float8_e4m3fn: rounded to nearest even, at most 448, and NaN stays NaN.
template <typename To, typename From>
__device__ __forceinline__ To Stored(From x, float scale) {
  if constexpr (std::is_same_v<To, From>)
    return x;
  else
    return __nv_cvt_float_to_fp8(__fdiv_rn(ToFloat(x), scale), __NV_SATFINITE, __NV_E4M3);
}

// The sequence of a row of k and v: the last that starts there or before. -1 before the first, batch behind the last.
__device__ __forceinline__ int64_t SequenceOf(const AppendParams& p, int64_t row) {
  int64_t lo = 0, hi = p.batch + 1;
  while (lo < hi) {
    const int64_t middle = (lo + hi) / 2;
    if (p.cu_seqlens[middle] <= row) {
      lo = middle + 1;
    } else {
      hi = middle;
    }
  }
  return lo - 1;
}

// The row of the pool for a row of k and v, or -1. Every value is checked before it leads to an address.
__device__ __forceinline__ int64_t PlaceOf(const AppendParams& p, int64_t row) {
  const int64_t b = SequenceOf(p, row);
  if (b < 0 || b >= p.batch) return -1;
  const int64_t position = static_cast<int64_t>(p.seqused_k[b]) + row - p.cu_seqlens[b];
  if (position < 0 || position >= p.max_blocks * p.block_size) return -1;
  const int64_t column = position / p.block_size, block = p.block_table[b * p.max_blocks + column];
  return 0 <= block && block < p.num_blocks ? position + (block - column) * p.block_size : -1;
}

// Piece i of head `source` of the packed array goes to head `target` of the pool; both count all heads of all rows.
template <typename From, typename To, int kCount>
__device__ __forceinline__ void CopyPiece(const void* packed, int64_t source, void* pool, int64_t target, int64_t pieces,
                                          int64_t i, const float* scale) {
  const auto in = static_cast<const Elements<From, kCount>*>(packed)[source * pieces + i];
  const float divisor = scale == nullptr ? 1.0f : *scale;
  Elements<To, kCount> out;
#pragma unroll
  for (int e = 0; e < kCount; ++e) out.x[e] = Stored<To>(in.x[e], divisor);
  static_cast<Elements<To, kCount>*>(pool)[target * pieces + i] = out;
}

template <typename From, typename To, int kCount>
__global__ __launch_bounds__(kWarps * 32) void append_kernel(const __grid_constant__ AppendParams p) {
  const int64_t pieces_k = p.head_dim / kCount, pieces_v = p.head_dim_v / kCount;
  const int64_t items = p.total * p.num_kv_heads, stride = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; item < items; item += stride) {
    const int64_t row = item / p.num_kv_heads, head = item - row * p.num_kv_heads;
    const int64_t place = PlaceOf(p, row);
    if (place < 0) continue;
    const int64_t target = place * p.num_kv_heads + head;
#pragma unroll 1  // mostly a single step, and registers are better spent on more warps
    for (int64_t i = threadIdx.x % 32; i < pieces_k + pieces_v; i += 32) {
      if (i < pieces_k) {
        CopyPiece<From, To, kCount>(p.k, item, p.k_cache, target, pieces_k, i, p.k_scale ? p.k_scale + head : nullptr);
      } else {
        CopyPiece<From, To, kCount>(p.v, item, p.v_cache, target, pieces_v, i - pieces_k,
                                    p.v_scale ? p.v_scale + head : nullptr);
      }
    }
  }
}

template <typename From, typename To, int kCount>
cudaError_t LaunchAppend(const AppendParams& p, cudaStream_t stream) {
  constexpr int64_t kMaxGrid = 0x7fffffff;
  const int64_t ctas = (p.total * p.num_kv_heads + kWarps - 1) / kWarps;
  append_kernel<From, To, kCount><<<static_cast<unsigned>(ctas < kMaxGrid ? ctas : kMaxGrid), kWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

bool IsAligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// 16 bytes of k and v at once where every head of every array begins at a multiple of what is moved.
template <typename From, typename To>
cudaError_t AppendAs(const AppendParams& p, cudaStream_t stream) {
  constexpr int kCount = 16 / sizeof(From);
  const bool wide = p.head_dim % kCount == 0 && p.head_dim_v % kCount == 0 && IsAligned(p.k, 16) && IsAligned(p.v, 16) &&
                    IsAligned(p.k_cache, 16) && IsAligned(p.v_cache, 16);
  return wide ? LaunchAppend<From, To, kCount>(p, stream) : LaunchAppend<From, To, 1>(p, stream);
}

}  // namespace

cudaError_t Append(const AppendParams& p, cudaStream_t stream) {
  if (p.total == 0 || p.batch == 0) return cudaSuccess;
  if (p.cache_dtype == p.dtype)
    return p.dtype == DType::kF32 ? AppendAs<uint32_t, uint32_t>(p, stream) : AppendAs<uint16_t, uint16_t>(p, stream);
  if (p.dtype == DType::kF32) return AppendAs<float, uint8_t>(p, stream);
  return p.dtype == DType::kBF16 ? AppendAs<__nv_bfloat16, uint8_t>(p, stream) : AppendAs<__half, uint8_t>(p, stream);
}

}  // namespace jax_varlen
