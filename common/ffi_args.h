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

// Binds, in this order: q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table, softmax_scale, alibi_slopes,
// sinks, k_scale, v_scale; out, lse; window_left, window_right, softcap, batch_invariant. The platform
// appends what it needs of its own.
inline auto BindFwdArgs() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Ret<ffi::AnyBuffer>()
      .Ret<Floats>()
      .Attr<int64_t>("window_left")
      .Attr<int64_t>("window_right")
      .Attr<float>("softcap")
      .Attr<int64_t>("batch_invariant");
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

// Binds, in this order: k_cache, v_cache, k, v, cu_seqlens, seqused_k, block_table, k_scale, v_scale; the pools again.
inline auto BindAppendArgs() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Offsets>()
      .Arg<Floats>()
      .Arg<Floats>()
      .Ret<ffi::AnyBuffer>()
      .Ret<ffi::AnyBuffer>();
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

// What the forward pass alone takes.
struct FwdOnly {
  Offsets block_table;
  Floats sinks, k_scale, v_scale;
};

namespace internal {

inline bool ReadDType(ffi::DataType type, DType* dtype) {
  switch (type) {
    case ffi::F32:
      *dtype = DType::kF32;
      return true;
    case ffi::BF16:
      *dtype = DType::kBF16;
      return true;
    case ffi::F16:
      *dtype = DType::kF16;
      return true;
    default:
      return false;
  }
}

// k and v: packed, or a pool of blocks with its table.
inline ffi::Error ReadKv(ffi::AnyBuffer k, ffi::AnyBuffer v, int64_t head_dim, int64_t batch, const Offsets* block_table,
                         FwdParams* params) {
  const Dims dk = k.dimensions(), dv = v.dimensions();
  const bool paged = dk.size() == 4;
  const char* names[2] = {paged ? "(num_blocks, block_size, num_kv_heads, head_dim)" : "(total_k, num_kv_heads, head_dim)",
                          paged ? "(num_blocks, block_size, num_kv_heads, head_dim_v)" : "(total_k, num_kv_heads, head_dim_v)"};
  const size_t rank = paged ? 4 : 3;
  if (dk.size() != rank || dk[rank - 1] != head_dim) return BadShape("k", dk, names[0]);
  if (dv.size() != rank) return BadShape("v", dv, names[1]);
  for (size_t i = 0; i + 1 < rank; ++i)
    if (dv[i] != dk[i]) return BadShape("v", dv, names[1]);
  params->k = k.untyped_data();
  params->v = v.untyped_data();
  params->num_kv_heads = dk[rank - 2];
  params->head_dim_v = dv[rank - 1];
  params->total_k = paged ? dk[0] * dk[1] : dk[0];
  params->block_table = nullptr;
  params->num_blocks = params->block_size = params->max_blocks = 0;
  if (!paged) return ffi::Error::Success();
  if (dk[1] < 1) return BadShape("k", dk, names[0]);
  if (!block_table) return ffi::Error::InvalidArgument("k and v of the backward pass have rank 3.");
  const Dims table = block_table->dimensions();
  if (table.size() != 2 || table[0] != batch) return BadShape("block_table", table, "(batch, max_blocks)");
  params->block_table = block_table->typed_data();
  params->num_blocks = dk[0];
  params->block_size = dk[1];
  params->max_blocks = table[1];
  return ffi::Error::Success();
}

}  // namespace internal

// All but the results, and lse. `fwd_only` is null in the backward pass.
inline ffi::Error ReadInputs(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens_q, Offsets cu_seqlens_k,
                             Offsets seqused_q, Offsets seqused_k, Floats softmax_scale, Floats alibi_slopes,
                             const FwdOnly* fwd_only, int64_t window_left, int64_t window_right, float softcap,
                             FwdParams* params) {
  using internal::BadShape;
  using internal::Dims;
  using internal::Equal;

  if (!internal::ReadDType(q.element_type(), &params->dtype))
    return ffi::Error::InvalidArgument("q must be float32, bfloat16 or float16.");
  if (k.element_type() != v.element_type()) return ffi::Error::InvalidArgument("k and v must have one dtype.");
  const bool paged = k.dimensions().size() == 4;
  if (paged && k.element_type() == ffi::F8E4M3FN) {
    params->kv_dtype = DType::kE4M3;
  } else if (k.element_type() == q.element_type()) {
    params->kv_dtype = params->dtype;
  } else {
    return ffi::Error::InvalidArgument("k and v must have the dtype of q, or be pools of float8_e4m3fn.");
  }

  const Dims dq = q.dimensions(), dcu = cu_seqlens_q.dimensions();
  if (dq.size() != 3) return BadShape("q", dq, "(total_q, num_heads, head_dim)");
  const int64_t total_q = dq[0], num_heads = dq[1], head_dim = dq[2];
  if (dcu.size() != 1 || dcu[0] < 1) return BadShape("cu_seqlens_q", dcu, "(batch + 1,)");
  const int64_t batch = dcu[0] - 1;
  ffi::Error error = internal::ReadKv(k, v, head_dim, batch, fwd_only ? &fwd_only->block_table : nullptr, params);
  if (error.failure()) return error;
  if (num_heads < 1 || params->num_kv_heads < 1 || num_heads % params->num_kv_heads != 0)
    return ffi::Error::InvalidArgument("num_heads must be a positive multiple of num_kv_heads.");
  if (head_dim < 1 || params->head_dim_v < 1) return ffi::Error::InvalidArgument("head_dim and head_dim_v must be positive.");
  const bool lengths_alone = paged && cu_seqlens_k.element_count() == 0 && Equal(seqused_k.dimensions(), {batch});
  if (!lengths_alone && !Equal(cu_seqlens_k.dimensions(), {batch + 1}))
    return BadShape("cu_seqlens_k", cu_seqlens_k.dimensions(), "(batch + 1,)");
  if (seqused_q.element_count() != 0 && !Equal(seqused_q.dimensions(), {batch}))
    return BadShape("seqused_q", seqused_q.dimensions(), "(batch,)");
  if (seqused_k.element_count() != 0 && !Equal(seqused_k.dimensions(), {batch}))
    return BadShape("seqused_k", seqused_k.dimensions(), "(batch,)");
  if (softmax_scale.element_count() != 1) return BadShape("softmax_scale", softmax_scale.dimensions(), "()");
  const bool alibi_per_sequence = Equal(alibi_slopes.dimensions(), {batch, num_heads});
  if (alibi_slopes.element_count() != 0 && !alibi_per_sequence && !Equal(alibi_slopes.dimensions(), {num_heads}))
    return BadShape("alibi_slopes", alibi_slopes.dimensions(), "(num_heads,) or (batch, num_heads)");
  params->sinks = params->k_scale = params->v_scale = nullptr;
  if (fwd_only) {
    const int64_t num_kv_heads = params->num_kv_heads;
    const auto read = [&](const char* name, const Floats& x, int64_t n, const float** data) {
      *data = DataOrNull<float>(x);
      return *data == nullptr || Equal(x.dimensions(), {n}) ? ffi::Error::Success()
                                                            : BadShape(name, x.dimensions(), "(" + std::to_string(n) + ",)");
    };
    if (error = read("sinks", fwd_only->sinks, num_heads, &params->sinks); error.failure()) return error;
    if (error = read("k_scale", fwd_only->k_scale, num_kv_heads, &params->k_scale); error.failure()) return error;
    if (error = read("v_scale", fwd_only->v_scale, num_kv_heads, &params->v_scale); error.failure()) return error;
  }

  params->q = q.untyped_data();
  params->cu_seqlens_q = cu_seqlens_q.typed_data();
  params->cu_seqlens_k = lengths_alone ? nullptr : cu_seqlens_k.typed_data();
  params->seqused_q = DataOrNull<int32_t>(seqused_q);
  // Of no sequence the lengths are an array of no elements; that they are given still counts.
  params->seqused_k = lengths_alone ? seqused_k.typed_data() : DataOrNull<int32_t>(seqused_k);
  params->softmax_scale = softmax_scale.typed_data();
  params->alibi_slopes = DataOrNull<float>(alibi_slopes);
  params->out = nullptr;
  params->lse = nullptr;
  params->total_q = total_q;
  params->batch = batch;
  params->num_heads = num_heads;
  params->group_size = static_cast<int32_t>(num_heads / params->num_kv_heads);
  params->head_dim = head_dim;
  params->alibi_batch_stride = alibi_per_sequence ? num_heads : 0;
  params->window_left = window_left;
  params->window_right = window_right;
  params->softcap = softcap;
  params->batch_invariant = false;
  return ffi::Error::Success();
}

inline ffi::Error ReadFwdArgs(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Offsets cu_seqlens_q, Offsets cu_seqlens_k,
                              Offsets seqused_q, Offsets seqused_k, Floats softmax_scale, Floats alibi_slopes,
                              const FwdOnly& fwd_only, ffi::Result<ffi::AnyBuffer> out, ffi::Result<Floats> lse,
                              int64_t window_left, int64_t window_right, float softcap, int64_t batch_invariant,
                              FwdParams* params) {
  ffi::Error error = ReadInputs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, alibi_slopes,
                                &fwd_only, window_left, window_right, softcap, params);
  if (error.failure()) return error;
  if (out->element_type() != q.element_type()) return ffi::Error::InvalidArgument("out must have the dtype of q.");
  if (!internal::Equal(out->dimensions(), {params->total_q, params->num_heads, params->head_dim_v}))
    return internal::BadShape("out", out->dimensions(), "(total_q, num_heads, head_dim_v)");
  if (!internal::Equal(lse->dimensions(), {params->num_heads, params->total_q}))
    return internal::BadShape("lse", lse->dimensions(), "(num_heads, total_q)");
  params->out = out->untyped_data();
  params->lse = lse->typed_data();
  params->batch_invariant = batch_invariant != 0;
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

// The pools are results that share the memory of their operands.
inline ffi::Error ReadAppendArgs(ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache, ffi::AnyBuffer k, ffi::AnyBuffer v,
                                 Offsets cu_seqlens, Offsets seqused_k, Offsets block_table, Floats k_scale, Floats v_scale,
                                 ffi::Result<ffi::AnyBuffer> k_result, ffi::Result<ffi::AnyBuffer> v_result,
                                 AppendParams* params) {
  using internal::BadShape;
  using internal::Dims;
  using internal::Equal;

  if (!internal::ReadDType(k.element_type(), &params->dtype) || v.element_type() != k.element_type())
    return ffi::Error::InvalidArgument("k and v must both be float32, bfloat16 or float16.");
  if (k_cache.element_type() != k.element_type() && k_cache.element_type() != ffi::F8E4M3FN)
    return ffi::Error::InvalidArgument("k_cache must have the dtype of k, or float8_e4m3fn.");
  if (v_cache.element_type() != k_cache.element_type())
    return ffi::Error::InvalidArgument("k_cache and v_cache must have one dtype.");
  params->cache_dtype = k_cache.element_type() == k.element_type() ? params->dtype : DType::kE4M3;

  const Dims dk = k_cache.dimensions(), dv = v_cache.dimensions(), dcu = cu_seqlens.dimensions();
  if (dk.size() != 4 || dk[1] < 1 || dk[2] < 1 || dk[3] < 1)
    return BadShape("k_cache", dk, "(num_blocks, block_size, num_kv_heads, head_dim)");
  const int64_t num_blocks = dk[0], block_size = dk[1], num_kv_heads = dk[2], head_dim = dk[3];
  if (dv.size() != 4 || dv[3] < 1 || !Equal(dv, {num_blocks, block_size, num_kv_heads, dv[3]}))
    return BadShape("v_cache", dv, "(num_blocks, block_size, num_kv_heads, head_dim_v)");
  const int64_t head_dim_v = dv[3], total = k.dimensions().size() == 3 ? k.dimensions()[0] : 0;
  if (!Equal(k.dimensions(), {total, num_kv_heads, head_dim}))
    return BadShape("k", k.dimensions(), "(total, num_kv_heads, head_dim)");
  if (!Equal(v.dimensions(), {total, num_kv_heads, head_dim_v}))
    return BadShape("v", v.dimensions(), "(total, num_kv_heads, head_dim_v)");
  if (dcu.size() != 1 || dcu[0] < 1) return BadShape("cu_seqlens", dcu, "(batch + 1,)");
  const int64_t batch = dcu[0] - 1;
  if (!Equal(seqused_k.dimensions(), {batch})) return BadShape("seqused_k", seqused_k.dimensions(), "(batch,)");
  const int64_t max_blocks = block_table.dimensions().size() == 2 ? block_table.dimensions()[1] : 0;
  if (!Equal(block_table.dimensions(), {batch, max_blocks}))
    return BadShape("block_table", block_table.dimensions(), "(batch, max_blocks)");
  for (const auto& [name, scale] : {std::pair("k_scale", k_scale), std::pair("v_scale", v_scale)})
    if (scale.element_count() != 0 && !Equal(scale.dimensions(), {num_kv_heads}))
      return BadShape(name, scale.dimensions(), "(num_kv_heads,)");
  if (k_result->untyped_data() != k_cache.untyped_data() || v_result->untyped_data() != v_cache.untyped_data() ||
      k_result->size_bytes() != k_cache.size_bytes() || v_result->size_bytes() != v_cache.size_bytes())
    return ffi::Error::Internal("The pools must be aliased to their operands.");

  params->k = k.untyped_data();
  params->v = v.untyped_data();
  params->cu_seqlens = cu_seqlens.typed_data();
  params->seqused_k = seqused_k.typed_data();
  params->block_table = block_table.typed_data();
  params->k_scale = DataOrNull<float>(k_scale);
  params->v_scale = DataOrNull<float>(v_scale);
  params->k_cache = k_result->untyped_data();
  params->v_cache = v_result->untyped_data();
  params->total = total;
  params->batch = batch;
  params->num_blocks = num_blocks;
  params->block_size = block_size;
  params->num_kv_heads = num_kv_heads;
  params->head_dim = head_dim;
  params->head_dim_v = head_dim_v;
  params->max_blocks = max_blocks;
  return ffi::Error::Success();
}

}  // namespace jax_varlen
