"""Paged KV caches: the primitive that writes new tokens into the pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import kernels, packing, partitioning, primitives, shapes, values

OPERANDS = ("k_cache", "v_cache", "k", "v", "cu_seqlens", "seqused_k", "block_table", "k_scale", "v_scale")
_SCALES = ("k_scale", "v_scale")
APPEND_TARGET = "jax_varlen_append_v1"
CHECK_TARGET = "jax_varlen_check_append_v1"

append_p = Primitive("jax_varlen_append")
append_p.multiple_results = True


def append_kv(
    k_cache, v_cache, k, v, cu_seqlens, seqused_k, block_table, *, k_scale=None, v_scale=None
) -> tuple[jax.Array, jax.Array]:
    r"""The pools of a paged KV cache with new tokens behind those of every sequence.

    Token $i$ of sequence $b$, row `cu_seqlens[b] + i` of `k` and `v`, goes to position $p$ = `seqused_k[b]` $+\ i$ of the
    sequence: row `p % block_size` of the block `block_table[b, p // block_size]`. All else in the pools stays as it is. In
    place where the pools are donated (`jax.jit(..., donate_argnums=...)`) or made in the same program, in a copy otherwise.

    **Arguments:**

    - `k_cache`, `v_cache`: `(num_blocks, block_size, num_kv_heads, head_dim)` and
        `(num_blocks, block_size, num_kv_heads, head_dim_v)`, in the dtype of `k` and `v` or in float8_e4m3fn.
    - `k`, `v`: `(total, num_kv_heads, head_dim)` and `(total, num_kv_heads, head_dim_v)`, the new tokens of all sequences
        behind each other; float32, bfloat16 or float16.
    - `cu_seqlens`: integers `(batch + 1,)`; sequence `b` owns the rows `cu_seqlens[b]` to `cu_seqlens[b + 1]` of `k` and `v`.
        Other rows belong to nobody and are not written.
    - `seqused_k`: integers `(batch,)`, the tokens of each sequence in the cache before the call.
    - `block_table`: integers `(batch, max_blocks)`. Entries that no new token needs are not read.
    - `k_scale`, `v_scale`: float32 `()` or `(num_kv_heads,)`, for pools in float8_e4m3fn alone, by default 1. What is stored is
        `x / scale`, rounded to nearest even; what lies beyond 448 becomes 448, and NaN stays NaN.

    **Returns:** `(k_cache, v_cache)`. The tokens in the cache are now `seqused_k` plus the differences of `cu_seqlens`.

    **Raises:** `ValueError` or `TypeError` for a wrong call, when it is traced. Tokens that do not fit (a position beyond
    `max_blocks * block_size`, a block outside the pool) are written nowhere: an error on CPU, which then writes nothing at all,
    and at trace time for NumPy arrays; on a GPU they are left out, or with the environment variable JAX_VARLEN_CHECK=1 are an
    error too. Two sequences whose new tokens go to the same place is a mistake that is not found: either may win.
    `NotImplementedError` for gradients and `vmap`.

    !!! example

        ```python
        append = jax.jit(jax_varlen.append_kv, donate_argnums=(0, 1))
        k_cache, v_cache = append(k_cache, v_cache, k, v, cu_seqlens, seqused_k, block_table)
        seqused_k = seqused_k + jnp.diff(cu_seqlens)
        ```
    """
    ops = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    ops = {name: shapes.as_array(name, x) for name, x in ops.items()}
    offsets = {"cu_seqlens": cu_seqlens, "seqused_k": seqused_k}
    ops |= {name: shapes.as_int32(name, x) for name, x in offsets.items()}
    ops["block_table"] = shapes.as_block_table(block_table)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    ops |= {name: shapes.as_float32(name, x) for name, x in scales.items() if x is not None}
    values.check_append(ops)
    ops = primitives.same_varying(ops)
    names = tuple(name for name in OPERANDS if name in ops)
    k_cache, v_cache = append_p.bind(*(ops[name] for name in names), names=names)
    return k_cache, v_cache


@append_p.def_abstract_eval
def _append_abstract_eval(*avals, names):
    ops = dict(zip(names, avals, strict=True))
    shapes.check_append_operands(ops)
    partitioning.check_explicit(ops)
    return [ops["k_cache"], ops["v_cache"]]


append_p.def_impl(primitives.compiled(append_p, ("names",)))


def _lower(path: Callable) -> Callable:
    def lower(*operands, names):
        ops = dict(zip(names, operands, strict=True))
        num_kv_heads = ops["k_cache"].shape[2]
        ops |= {name: jnp.broadcast_to(ops[name], num_kv_heads) for name in _SCALES if name in ops}
        return path(dict.fromkeys(OPERANDS) | ops)

    return partitioning.lower_fun(lower, ("k_cache", "v_cache"))


def _scatter(ops: dict[str, Any]):
    """In plain JAX. What has no place gets a block behind the pool, where nothing is written."""
    k_cache, v_cache, k, v, cu_seqlens, seqused_k, block_table = (ops[name] for name in OPERANDS[:7])
    num_blocks, block_size = k_cache.shape[:2]
    if k.shape[0] == 0 or block_table.size == 0:
        return k_cache, v_cache
    owner = packing.segment_ids(cu_seqlens, k.shape[0])
    position = seqused_k[owner] + packing.positions(cu_seqlens, k.shape[0])  # negative where the sum wraps
    column = position // block_size
    fits = (owner >= 0) & (column >= 0) & (column < block_table.shape[1])
    block = block_table[owner, jnp.where(fits, column, 0)]
    block = jnp.where(fits & (block >= 0), block, num_blocks)
    place = block, position % block_size
    k, v = (_stored(x, k_cache.dtype, ops[name]) for x, name in zip((k, v), _SCALES, strict=True))
    return k_cache.at[place].set(k, mode="drop"), v_cache.at[place].set(v, mode="drop")


def _stored(x, dtype, scale):
    if x.dtype == dtype:
        return x
    x = x.astype(jnp.float32)
    x = x if scale is None else x / scale[None, :, None]
    largest = float(jnp.finfo(dtype).max)
    return x.clip(-largest, largest).astype(dtype)


def _cpu(ops: dict[str, Any]):
    results = [jax.ShapeDtypeStruct(ops[name].shape, ops[name].dtype) for name in ("k_cache", "v_cache")]
    operands = [_present(ops[name]) for name in OPERANDS]
    return jax.ffi.ffi_call(APPEND_TARGET, results, input_output_aliases={0: 0, 1: 1})(*operands)


def _cuda(ops: dict[str, Any]):
    kernels.check_cuda_is_built()
    return _cpu(_checked(ops))


def _checked(ops: dict[str, Any]):
    """With JAX_VARLEN_CHECK=1, cu_seqlens comes out of a call that fails where a token has no place in the pools."""
    if not kernels.check_is_asked_for():
        return ops
    operands = [ops[name] for name in ("cu_seqlens", "seqused_k", "block_table", "k", "k_cache")]
    struct = jax.ShapeDtypeStruct(ops["cu_seqlens"].shape, np.int32)
    return ops | {"cu_seqlens": jax.ffi.ffi_call(CHECK_TARGET, struct, input_output_aliases={0: 0})(*operands)}


def _present(x):
    """An absent operand of the FFI call is an array of no elements."""
    return jnp.zeros((0,), np.float32) if x is None else x


mlir.register_lowering(append_p, _lower(_scatter))
mlir.register_lowering(append_p, _lower(_cpu), platform="cpu")
mlir.register_lowering(append_p, _lower(_cuda), platform="cuda")


def _no_vmap(*_, **__):
    raise NotImplementedError(
        "append_kv has no vmap, and needs none: the tokens of all sequences go into one pool in one call. Reshape (B, total, "
        "num_kv_heads, head_dim) to (B * total, num_kv_heads, head_dim) and add b * total to the offsets of each."
    )


def _no_jvp(*_, **__):
    raise NotImplementedError(
        "append_kv has no gradient: a KV cache is for inference. Call it outside of jax.grad, or on "
        "jax.lax.stop_gradient(k) and jax.lax.stop_gradient(v)."
    )


ad.primitive_jvps[append_p] = _no_jvp
batching.primitive_batchers[append_p] = _no_vmap
