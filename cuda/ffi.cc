// The CUDA module: FFI handlers and what Python asks of them. The only file of this folder that knows XLA and nanobind.
#include <cuda_runtime.h>
#include <nanobind/nanobind.h>

#include <climits>
#include <string>

#include "append.h"
#include "check.h"
#include "dispatch.h"
#include "ffi_args.h"

namespace jax_varlen {
namespace {

namespace nb = nanobind;

ffi::Error Check(const FwdParams& params, int64_t workspace_words, int64_t least_words) {
  if (params.dtype == DType::kF32) return ffi::Error::InvalidArgument("The CUDA kernels take bfloat16 and float16.");
  const int64_t multiple = params.kv_dtype == DType::kE4M3 ? 16 : 8;
  for (int64_t head_dim : {params.head_dim, params.head_dim_v})
    if (head_dim % multiple != 0 || head_dim > kMaxHeadDim)
      return ffi::Error::InvalidArgument("head_dim must be a multiple of " + std::to_string(multiple) + " up to 256, got " +
                                         std::to_string(head_dim) + ".");
  if (params.total_q > INT_MAX || params.total_k > INT_MAX)
    return ffi::Error::InvalidArgument("total_q and total_k must fit in int32, as offsets do.");
  if (workspace_words < least_words) return ffi::Error::InvalidArgument("The workspace is too small.");
  return ffi::Error::Success();
}

ffi::Error Launched(cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("The CUDA kernel could not be launched: ") + cudaGetErrorString(error) + ".");
}

ffi::Error FwdHandler(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens_q, Offsets cu_seqlens_k,
                      Offsets seqused_q, Offsets seqused_k, Offsets block_table, Floats softmax_scale, Floats alibi_slopes,
                      Floats sinks, Floats k_scale, Floats v_scale, ffi::Result<ffi::AnyBuffer> out, ffi::Result<Floats> lse,
                      int64_t window_left, int64_t window_right, float softcap, int64_t batch_invariant,
                      ffi::Result<Offsets> workspace, cudaStream_t stream) {
  FwdParams params;
  ffi::Error error = ReadFwdArgs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, alibi_slopes,
                                 {block_table, sinks, k_scale, v_scale}, out, lse, window_left, window_right, softcap,
                                 batch_invariant, &params);
  if (error.failure()) return error;
  error = Check(params, workspace->element_count(), FwdWorkspaceWords(params));
  if (error.failure()) return error;
  if (params.total_q == 0) return ffi::Error::Success();
  return Launched(Fwd(params, workspace->typed_data(), stream));
}

// dq and turns are aliased to operands that hold zeros. turns has no elements where the order of additions does not matter.
ffi::Error BwdHandler(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens_q, Offsets cu_seqlens_k,
                      Offsets seqused_q, Offsets seqused_k, Floats softmax_scale, Floats alibi_slopes, ffi::AnyBuffer dout,
                      Floats lse, Floats delta, ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                      ffi::Result<ffi::AnyBuffer> dv, int64_t window_left, int64_t window_right, float softcap, Floats dq_zeros,
                      Offsets turns_zeros, ffi::Result<Offsets> turns, ffi::Result<Offsets> workspace, cudaStream_t stream) {
  BwdParams params;
  ffi::Error error = ReadBwdArgs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, alibi_slopes, dout,
                                 lse, delta, dq, dk, dv, window_left, window_right, softcap, ffi::F32, &params);
  if (error.failure()) return error;
  const FwdParams& fwd = params.fwd;
  error = Check(fwd, workspace->element_count(), WorkspaceWords(fwd.total_k, fwd.batch));
  if (error.failure()) return error;
  if (dq->untyped_data() != dq_zeros.untyped_data() ||
      (turns->element_count() != 0 && turns->untyped_data() != turns_zeros.untyped_data()))
    return ffi::Error::Internal("dq and turns must be aliased to their operands.");
  const bool in_turn = turns->element_count() != 0;
  if (in_turn && !internal::Equal(turns->dimensions(), {fwd.num_heads, DqTiles(fwd), 2}))
    return internal::BadShape("turns", turns->dimensions(), "(num_heads, tiles of dq, 2)");
  if (fwd.total_k == 0) return ffi::Error::Success();
  const Turns order = {in_turn ? turns->typed_data() : nullptr, DqTiles(fwd)};
  return Launched(Bwd(params, workspace->typed_data(), order, stream));
}

ffi::Error AppendHandler(ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens,
                         Offsets seqused_k, Offsets block_table, Floats k_scale, Floats v_scale,
                         ffi::Result<ffi::AnyBuffer> k_result, ffi::Result<ffi::AnyBuffer> v_result, cudaStream_t stream) {
  AppendParams params;
  ffi::Error error =
      ReadAppendArgs(k_cache, v_cache, k, v, cu_seqlens, seqused_k, block_table, k_scale, v_scale, k_result, v_result, &params);
  if (error.failure()) return error;
  return Launched(Append(params, stream));
}

ffi::Error Checked(cudaError_t error, const std::string& wrong) {
  if (error != cudaSuccess)
    return ffi::Error::Internal(std::string("The offsets could not be read: ") + cudaGetErrorString(error) + ".");
  return wrong.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(wrong);
}

bool IsAbsentOr(const Offsets& x, std::initializer_list<int64_t> dims) {
  return x.element_count() == 0 || internal::Equal(x.dimensions(), dims);
}

// Of q and k the shapes alone are read. The result is cu_seqlens_q, so that the kernel waits for the check.
ffi::Error CheckHandler(Offsets cu_seqlens_q, Offsets cu_seqlens_k, Offsets seqused_q, Offsets seqused_k, Offsets block_table,
                        ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::Result<Offsets> result, cudaStream_t stream) {
  const internal::Dims cu = cu_seqlens_q.dimensions(), dk = k.dimensions(), table = block_table.dimensions();
  const int64_t batch = cu.size() == 1 ? cu[0] - 1 : -1, max_blocks = table.size() == 2 ? table[1] : 0;
  const bool paged = dk.size() == 4;
  if (batch < 0 || !IsAbsentOr(cu_seqlens_k, {batch + 1}) || !IsAbsentOr(seqused_q, {batch}) ||
      !IsAbsentOr(seqused_k, {batch}) || (paged && !internal::Equal(table, {batch, max_blocks})) ||
      q.dimensions().size() != 3 || (!paged && dk.size() != 3) || (paged && dk[1] < 1))
    return ffi::Error::InvalidArgument("The offsets have shapes that do not belong together.");
  if (result->untyped_data() != cu_seqlens_q.untyped_data())
    return ffi::Error::Internal("The result must be aliased to cu_seqlens_q.");
  FwdParams params{};
  params.cu_seqlens_q = cu_seqlens_q.typed_data();
  params.cu_seqlens_k = DataOrNull<int32_t>(cu_seqlens_k);
  params.seqused_q = DataOrNull<int32_t>(seqused_q);
  params.seqused_k = DataOrNull<int32_t>(seqused_k);
  params.block_table = paged ? DataOrNull<int32_t>(block_table) : nullptr;
  params.batch = batch;
  params.total_q = q.dimensions()[0];
  params.total_k = dk[0];
  if (paged) {
    params.num_blocks = dk[0];
    params.block_size = dk[1];
    params.max_blocks = max_blocks;
  }
  std::string wrong;
  const cudaError_t error = CheckOnDevice(params, stream, &wrong);
  return Checked(error, wrong);
}

// Of k and the pool the shapes alone are read. The result is cu_seqlens.
ffi::Error CheckAppendHandler(Offsets cu_seqlens, Offsets seqused_k, Offsets block_table, ffi::AnyBuffer k, ffi::AnyBuffer pool,
                              ffi::Result<Offsets> result, cudaStream_t stream) {
  const internal::Dims cu = cu_seqlens.dimensions(), table = block_table.dimensions(), dpool = pool.dimensions();
  const int64_t batch = cu.size() == 1 ? cu[0] - 1 : -1, max_blocks = table.size() == 2 ? table[1] : 0;
  if (batch < 0 || !internal::Equal(seqused_k.dimensions(), {batch}) || !internal::Equal(table, {batch, max_blocks}) ||
      k.dimensions().size() != 3 || dpool.size() != 4 || dpool[1] < 1)
    return ffi::Error::InvalidArgument("The offsets have shapes that do not belong together.");
  if (result->untyped_data() != cu_seqlens.untyped_data())
    return ffi::Error::Internal("The result must be aliased to cu_seqlens.");
  AppendParams params{};
  params.cu_seqlens = cu_seqlens.typed_data();
  params.seqused_k = DataOrNull<int32_t>(seqused_k);
  params.block_table = DataOrNull<int32_t>(block_table);
  params.total = k.dimensions()[0];
  params.batch = batch;
  params.num_blocks = dpool[0];
  params.block_size = dpool[1];
  params.max_blocks = max_blocks;
  std::string wrong;
  const cudaError_t error = CheckOnDevice(params, stream, &wrong);
  return Checked(error, wrong);
}

// These launch kernels and do nothing else, so that XLA may capture them into a CUDA graph.
XLA_FFI_DEFINE_HANDLER(fwd, FwdHandler, BindFwdArgs().Ret<Offsets>().Ctx<ffi::PlatformStream<cudaStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    bwd, BwdHandler,
    BindBwdArgs().Arg<Floats>().Arg<Offsets>().Ret<Offsets>().Ret<Offsets>().Ctx<ffi::PlatformStream<cudaStream_t>>(),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(append, AppendHandler, BindAppendArgs().Ctx<ffi::PlatformStream<cudaStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});

// These read device memory on the host, so that no graph may hold them.
XLA_FFI_DEFINE_HANDLER(check, CheckHandler,
                       ffi::Ffi::Bind()
                           .Arg<Offsets>()
                           .Arg<Offsets>()
                           .Arg<Offsets>()
                           .Arg<Offsets>()
                           .Arg<Offsets>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<Offsets>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>());

XLA_FFI_DEFINE_HANDLER(check_append, CheckAppendHandler,
                       ffi::Ffi::Bind()
                           .Arg<Offsets>()
                           .Arg<Offsets>()
                           .Arg<Offsets>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<Offsets>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>());

nb::dict Registrations() {
  nb::dict registrations;
  registrations["jax_varlen_fwd_v1"] = nb::capsule(reinterpret_cast<void*>(fwd));
  registrations["jax_varlen_bwd_v1"] = nb::capsule(reinterpret_cast<void*>(bwd));
  registrations["jax_varlen_append_v1"] = nb::capsule(reinterpret_cast<void*>(append));
  registrations["jax_varlen_check_v1"] = nb::capsule(reinterpret_cast<void*>(check));
  registrations["jax_varlen_check_append_v1"] = nb::capsule(reinterpret_cast<void*>(check_append));
  return registrations;
}

}  // namespace
}  // namespace jax_varlen

NB_MODULE(_cuda, m) {
  m.def("registrations", &jax_varlen::Registrations);
  m.def("ffi_api_version", [] { return nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("architectures", [] { return JAX_VARLEN_CUDA_ARCHITECTURES; });
}
