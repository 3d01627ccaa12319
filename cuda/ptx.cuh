// All inline assembly of the portable family (compute capability 8.0 and later), one named function each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jax_varlen::ptx {

// Address of shared memory in its own window, as the instructions below take it.
__device__ __forceinline__ uint32_t SmemAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes asynchronously, or writes 16 zero bytes where `valid` is false; then nothing is read.
__device__ __forceinline__ void CopyAsync16(uint32_t smem, const void* gmem, bool valid) {
  asm volatile(
      "{\n.reg .pred ignore;\nsetp.eq.u32 ignore, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, ignore;\n}\n" ::"r"(smem),
      "l"(gmem), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

// The same for one float; what is not valid becomes 0.
__device__ __forceinline__ void CopyAsync4(uint32_t smem, const void* gmem, bool valid) {
  asm volatile(
      "{\n.reg .pred ignore;\nsetp.eq.u32 ignore, %2, 0;\ncp.async.ca.shared.global [%0], [%1], 4, ignore;\n}\n" ::"r"(smem),
      "l"(gmem), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most kPending of this thread's groups of copies are under way.
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lanes 8i .. 8i+7 give the row addresses of matrix i.
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

__device__ __forceinline__ void StoreShared4(uint32_t smem, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(smem), "r"(word) : "memory");
}

__device__ __forceinline__ void StoreShared16(uint32_t smem, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(smem), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

__device__ __forceinline__ float2 LoadSharedFloat2(uint32_t smem) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(smem) : "memory");
  return x;
}

__device__ __forceinline__ void LoadShared16(uint32_t (&words)[4], uint32_t smem) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(smem)
               : "memory");
}

// acc (16x8, f32) += a (16x16) * b (16x8).
template <typename T>
__device__ __forceinline__ void Mma16x8x16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void Mma16x8x16<__nv_bfloat16>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void Mma16x8x16<__half>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x, 2 ulp; 2^-inf is 0.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as a pair of 16-bit elements, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t Pack2(float lo, float hi);

template <>
__device__ __forceinline__ uint32_t Pack2<__nv_bfloat16>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

template <>
__device__ __forceinline__ uint32_t Pack2<__half>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// The pair's two elements as floats.
template <typename T>
__device__ __forceinline__ float2 Unpack2(uint32_t pair);

template <>
__device__ __forceinline__ float2 Unpack2<__nv_bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

template <>
__device__ __forceinline__ float2 Unpack2<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Four e4m3 in a word, as two pairs: the first and the third, the second and the fourth.
template <typename T>
__device__ __forceinline__ void UnpackE4M3(uint32_t word, uint32_t* even, uint32_t* odd);

#if __CUDA_ARCH__ >= 890
// Two e4m3 as a pair of float16.
__device__ __forceinline__ uint32_t E4M3ToHalf2(uint32_t two) {
  uint32_t r;
  asm("{\n.reg .b16 lo;\ncvt.u16.u32 lo, %1;\ncvt.rn.f16x2.e4m3x2 %0, lo;\n}\n" : "=r"(r) : "r"(two));
  return r;
}

template <>
__device__ __forceinline__ void UnpackE4M3<__half>(uint32_t word, uint32_t* even, uint32_t* odd) {
  const uint32_t lo = E4M3ToHalf2(word), hi = E4M3ToHalf2(word >> 16);
  *even = __byte_perm(lo, hi, 0x5410);
  *odd = __byte_perm(lo, hi, 0x7632);
}

template <>
__device__ __forceinline__ void UnpackE4M3<__nv_bfloat16>(uint32_t word, uint32_t* even, uint32_t* odd) {
  const float2 lo = Unpack2<__half>(E4M3ToHalf2(word)), hi = Unpack2<__half>(E4M3ToHalf2(word >> 16));
  *even = Pack2<__nv_bfloat16>(lo.x, hi.x);
  *odd = Pack2<__nv_bfloat16>(lo.y, hi.y);
}
#else
// Sign, exponent and mantissa are moved to where the wider format has them, and a product with a power of two makes up for the
// difference of the exponents' biases; numbers below the normal ones come out right as well. NaN becomes 480.
template <>
__device__ __forceinline__ void UnpackE4M3<__half>(uint32_t word, uint32_t* even, uint32_t* odd) {
  const uint32_t e = (word << 7 & 0x3f803f80u) | (word << 8 & 0x80008000u);
  const uint32_t o = (word >> 1 & 0x3f803f80u) | (word & 0x80008000u);
  asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(*even) : "r"(e), "r"(0x5c005c00u));  // 2^8
  asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(*odd) : "r"(o), "r"(0x5c005c00u));
}

template <>
__device__ __forceinline__ void UnpackE4M3<__nv_bfloat16>(uint32_t word, uint32_t* even, uint32_t* odd) {
  const uint32_t e = (word << 4 & 0x07f007f0u) | (word << 8 & 0x80008000u);
  const uint32_t o = (word >> 4 & 0x07f007f0u) | (word & 0x80008000u);
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(*even) : "r"(e), "r"(0x7b807b80u), "r"(0x80008000u));  // 2^120
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(*odd) : "r"(o), "r"(0x7b807b80u), "r"(0x80008000u));
}
#endif

// The product of two pairs.
template <typename T>
__device__ __forceinline__ uint32_t Multiply2(uint32_t a, uint32_t b) {
  const float2 x = Unpack2<T>(a), y = Unpack2<T>(b);
  return Pack2<T>(x.x * y.x, x.y * y.y);
}

// Adds to two neighbouring floats in device memory, which are aligned to 8 bytes.
__device__ __forceinline__ void AddGlobal2(float* gmem, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};\n" ::"l"(gmem), "f"(x), "f"(y) : "memory");
#else
  atomicAdd(gmem, x);
  atomicAdd(gmem + 1, y);
#endif
}

__device__ __forceinline__ int LoadAcquire(const int* gmem) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\n" : "=r"(x) : "l"(gmem) : "memory");
  return x;
}

__device__ __forceinline__ void AddRelease(int* gmem, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(gmem), "r"(x) : "memory");
}

// Returns what was there before.
__device__ __forceinline__ int AddAcquireRelease(int* gmem, int x) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;\n" : "=r"(before) : "l"(gmem), "r"(x) : "memory");
  return before;
}

// A barrier of `threads` threads; those that only arrive do not wait.
__device__ __forceinline__ void BarrierSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void BarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace jax_varlen::ptx
