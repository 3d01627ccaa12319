// The launch of a kernel that follows another one of ours.
#pragma once

#include <cuda_runtime.h>

namespace jax_varlen {

// Launches a kernel whose CTAs may start before the kernel before it in the stream has ended, as soon as all of that one's have
// called ptx::LaunchDependents or ended. It must call ptx::WaitForPrerequisites before it touches memory. Only code for compute
// capability 9.0 and later has these two; what was compiled for earlier ones, wherever it runs, is launched as any kernel.
template <typename... Params, typename... Args>
cudaError_t LaunchDependent(void (*kernel)(Params...), int grid, int threads, int smem_bytes, cudaStream_t stream,
                            const Args&... args) {
  cudaFuncAttributes compiled;
  if (cudaError_t error = cudaFuncGetAttributes(&compiled, kernel)) return error;
  cudaLaunchAttribute may_overlap;
  may_overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  may_overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &may_overlap;
  config.numAttrs = compiled.ptxVersion >= 90;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace jax_varlen
