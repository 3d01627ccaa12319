// The CUDA module: FFI handlers and what Python asks of them. The only file of this folder that knows XLA and nanobind.
#include <cuda_runtime.h>
#include <nanobind/nanobind.h>

#include <climits>
#include <string>

#include "dispatch.h"
#include "ffi_args.h"

namespace jax_varlen {
namespace {

namespace nb = nanobind;

ffi::Error Check(const FwdParams& params, int64_t workspace_words) {
  if (params.dtype == DType::kF32) return ffi::Error::InvalidArgument("The CUDA kernels take bfloat16 and float16.");
  for (int64_t head_dim : {params.head_dim, params.head_dim_v})
    if (head_dim % 8 != 0 || head_dim > kMaxHeadDim)
      return ffi::Error::InvalidArgument("head_dim must be a multiple of 8 up to 256, got " + std::to_string(head_dim) + ".");
  if (params.total_q > INT_MAX) return ffi::Error::InvalidArgument("total_q must fit in int32, as offsets do.");
  if (workspace_words < WorkspaceWords(params)) return ffi::Error::InvalidArgument("The workspace is too small.");
  return ffi::Error::Success();
}

ffi::Error FwdHandler(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens_q, Offsets cu_seqlens_k,
                      Offsets seqused_q, Offsets seqused_k, Floats softmax_scale, Floats alibi_slopes, Floats sinks,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<Floats> lse, int64_t window_left, int64_t window_right,
                      float softcap, ffi::Result<Offsets> workspace, cudaStream_t stream) {
  FwdParams params;
  ffi::Error error = ReadFwdArgs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, alibi_slopes, sinks,
                                 out, lse, window_left, window_right, softcap, &params);
  if (error.failure()) return error;
  error = Check(params, workspace->element_count());
  if (error.failure()) return error;
  if (params.total_q == 0) return ffi::Error::Success();
  if (cudaError_t failure = Fwd(params, workspace->typed_data(), stream))
    return ffi::Error::Internal(std::string("The CUDA kernel could not be launched: ") + cudaGetErrorString(failure) + ".");
  return ffi::Error::Success();
}

// Launches kernels and nothing else, so that XLA may capture it into a CUDA graph.
XLA_FFI_DEFINE_HANDLER(fwd, FwdHandler, BindFwdArgs().Ret<Offsets>().Ctx<ffi::PlatformStream<cudaStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});

nb::dict Registrations() {
  nb::dict registrations;
  registrations["jax_varlen_fwd_v1"] = nb::capsule(reinterpret_cast<void*>(fwd));
  return registrations;
}

}  // namespace
}  // namespace jax_varlen

NB_MODULE(_cuda, m) {
  m.def("registrations", &jax_varlen::Registrations);
  m.def("ffi_api_version", [] { return nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("architectures", [] { return JAX_VARLEN_CUDA_ARCHITECTURES; });
}
