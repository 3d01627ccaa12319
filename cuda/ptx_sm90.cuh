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

// Multiply: acc (64 x N) = a b^T, or += where `add`; a is 64 x 16 and b N x 16 or, where transposed, 16 x N. Operands of shared
// memory are given by descriptors, those of registers by fragments. An accumulator is N / 8 atoms of four values; the lists of
// operands below grow by two atoms, 16 columns.
#define JAX_VARLEN_ATOMS2(i)                                                                                    \
  "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3]), "+f"(acc[i + 1][0]), "+f"(acc[i + 1][1]), \
      "+f"(acc[i + 1][2]), "+f"(acc[i + 1][3])
#define JAX_VARLEN_ATOMS2_ JAX_VARLEN_ATOMS2(0)
#define JAX_VARLEN_REGISTERS2 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAX_VARLEN_ATOMS4_ JAX_VARLEN_ATOMS2_, JAX_VARLEN_ATOMS2(2)
#define JAX_VARLEN_REGISTERS4 JAX_VARLEN_REGISTERS2 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_VARLEN_ATOMS6_ JAX_VARLEN_ATOMS4_, JAX_VARLEN_ATOMS2(4)
#define JAX_VARLEN_REGISTERS6 JAX_VARLEN_REGISTERS4 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define JAX_VARLEN_ATOMS8_ JAX_VARLEN_ATOMS6_, JAX_VARLEN_ATOMS2(6)
#define JAX_VARLEN_REGISTERS8 JAX_VARLEN_REGISTERS6 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_VARLEN_ATOMS10_ JAX_VARLEN_ATOMS8_, JAX_VARLEN_ATOMS2(8)
#define JAX_VARLEN_REGISTERS10 JAX_VARLEN_REGISTERS8 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define JAX_VARLEN_ATOMS12_ JAX_VARLEN_ATOMS10_, JAX_VARLEN_ATOMS2(10)
#define JAX_VARLEN_REGISTERS12 JAX_VARLEN_REGISTERS10 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_VARLEN_ATOMS14_ JAX_VARLEN_ATOMS12_, JAX_VARLEN_ATOMS2(12)
#define JAX_VARLEN_REGISTERS14 JAX_VARLEN_REGISTERS12 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define JAX_VARLEN_ATOMS16_ JAX_VARLEN_ATOMS14_, JAX_VARLEN_ATOMS2(14)
#define JAX_VARLEN_REGISTERS16 JAX_VARLEN_REGISTERS14 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_VARLEN_ATOMS18_ JAX_VARLEN_ATOMS16_, JAX_VARLEN_ATOMS2(16)
#define JAX_VARLEN_REGISTERS18 JAX_VARLEN_REGISTERS16 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define JAX_VARLEN_ATOMS20_ JAX_VARLEN_ATOMS18_, JAX_VARLEN_ATOMS2(18)
#define JAX_VARLEN_REGISTERS20 JAX_VARLEN_REGISTERS18 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define JAX_VARLEN_ATOMS22_ JAX_VARLEN_ATOMS20_, JAX_VARLEN_ATOMS2(20)
#define JAX_VARLEN_REGISTERS22 JAX_VARLEN_REGISTERS20 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define JAX_VARLEN_ATOMS24_ JAX_VARLEN_ATOMS22_, JAX_VARLEN_ATOMS2(22)
#define JAX_VARLEN_REGISTERS24 JAX_VARLEN_REGISTERS22 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_VARLEN_ATOMS26_ JAX_VARLEN_ATOMS24_, JAX_VARLEN_ATOMS2(24)
#define JAX_VARLEN_REGISTERS26 JAX_VARLEN_REGISTERS24 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define JAX_VARLEN_ATOMS28_ JAX_VARLEN_ATOMS26_, JAX_VARLEN_ATOMS2(26)
#define JAX_VARLEN_REGISTERS28 JAX_VARLEN_REGISTERS26 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define JAX_VARLEN_ATOMS30_ JAX_VARLEN_ATOMS28_, JAX_VARLEN_ATOMS2(28)
#define JAX_VARLEN_REGISTERS30 JAX_VARLEN_REGISTERS28 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define JAX_VARLEN_ATOMS32_ JAX_VARLEN_ATOMS30_, JAX_VARLEN_ATOMS2(30)
#define JAX_VARLEN_REGISTERS32 JAX_VARLEN_REGISTERS30 ", %120, %121, %122, %123, %124, %125, %126, %127"

template <typename T, int kAtoms>
struct Wgmma;

// N is 8 ATOMS; A to F are the numbers of the operands behind the accumulator.
#define JAX_VARLEN_WGMMA(T, NAME, N, ATOMS, A, B, C, D, E, F)                                                             \
  template <>                                                                                                             \
  struct Wgmma<T, ATOMS> {                                                                                                \
    static __device__ __forceinline__ void Multiply(float (&acc)[ATOMS][4], uint64_t a, uint64_t b, bool add) {           \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   "." NAME " {" JAX_VARLEN_REGISTERS##ATOMS "}, " A ", " B ", add, 1, 1, 0, 0;\n}\n"                     \
                   : JAX_VARLEN_ATOMS##ATOMS##_                                                                           \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                         \
    }                                                                                                                     \
    static __device__ __forceinline__ void MultiplyTransposed(float (&acc)[ATOMS][4], const uint32_t (&a)[4], uint64_t b, \
                                                              bool add) {                                                 \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " F ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME \
                   "." NAME " {" JAX_VARLEN_REGISTERS##ATOMS "}, {" A ", " B ", " C ", " D "}, " E ", add, 1, 1, 1;\n}\n" \
                   : JAX_VARLEN_ATOMS##ATOMS##_                                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                     \
    }                                                                                                                     \
  }

JAX_VARLEN_WGMMA(__nv_bfloat16, "bf16", 64, 8, "%32", "%33", "%34", "%35", "%36", "%37");
JAX_VARLEN_WGMMA(__half, "f16", 64, 8, "%32", "%33", "%34", "%35", "%36", "%37");
JAX_VARLEN_WGMMA(__nv_bfloat16, "bf16", 80, 10, "%40", "%41", "%42", "%43", "%44", "%45");
JAX_VARLEN_WGMMA(__half, "f16", 80, 10, "%40", "%41", "%42", "%43", "%44", "%45");
JAX_VARLEN_WGMMA(__nv_bfloat16, "bf16", 96, 12, "%48", "%49", "%50", "%51", "%52", "%53");
JAX_VARLEN_WGMMA(__half, "f16", 96, 12, "%48", "%49", "%50", "%51", "%52", "%53");
JAX_VARLEN_WGMMA(__nv_bfloat16, "bf16", 112, 14, "%56", "%57", "%58", "%59", "%60", "%61");
JAX_VARLEN_WGMMA(__half, "f16", 112, 14, "%56", "%57", "%58", "%59", "%60", "%61");
JAX_VARLEN_WGMMA(__nv_bfloat16, "bf16", 128, 16, "%64", "%65", "%66", "%67", "%68", "%69");
JAX_VARLEN_WGMMA(__half, "f16", 128, 16, "%64", "%65", "%66", "%67", "%68", "%69");
JAX_VARLEN_WGMMA(__nv_bfloat16, "bf16", 176, 22, "%88", "%89", "%90", "%91", "%92", "%93");
JAX_VARLEN_WGMMA(__half, "f16", 176, 22, "%88", "%89", "%90", "%91", "%92", "%93");
JAX_VARLEN_WGMMA(__nv_bfloat16, "bf16", 192, 24, "%96", "%97", "%98", "%99", "%100", "%101");
JAX_VARLEN_WGMMA(__half, "f16", 192, 24, "%96", "%97", "%98", "%99", "%100", "%101");
JAX_VARLEN_WGMMA(__nv_bfloat16, "bf16", 256, 32, "%128", "%129", "%130", "%131", "%132", "%133");
JAX_VARLEN_WGMMA(__half, "f16", 256, 32, "%128", "%129", "%130", "%131", "%132", "%133");

#undef JAX_VARLEN_WGMMA

}  // namespace jax_varlen::ptx
