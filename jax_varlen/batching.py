"""The batching rule of the primitives, for `jax.vmap`: packed batches behind each other are one packed batch.

Here `size` is the number of examples, and an array is stacked when it has an axis of that size, one entry per example. The
offsets of example b move on by b * total. Each example has two more sequences of which no row counts, one before its first and
one behind its last, so that the rows of nobody stay nobody's and every offset stays among its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from . import shapes

PER_CALL = ("softmax_scale", "sinks", "sinks_dot", "k_scale", "v_scale")  # a kernel has one for all sequences
_QKV = ("q", "k", "v", "q_dot", "k_dot", "v_dot", "q_dot2", "k_dot2", "v_dot2")
_HEADS_FIRST = ("lse", "delta", "lse_dot")  # (num_heads, total_q)
_ROWS = (*_QKV, "out", "dout", *_HEADS_FIRST)


def register(primitive: Primitive, call: Callable, axes: tuple[int, ...]) -> None:
    """Gives `primitive` the rule. `call` binds it to operands by name; `axes` are those of the rows in its results."""

    def rule(operands, dims, *, names, **options):
        ops, dims = (dict(zip(names, x, strict=True)) for x in (operands, dims))
        size = next(ops[name].shape[dim] for name, dim in dims.items() if dim is not None)
        example = {name: _struct_of_example(x, dims[name]) for name, x in ops.items()}
        expected = jax.eval_shape(lambda ops: call(ops, **options), example)  # by the rules of one call, in their words
        if any(dims.get(name) is not None for name in PER_CALL):
            results = _one_by_one(lambda ops: call(ops, **options), ops, dims)
            return results, [0] * len(results)
        results = call(_fold(ops, dims, example, size), **options)
        return [_split(x, like.shape, axis, size) for x, like, axis in zip(results, expected, axes, strict=True)], axes

    batching.primitive_batchers[primitive] = rule


def _struct_of_example(x, dim: int | None) -> jax.ShapeDtypeStruct:
    shape = x.shape if dim is None else (*x.shape[:dim], *x.shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _one_by_one(call: Callable, ops: dict[str, Any], dims: dict[str, Any]):
    stacked = {name: jnp.moveaxis(x, dims[name], 0) for name, x in ops.items() if dims[name] is not None}
    return jax.lax.map(lambda example: call(ops | example), stacked)


def _fold(ops: dict[str, Any], dims: dict[str, Any], example: dict[str, Any], size: int) -> dict[str, Any]:
    """The operands of the one call."""
    shared = _shared(ops, dims)
    shapes.check_folded({name: x for name, x in example.items() if name in ("q", "k") and name not in shared}, size)
    stacked = {name: _stack(x, dims[name], size, _row_axis(name)) for name, x in ops.items() if name not in shared}
    folded = {name: ops[name] for name in shared}
    folded |= {name: _merge(stacked[name], _row_axis(name)) for name in _ROWS if name in stacked}

    cu_seqlens_q, cu_seqlens_k, seqused_k = stacked["cu_seqlens_q"], stacked.get("cu_seqlens_k"), stacked.get("seqused_k")
    folded["cu_seqlens_q"] = _fold_offsets(cu_seqlens_q, example["q"].shape[0])
    folded["seqused_q"] = _fold_sequences(stacked.get("seqused_q", jnp.diff(cu_seqlens_q)))
    if "block_table" in ops:
        table = stacked["block_table"]
        folded["block_table"] = _fold_sequences(table if "k" in shared else _fold_ids(table, example["k"].shape[0]))
        seqused_k = _lengths(cu_seqlens_k, seqused_k)
    elif cu_seqlens_k is not None:
        folded["cu_seqlens_k"] = _fold_offsets(cu_seqlens_k, example["k"].shape[0])
    if seqused_k is not None:
        folded["seqused_k"] = _fold_sequences(seqused_k)
    if "alibi_slopes" in stacked:
        folded["alibi_slopes"] = _fold_sequences(_slopes_of_sequences(stacked["alibi_slopes"], cu_seqlens_q.shape[1] - 1))
    return folded


def _shared(ops, dims) -> set[str]:
    """The operands that all examples share as they are: nothing is copied."""
    shared = {name for name in PER_CALL if name in ops}
    if "block_table" in ops and dims["k"] is None and dims["v"] is None:
        shared |= {"k", "v"}
    if "alibi_slopes" in ops and dims["alibi_slopes"] is None and len(ops["alibi_slopes"].shape) == 1:
        shared.add("alibi_slopes")
    return shared


def _row_axis(name: str) -> int:
    return 1 if name in _HEADS_FIRST else 0


def _stack(x, dim: int | None, size: int, axis: int):
    """x with the examples at `axis`."""
    if dim is not None:
        return jnp.moveaxis(x, dim, axis)
    return jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], size, *x.shape[axis:]))


def _merge(x, axis: int):
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _split(x, shape: tuple[int, ...], axis: int, size: int):
    return x.reshape(*shape[:axis], size, *shape[axis:])


def _fold_offsets(cu_seqlens, total: int):
    """(size * (batch + 2) + 1,) from (size, batch + 1): the first row of each example, then its offsets; at last, the end."""
    size = cu_seqlens.shape[0]
    first = jnp.arange(size, dtype=jnp.int32)[:, None] * total
    return jnp.append(_merge(jnp.pad(cu_seqlens, ((0, 0), (1, 0))) + first, 0), jnp.int32(size * total))


def _fold_sequences(x):
    """(size * (batch + 2), ...) from (size, batch, ...), with zeros for the two more sequences of each example."""
    return _merge(jnp.pad(x, [(0, 0), (1, 1)] + [(0, 0)] * (x.ndim - 2)), 0)


def _fold_ids(table, num_blocks: int):
    """Ids in the pools behind each other. One outside the pool of its example is outside all of them."""
    first = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None, None] * num_blocks
    return jnp.where((table >= 0) & (table < num_blocks), table + first, -1)


def _lengths(cu_seqlens_k, seqused_k):
    """Of paged keys, whose offsets only sum up lengths. A length beyond its sequence is as wrong as a negative one."""
    if cu_seqlens_k is None:
        return seqused_k
    owned = jnp.diff(cu_seqlens_k)
    return owned if seqused_k is None else jnp.where(seqused_k > owned, -1, seqused_k)


def _slopes_of_sequences(slopes, batch: int):
    """(size, batch, num_heads) from that, or from (size, num_heads)."""
    return slopes if slopes.ndim == 3 else jnp.repeat(slopes[:, None], batch, axis=1)
