"""The forward primitive: its abstract evaluation and what it lowers to on each platform.

An absent option is an absent operand: `names` lists those that are there, in the order of `OPERANDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import blocked, kernels, shapes

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
)
FWD_TARGET = "jax_varlen_fwd_v1"

fwd_p = Primitive("jax_varlen_fwd")
fwd_p.multiple_results = True


def fwd(ops: dict[str, Any], *, window_left: int, window_right: int, softcap: float):
    """(out, lse) of the operands in `ops`, by name."""
    names = tuple(name for name in OPERANDS if ops.get(name) is not None)
    return fwd_p.bind(
        *_same_varying(*(ops[name] for name in names)),
        names=names,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
    )


def _same_varying(*arrays):
    """Inside `jax.shard_map`, all operands of a primitive vary over the same mesh axes."""
    varying = frozenset().union(*(_varying(jax.typeof(x)) for x in arrays))
    return [_cast_varying(x, varying - _varying(jax.typeof(x))) for x in arrays]


def _varying(aval) -> frozenset:
    return aval.manual_axis_type.varying


def _cast_varying(x, axes: frozenset):
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


@fwd_p.def_abstract_eval
def _abstract_eval(*avals, names, window_left, window_right, softcap):
    ops = dict(zip(names, avals, strict=True))
    shapes.check_operands(ops)
    if "block_table" in ops:
        raise NotImplementedError(
            "block_table (a paged KV cache) has no kernel in this version. jax_varlen.reference.varlen_attention computes it, "
            "or gather the blocks of each sequence into packed k and v."
        )
    q, v = ops["q"], ops["v"]
    out = _like(q, (*q.shape[:2], v.shape[-1]), q.dtype)
    lse = _like(q, (q.shape[1], q.shape[0]), np.float32)
    return [out, lse]


def _like(aval, shape, dtype):
    """An abstract value on the mesh of `aval`, with its manual axes."""
    mesh = aval.sharding.mesh
    if mesh.empty:
        return jax.core.ShapedArray(shape, dtype)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=aval.manual_axis_type)


_STATIC = ("names", "window_left", "window_right", "softcap")
fwd_p.def_impl(jax.jit(fwd_p.bind, static_argnames=_STATIC))


def _fill_defaults(ops: dict[str, Any]) -> dict[str, Any]:
    """The operands with every default of the call made explicit; what stays absent is None."""
    ops = {name: ops.get(name) for name in OPERANDS}
    if ops["cu_seqlens_k"] is None:
        ops["cu_seqlens_k"] = ops["cu_seqlens_q"]
    if ops["softmax_scale"] is None:
        ops["softmax_scale"] = jnp.float32(ops["q"].shape[-1] ** -0.5)
    return ops


def _lower(path: Callable) -> Callable:
    def lower(*operands, names, **options):
        ops = _fill_defaults(dict(zip(names, operands, strict=True)))
        return path(ops, **options)

    return mlir.lower_fun(lower, multiple_results=True)


def _blocked_fwd(ops, **options):
    ops = {name: x for name, x in ops.items() if name != "block_table"}
    return blocked.fwd(**ops, **options)


def _cpu_fwd(ops, **options):
    return _ffi_fwd(ops, [], **options)[:2]


def _cuda_fwd(ops, **options):
    head_dim = max(ops["q"].shape[-1], ops["v"].shape[-1])
    kernels.check_cuda(ops["q"].dtype)
    if head_dim > kernels.CUDA_MAX_HEAD_DIM:
        return _blocked_fwd(ops, **options)
    head_dim_v = ops["v"].shape[-1]
    ops = {name: _pad_head_dim(x) if name in ("q", "k", "v") else x for name, x in ops.items()}
    out, lse, _ = _ffi_fwd(ops, [kernels.cuda_workspace(ops["q"].shape, ops["cu_seqlens_q"].shape)], **options)
    return out[..., :head_dim_v], lse


def _pad_head_dim(x):
    """CUDA kernels move 16 bytes at once: head_dim becomes a multiple of 8. Zeros change no logit and no other column."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % 8)))


def _ffi_fwd(ops, workspace, *, window_left, window_right, softcap):
    q, v = ops["q"], ops["v"]
    results = [
        jax.ShapeDtypeStruct((*q.shape[:2], v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct((q.shape[1], q.shape[0]), np.float32),
        *workspace,
    ]
    call = jax.ffi.ffi_call(FWD_TARGET, results)
    return call(
        *(_present(name, ops[name]) for name in OPERANDS if name != "block_table"),
        window_left=np.int64(window_left),
        window_right=np.int64(window_right),
        softcap=np.float32(softcap),
    )


def _present(name: str, x):
    """An absent operand of the FFI call is an array of no elements."""
    if x is not None:
        return x
    return jnp.zeros((0,), np.int32 if name.startswith("seqused") else np.float32)


mlir.register_lowering(fwd_p, _lower(_blocked_fwd))
mlir.register_lowering(fwd_p, _lower(_cpu_fwd), platform="cpu")
mlir.register_lowering(fwd_p, _lower(_cuda_fwd), platform="cuda")


def _no_gradient(*_, **__):
    raise NotImplementedError(
        "varlen_attention has no gradient in this version. jax_varlen.reference.varlen_attention is differentiable, for small "
        "inputs."
    )


def _no_vmap(*_, **__):
    raise NotImplementedError(
        "varlen_attention has no vmap in this version, and needs none: a batch of packed arrays is one packed array. Reshape "
        "(B, total, heads, head_dim) to (B * total, heads, head_dim) and add b * total to the offsets of each."
    )


ad.primitive_jvps[fwd_p] = _no_gradient
batching.primitive_batchers[fwd_p] = _no_vmap
