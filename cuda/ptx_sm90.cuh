// All inline assembly of the Hopper family (compute capability 9.0 with its own instructions, sm_90a), one named function each.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jax_varlen::ptx {

// A barrier in shared memory that counts arrivals, and bytes of bulk copies. A phase ends when all that was expected has come;
// who waits names the parity of the phase.
__device__ __forceinline__ void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to bulk copies.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void ArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void WaitBarrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra wait;\n}\n" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

// Copies a box of a tensor of rank 3 to shared memory; what lies outside the tensor becomes 0.
__device__ __forceinline__ void CopyBox3(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(
          smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Ordinary writes to shared memory before become visible to wgmma and bulk copies after.
__device__ __forceinline__ void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void LowerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Products of a warpgroup: they begin after the fence, belong to a group from the commit on, and are waited for by group.
__device__ __forceinline__ void FenceProducts() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void WaitProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// The compiler must neither move nor copy accumulators while a product is on its way.
template <int kN>
__device__ __forceinline__ void Pin(float (&acc)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(acc[n][e])::"memory");
}

#define JAX_VARLEN_ATOM(i) "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])
#define JAX_VARLEN_ATOMS8(i)                                                                                          \
  JAX_VARLEN_ATOM(i), JAX_VARLEN_ATOM(i + 1), JAX_VARLEN_ATOM(i + 2), JAX_VARLEN_ATOM(i + 3), JAX_VARLEN_ATOM(i + 4), \
      JAX_VARLEN_ATOM(i + 5), JAX_VARLEN_ATOM(i + 6), JAX_VARLEN_ATOM(i + 7)
#define JAX_VARLEN_REGISTERS32                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_VARLEN_REGISTERS64                                                                             \
  JAX_VARLEN_REGISTERS32                                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Multiply: acc (64 x 8 kN) = a b, or += where `add`. A (64 x 16) is given by a descriptor of shared memory, rows of K-major
// columns, or by its fragment; B^T (8 kN x 16) by a descriptor: K-major, or MN-major where kTransposed.
template <typename T, int kN>
struct Wgmma;

#define JAX_VARLEN_WGMMA(T, NAME, N, ATOMS, REGISTERS, A, B, C, D, E)                                                          \
  template <>                                                                                                                  \
  struct Wgmma<T, N / 8> {                                                                                                     \
    static __device__ __forceinline__ void Multiply(float (&acc)[N / 8][4], uint64_t a, uint64_t b, bool add) {                \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME      \
                   "." NAME " {" REGISTERS "}, " A ", " B ", add, 1, 1, 0, 0;\n}\n"                                            \
                   : ATOMS                                                                                                     \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                              \
    }                                                                                                                          \
    static __device__ __forceinline__ void MultiplyTransposed(float (&acc)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {    \
      asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                   " {" REGISTERS "}, {" A ", " B ", " C ", " D "}, " E ", add, 1, 1, 1;\n}\n"                                 \
                   : ATOMS                                                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                      \
    }                                                                                                                          \
  }

JAX_VARLEN_WGMMA(__nv_bfloat16, "bf16", 64, JAX_VARLEN_ATOMS8(0), JAX_VARLEN_REGISTERS32, "%32", "%33", "%34", "%35", "%36");
JAX_VARLEN_WGMMA(__half, "f16", 64, JAX_VARLEN_ATOMS8(0), JAX_VARLEN_REGISTERS32, "%32", "%33", "%34", "%35", "%36");
#define JAX_VARLEN_ATOMS16 JAX_VARLEN_ATOMS8(0), JAX_VARLEN_ATOMS8(8)
JAX_VARLEN_WGMMA(__nv_bfloat16, "bf16", 128, JAX_VARLEN_ATOMS16, JAX_VARLEN_REGISTERS64, "%64", "%65", "%66", "%67", "%68");
JAX_VARLEN_WGMMA(__half, "f16", 128, JAX_VARLEN_ATOMS16, JAX_VARLEN_REGISTERS64, "%64", "%65", "%66", "%67", "%68");

#undef JAX_VARLEN_WGMMA
#undef JAX_VARLEN_ATOMS16
#undef JAX_VARLEN_REGISTERS64
#undef JAX_VARLEN_REGISTERS32
#undef JAX_VARLEN_ATOMS8
#undef JAX_VARLEN_ATOM

}  // namespace jax_varlen::ptx
