"""The primitives: abstract evaluation, and what each lowers to on each platform. `derivatives` has the rules between them.

An absent option is an absent operand: `names` lists those that are there, in the order of `OPERANDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from . import batching, blocked, kernels, partitioning, shapes

OPERANDS = (
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "block_table",
    "softmax_scale",
    "alibi_slopes",
    "sinks",
    "k_scale",
    "v_scale",
)
FWD_ONLY = ("block_table", "sinks", "k_scale", "v_scale")
PACKED_OPERANDS = tuple(name for name in OPERANDS if name not in FWD_ONLY)
BWD_OPERANDS = (*PACKED_OPERANDS, "dout", "lse", "delta")
TANGENT_OPERANDS = (*PACKED_OPERANDS, "sinks", "out", "lse", "q_dot", "k_dot", "v_dot", "sinks_dot")
TANGENT2_OPERANDS = (*PACKED_OPERANDS, "lse", "q_dot", "k_dot", "v_dot", "q_dot2", "k_dot2", "v_dot2")
HESSIAN_OPERANDS = (*BWD_OPERANDS, "q_dot", "k_dot", "v_dot", "lse_dot")
FWD_RESULTS = ("out", "lse")
BWD_RESULTS = ("q", "k", "v")  # the gradient of each
_INTEGERS = ("cu_seqlens_k", "seqused_q", "seqused_k", "block_table")  # of the operands that may be absent
FWD_TARGET = "jax_varlen_fwd_v1"
BWD_TARGET = "jax_varlen_bwd_v1"
CHECK_TARGET = "jax_varlen_check_v1"
_CHECKED = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table")

fwd_p = Primitive("jax_varlen_fwd")
fwd_p.multiple_results = True
bwd_p = Primitive("jax_varlen_bwd")
bwd_p.multiple_results = True
tangent_p = Primitive("jax_varlen_tangent")
tangent_p.multiple_results = True
tangent2_p = Primitive("jax_varlen_tangent2")
tangent2_p.multiple_results = True
hessian_p = Primitive("jax_varlen_hessian")
hessian_p.multiple_results = True


def fwd(ops: dict[str, Any], **options):
    """(out, lse) of the operands in `ops`, by name."""
    return _bind(fwd_p, OPERANDS, ops, options)


def bwd(ops: dict[str, Any], **options):
    """(dq, dk, dv) of the operands in `ops`, by name."""
    return _bind(bwd_p, BWD_OPERANDS, ops, options)


def tangent(ops: dict[str, Any], **options):
    """The tangents of out and lse, linear in `q_dot`, `k_dot`, `v_dot` and `sinks_dot`; absent ones are zero.

    Without `out`, the sums over the keys of P v_dot + P s_dot v, and of P s_dot, in float32.
    """
    return _bind(tangent_p, TANGENT_OPERANDS, ops, options)


def tangent2(ops: dict[str, Any], **options):
    """The tangents of `tangent` without `out`, linear in `q_dot2`, `k_dot2` and `v_dot2`; lse is a constant."""
    return _bind(tangent2_p, TANGENT2_OPERANDS, ops, options)


def hessian(ops: dict[str, Any], **options):
    """The tangents of (dq, dk, dv), linear in `q_dot`, `k_dot`, `v_dot` and `lse_dot`; dout and delta are constants."""
    return _bind(hessian_p, HESSIAN_OPERANDS, ops, options)


def _bind(primitive: Primitive, operands: tuple[str, ...], ops: dict[str, Any], options: dict[str, Any]):
    names = tuple(name for name in operands if ops.get(name) is not None)
    return tuple(primitive.bind(*(ops[name] for name in names), names=names, **options))


def compiled(primitive: Primitive, static: tuple[str, ...]) -> Callable:
    """What an eager call runs. It compiles under `jax.disable_jit` too: `bind` alone would come back to here."""
    call = jax.jit(primitive.bind, static_argnames=static)

    def impl(*operands, **params):
        with jax.disable_jit(False):
            return call(*operands, **params)

    return impl


def same_varying(ops: dict[str, Any]) -> dict[str, Any]:
    """Inside `jax.shard_map`, all operands of a primitive vary over the same mesh axes.

    Done before the derivative rule, so that the cotangent of a replicated operand is summed over the mesh.
    """
    varying = frozenset().union(*(_varying(x) for x in ops.values()))
    return {name: _cast_varying(x, varying - _varying(x)) for name, x in ops.items()}


def _varying(x) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying


def _cast_varying(x, axes: frozenset):
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


@fwd_p.def_abstract_eval
def _fwd_abstract_eval(*avals, names, window_left, window_right, softcap, deterministic):
    ops = dict(zip(names, avals, strict=True))
    shapes.check_operands(ops)
    partitioning.check_explicit(ops)
    results = zip(FWD_RESULTS, _out_and_lse(ops["q"], ops["v"]), strict=True)
    return [partitioning.result_aval(ops, name, x) for name, x in results]


@bwd_p.def_abstract_eval
def _bwd_abstract_eval(*avals, names, window_left, window_right, softcap, deterministic):
    ops = dict(zip(names, avals, strict=True))
    shapes.check_operands({name: x for name, x in ops.items() if name in OPERANDS})
    shapes.check_bwd_operands(ops)
    partitioning.check_explicit(ops)
    return [partitioning.result_aval(ops, name, ops[name]) for name in BWD_RESULTS]


def _tangent_abstract_eval(*avals, names, **options):
    ops = dict(zip(names, avals, strict=True))
    partitioning.check_explicit(ops)
    out, lse = _out_and_lse(ops["q"], ops["v"])
    out = out if "out" in ops else jax.ShapeDtypeStruct(out.shape, np.float32)
    return [partitioning.result_aval(ops, name, x) for name, x in zip(FWD_RESULTS, (out, lse), strict=True)]


tangent_p.def_abstract_eval(_tangent_abstract_eval)
tangent2_p.def_abstract_eval(_tangent_abstract_eval)


@hessian_p.def_abstract_eval
def _hessian_abstract_eval(*avals, names, **options):
    ops = dict(zip(names, avals, strict=True))
    partitioning.check_explicit(ops)
    return [partitioning.result_aval(ops, name, ops[name]) for name in BWD_RESULTS]


_OPTIONS = ("names", "window_left", "window_right", "softcap", "deterministic")
for _p in (fwd_p, bwd_p, tangent_p, tangent2_p, hessian_p):
    _p.def_impl(compiled(_p, _OPTIONS))


def _fill_defaults(ops: dict[str, Any]) -> dict[str, Any]:
    """The operands with every default of the call made explicit; what stays absent is None."""
    ops = dict.fromkeys(OPERANDS) | ops
    if ops["cu_seqlens_k"] is None and ops["block_table"] is None:
        ops["cu_seqlens_k"] = ops["cu_seqlens_q"]
    if ops["softmax_scale"] is None:
        ops["softmax_scale"] = jnp.float32(ops["q"].shape[-1] ** -0.5)
    return ops


def _lower(path: Callable, results: tuple[str, ...]) -> Callable:
    def lower(*operands, names, **options):
        ops = _fill_defaults(dict(zip(names, operands, strict=True)))
        return path(ops, **options)

    return partitioning.lower_fun(lower, results)


def _blocked_fwd(ops, *, deterministic, **options):
    del deterministic  # It always is.
    return blocked.fwd(**ops, **options)


def _blocked_bwd(ops, *, deterministic, **options):
    del deterministic  # It always is.
    return blocked.bwd(**_without(ops, *FWD_ONLY), **options)


def _blocked_tangent(ops, *, deterministic, **options):
    del deterministic  # It always is.
    ops = dict.fromkeys(TANGENT_OPERANDS) | ops
    raw = blocked.tangent(**{name: ops[name] for name in _RAW}, **options)
    return raw if ops["out"] is None else blocked.tangent_of_results(*raw, **{name: ops[name] for name in _OF_RESULTS})


_OF_RESULTS = ("sinks", "sinks_dot", "out", "lse")
_RAW = tuple(name for name in TANGENT_OPERANDS if name not in ("sinks", "sinks_dot", "out"))


def _blocked_tangent2(ops, *, deterministic, **options):
    ops = dict.fromkeys(TANGENT_OPERANDS) | ops
    moving = {name: ops.pop(f"{name}_dot2", None) for name in ("q", "k", "v")}
    raw = lambda moved: _blocked_tangent(ops | moved, deterministic=deterministic, **options)
    return _push_forward(raw, ops, moving)


def _blocked_hessian(ops, *, deterministic, **options):
    moving = {name: ops.pop(f"{name}_dot", None) for name in ("q", "k", "v", "lse")}
    return _push_forward(lambda moved: _blocked_bwd(ops | moved, deterministic=deterministic, **options), ops, moving)


def _push_forward(f: Callable, ops, tangents):
    """The tangents of `f`, a function of the operands that have one."""
    tangents = {name: x for name, x in tangents.items() if x is not None}
    return jax.jvp(f, ({name: ops[name] for name in tangents},), (tangents,))[1]


def _without(ops, *names):
    return {name: x for name, x in ops.items() if name not in names}


def _cpu_fwd(ops, **options):
    q, v = ops["q"], ops["v"]
    out, lse = _out_and_lse(q, v)
    return _ffi_call(FWD_TARGET, [out, lse], _fwd_operands(ops), options, **_batch_invariant(options))


def _cpu_bwd(ops, *, deterministic, **options):
    del deterministic  # It always is.
    return _ffi_call(BWD_TARGET, [_struct(ops[name]) for name in ("q", "k", "v")], _bwd_operands(ops), options)


def _cuda_fwd(ops, **options):
    kernels.check_cuda(ops["q"].dtype)
    ops = _checked(ops)
    if _head_dim(ops) > kernels.CUDA_MAX_HEAD_DIM:
        return _blocked_fwd(ops, **options)
    head_dim_v = ops["v"].shape[-1]
    ops = _pad_head_dims(ops, "q", "k", "v")
    q, v = ops["q"], ops["v"]
    batch_and_1 = ops["cu_seqlens_q"].shape[0]
    if ops["block_table"] is None:
        workspace = kernels.cuda_workspace(q.shape[0], batch_and_1)
    else:
        workspace = kernels.cuda_paged_workspace(q.shape, v.shape, batch_and_1)
    results = [*_out_and_lse(q, v), workspace]
    out, lse, _ = _ffi_call(FWD_TARGET, results, _fwd_operands(ops), options, **_batch_invariant(options))
    return out[..., :head_dim_v], lse


def _cuda_bwd(ops, *, deterministic, **options):
    """dq is accumulated in float32, in an array of zeros, and rounded at the end."""
    kernels.check_cuda(ops["q"].dtype)
    ops = _checked(ops)
    if _head_dim(ops) > kernels.CUDA_MAX_HEAD_DIM:
        return _blocked_bwd(ops, deterministic=deterministic, **options)
    head_dim, head_dim_v = ops["q"].shape[-1], ops["v"].shape[-1]
    ops = _pad_head_dims(ops, "q", "k", "v", "dout")
    q, k, v = (ops[name] for name in ("q", "k", "v"))
    batch_and_1 = ops["cu_seqlens_q"].shape[0]
    dq = jnp.zeros(q.shape, np.float32)
    turns = jnp.zeros(kernels.cuda_turns(q.shape, batch_and_1) if deterministic else (0,), np.int32)
    results = [_struct(x) for x in (dq, k, v, turns)] + [kernels.cuda_workspace(k.shape[0], batch_and_1)]
    operands = [*_bwd_operands(ops), dq, turns]
    aliases = {len(operands) - 2: 0, len(operands) - 1: 3}
    dq, dk, dv, *_ = _ffi_call(BWD_TARGET, results, operands, options, input_output_aliases=aliases)
    dq = (dq * ops["softmax_scale"]).astype(q.dtype)
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim_v]


def _checked(ops):
    """With JAX_VARLEN_CHECK=1, cu_seqlens_q comes out of a call that looks into all offsets, lengths and block ids.

    It waits for the device, and fails where the CPU kernel would fail.
    """
    if not kernels.check_is_asked_for():
        return ops
    operands = [*(_present(name, ops[name]) for name in _CHECKED), ops["q"], ops["k"]]
    check = jax.ffi.ffi_call(CHECK_TARGET, _struct(ops["cu_seqlens_q"]), input_output_aliases={0: 0})
    return ops | {"cu_seqlens_q": check(*operands)}


def _head_dim(ops) -> int:
    return max(ops["q"].shape[-1], ops["v"].shape[-1])


def _pad_head_dims(ops, *names):
    """CUDA kernels move 16 bytes at once: head_dim becomes a multiple of that. Zeros change no logit and no other column."""
    multiple = 16 // ops["k"].dtype.itemsize
    return ops | {name: _pad_last(ops[name], -ops[name].shape[-1] % multiple) for name in names}


def _pad_last(x, columns: int):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, columns)]) if columns else x


def _out_and_lse(q, v):
    return jax.ShapeDtypeStruct((*q.shape[:2], v.shape[-1]), q.dtype), jax.ShapeDtypeStruct(q.shape[1::-1], np.float32)


def _struct(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _fwd_operands(ops):
    return [_present(name, ops[name]) for name in OPERANDS]


def _bwd_operands(ops):
    return [_present(name, ops[name]) for name in BWD_OPERANDS]


def _present(name: str, x):
    """An absent operand of the FFI call is an array of no elements."""
    if x is not None:
        return x
    return jnp.zeros((0,), np.int32 if name in _INTEGERS else np.float32)


def _batch_invariant(options) -> dict[str, Any]:
    return {"batch_invariant": np.int64(options["deterministic"])}


def _ffi_call(target: str, results, operands, options, input_output_aliases=None, **attributes):
    call = jax.ffi.ffi_call(target, results, input_output_aliases=input_output_aliases)
    return call(
        *operands,
        **attributes,
        window_left=np.int64(options["window_left"]),
        window_right=np.int64(options["window_right"]),
        softcap=np.float32(options["softcap"]),
    )


mlir.register_lowering(fwd_p, _lower(_blocked_fwd, FWD_RESULTS))
mlir.register_lowering(fwd_p, _lower(_cpu_fwd, FWD_RESULTS), platform="cpu")
mlir.register_lowering(fwd_p, _lower(_cuda_fwd, FWD_RESULTS), platform="cuda")
mlir.register_lowering(bwd_p, _lower(_blocked_bwd, BWD_RESULTS))
mlir.register_lowering(bwd_p, _lower(_cpu_bwd, BWD_RESULTS), platform="cpu")
mlir.register_lowering(bwd_p, _lower(_cuda_bwd, BWD_RESULTS), platform="cuda")

mlir.register_lowering(tangent_p, _lower(_blocked_tangent, FWD_RESULTS))
mlir.register_lowering(tangent2_p, _lower(_blocked_tangent2, FWD_RESULTS))
mlir.register_lowering(hessian_p, _lower(_blocked_hessian, BWD_RESULTS))

batching.register(fwd_p, fwd, (0, 1))
batching.register(bwd_p, bwd, (0, 0, 0))
batching.register(tangent_p, tangent, (0, 1))
batching.register(tangent2_p, tangent2, (0, 1))
batching.register(hessian_p, hessian, (0, 0, 0))
