// What the CPU and the CUDA handler share: the binding of the FFI operands and the check of their shapes.
//
// Python's abstract evaluation gives the errors that people read. XLA checks no shape of a custom call, so whatever
// would make a kernel leave its arrays is checked here once more. An optional operand that is absent is an array of no
// elements.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_varlen {

namespace ffi = xla::ffi;

using Offsets = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

// Binds, in this order: q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, alibi_slopes, sinks;
// out, lse; window_left, window_right, softcap. The platform appends what it needs of its own.
inline auto BindFwdArgs() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Ret<ffi::AnyBuffer>()
      .Ret<Floats>()
      .Attr<int64_t>("window_left")
      .Attr<int64_t>("window_right")
      .Attr<float>("softcap");
}

// Binds, in this order: q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, alibi_slopes, dout, lse,
// delta; dq, dk, dv; window_left, window_right, softcap.
inline auto BindBwdArgs() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>()
      .Attr<int64_t>("window_left")
      .Attr<int64_t>("window_right")
      .Attr<float>("softcap");
}

namespace internal {

using Dims = ffi::Span<const int64_t>;

inline std::string ToString(Dims dims) {
  std::string s = "(";
  for (size_t i = 0; i < dims.size(); ++i) s += (i ? ", " : "") + std::to_string(dims[i]);
  return s + ")";
}

inline bool Equal(Dims dims, std::initializer_list<int64_t> expected) {
  if (dims.size() != expected.size()) return false;
  size_t i = 0;
  for (int64_t e : expected)
    if (dims[i++] != e) return false;
  return true;
}

inline ffi::Error BadShape(const char* name, Dims got, const std::string& expected) {
  return ffi::Error::InvalidArgument(std::string(name) + " must have shape " + expected + ", got " + ToString(got) + ".");
}

}  // namespace internal

// Null for an absent operand.
template <typename T, typename Buffer>
const T* DataOrNull(const Buffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : reinterpret_cast<const T*>(buffer.untyped_data());
}

// All but the results, and lse. `sinks` may be null: the backward pass needs none.
inline ffi::Error ReadInputs(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens_q, Offsets cu_seqlens_k,
                             Offsets seqused_q, Offsets seqused_k, Floats softmax_scale, Floats alibi_slopes,
                             const Floats* sinks, int64_t window_left, int64_t window_right, float softcap, FwdParams* params) {
  using internal::BadShape;
  using internal::Dims;
  using internal::Equal;

  switch (q.element_type()) {
    case ffi::F32:
      params->dtype = DType::kF32;
      break;
    case ffi::BF16:
      params->dtype = DType::kBF16;
      break;
    case ffi::F16:
      params->dtype = DType::kF16;
      break;
    default:
      return ffi::Error::InvalidArgument("q must be float32, bfloat16 or float16.");
  }
  if (k.element_type() != q.element_type() || v.element_type() != q.element_type())
    return ffi::Error::InvalidArgument("q, k and v must have one dtype.");

  const Dims dq = q.dimensions(), dk = k.dimensions(), dv = v.dimensions(), dcu = cu_seqlens_q.dimensions();
  if (dq.size() != 3) return BadShape("q", dq, "(total_q, num_heads, head_dim)");
  if (dk.size() != 3 || dk[2] != dq[2]) return BadShape("k", dk, "(total_k, num_kv_heads, head_dim)");
  if (dv.size() != 3 || dv[0] != dk[0] || dv[1] != dk[1]) return BadShape("v", dv, "(total_k, num_kv_heads, head_dim_v)");
  const int64_t total_q = dq[0], num_heads = dq[1], head_dim = dq[2];
  const int64_t total_k = dk[0], num_kv_heads = dk[1], head_dim_v = dv[2];
  if (num_heads < 1 || num_kv_heads < 1 || num_heads % num_kv_heads != 0)
    return ffi::Error::InvalidArgument("num_heads must be a positive multiple of num_kv_heads.");
  if (head_dim < 1 || head_dim_v < 1) return ffi::Error::InvalidArgument("head_dim and head_dim_v must be positive.");
  if (dcu.size() != 1 || dcu[0] < 1) return BadShape("cu_seqlens_q", dcu, "(batch + 1,)");
  const int64_t batch = dcu[0] - 1;
  if (!Equal(cu_seqlens_k.dimensions(), {batch + 1}))
    return BadShape("cu_seqlens_k", cu_seqlens_k.dimensions(), "(batch + 1,)");
  if (seqused_q.element_count() != 0 && !Equal(seqused_q.dimensions(), {batch}))
    return BadShape("seqused_q", seqused_q.dimensions(), "(batch,)");
  if (seqused_k.element_count() != 0 && !Equal(seqused_k.dimensions(), {batch}))
    return BadShape("seqused_k", seqused_k.dimensions(), "(batch,)");
  if (softmax_scale.element_count() != 1) return BadShape("softmax_scale", softmax_scale.dimensions(), "()");
  const bool alibi_per_sequence = Equal(alibi_slopes.dimensions(), {batch, num_heads});
  if (alibi_slopes.element_count() != 0 && !alibi_per_sequence && !Equal(alibi_slopes.dimensions(), {num_heads}))
    return BadShape("alibi_slopes", alibi_slopes.dimensions(), "(num_heads,) or (batch, num_heads)");
  if (sinks && sinks->element_count() != 0 && !Equal(sinks->dimensions(), {num_heads}))
    return BadShape("sinks", sinks->dimensions(), "(num_heads,)");

  params->q = q.untyped_data();
  params->k = k.untyped_data();
  params->v = v.untyped_data();
  params->cu_seqlens_q = cu_seqlens_q.typed_data();
  params->cu_seqlens_k = cu_seqlens_k.typed_data();
  params->seqused_q = DataOrNull<int32_t>(seqused_q);
  params->seqused_k = DataOrNull<int32_t>(seqused_k);
  params->softmax_scale = softmax_scale.typed_data();
  params->alibi_slopes = DataOrNull<float>(alibi_slopes);
  params->sinks = sinks ? DataOrNull<float>(*sinks) : nullptr;
  params->out = nullptr;
  params->lse = nullptr;
  params->total_q = total_q;
  params->total_k = total_k;
  params->batch = batch;
  params->num_heads = num_heads;
  params->num_kv_heads = num_kv_heads;
  params->head_dim = head_dim;
  params->head_dim_v = head_dim_v;
  params->alibi_batch_stride = alibi_per_sequence ? num_heads : 0;
  params->window_left = window_left;
  params->window_right = window_right;
  params->softcap = softcap;
  return ffi::Error::Success();
}

inline ffi::Error ReadFwdArgs(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens_q, Offsets cu_seqlens_k,
                              Offsets seqused_q, Offsets seqused_k, Floats softmax_scale, Floats alibi_slopes, Floats sinks,
                              ffi::Result<ffi::AnyBuffer> out, ffi::Result<Floats> lse, int64_t window_left,
                              int64_t window_right, float softcap, FwdParams* params) {
  ffi::Error error = ReadInputs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, alibi_slopes, &sinks,
                                window_left, window_right, softcap, params);
  if (error.failure()) return error;
  if (out->element_type() != q.element_type()) return ffi::Error::InvalidArgument("out must have the dtype of q.");
  if (!internal::Equal(out->dimensions(), {params->total_q, params->num_heads, params->head_dim_v}))
    return internal::BadShape("out", out->dimensions(), "(total_q, num_heads, head_dim_v)");
  if (!internal::Equal(lse->dimensions(), {params->num_heads, params->total_q}))
    return internal::BadShape("lse", lse->dimensions(), "(num_heads, total_q)");
  params->out = out->untyped_data();
  params->lse = lse->typed_data();
  return ffi::Error::Success();
}

// dq has the dtype that the platform gives it: that of q, or float32 where it is accumulated in device memory.
inline ffi::Error ReadBwdArgs(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens_q, Offsets cu_seqlens_k,
                              Offsets seqused_q, Offsets seqused_k, Floats softmax_scale, Floats alibi_slopes,
                              ffi::AnyBuffer dout, Floats lse, Floats delta, ffi::Result<ffi::AnyBuffer> dq,
                              ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv, int64_t window_left,
                              int64_t window_right, float softcap, ffi::DataType dq_type, BwdParams* params) {
  FwdParams& fwd = params->fwd;
  ffi::Error error = ReadInputs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, alibi_slopes, nullptr,
                                window_left, window_right, softcap, &fwd);
  if (error.failure()) return error;
  if (dout.element_type() != q.element_type() || dk->element_type() != q.element_type() ||
      dv->element_type() != q.element_type())
    return ffi::Error::InvalidArgument("dout, dk and dv must have the dtype of q.");
  if (dq->element_type() != dq_type) return ffi::Error::InvalidArgument("dq has the wrong dtype.");
  if (!internal::Equal(dout.dimensions(), {fwd.total_q, fwd.num_heads, fwd.head_dim_v}))
    return internal::BadShape("dout", dout.dimensions(), "(total_q, num_heads, head_dim_v)");
  for (const auto& [name, x] : {std::pair("lse", lse), std::pair("delta", delta)})
    if (!internal::Equal(x.dimensions(), {fwd.num_heads, fwd.total_q}))
      return internal::BadShape(name, x.dimensions(), "(num_heads, total_q)");
  if (!internal::Equal(dq->dimensions(), {fwd.total_q, fwd.num_heads, fwd.head_dim}))
    return internal::BadShape("dq", dq->dimensions(), "(total_q, num_heads, head_dim)");
  if (!internal::Equal(dk->dimensions(), {fwd.total_k, fwd.num_kv_heads, fwd.head_dim}))
    return internal::BadShape("dk", dk->dimensions(), "(total_k, num_kv_heads, head_dim)");
  if (!internal::Equal(dv->dimensions(), {fwd.total_k, fwd.num_kv_heads, fwd.head_dim_v}))
    return internal::BadShape("dv", dv->dimensions(), "(total_k, num_kv_heads, head_dim_v)");
  fwd.lse = lse.typed_data();
  params->dout = dout.untyped_data();
  params->delta = delta.typed_data();
  params->dq = dq->untyped_data();
  params->dk = dk->untyped_data();
  params->dv = dv->untyped_data();
  return ffi::Error::Success();
}

}  // namespace jax_varlen
