"""The values of offsets, lengths and block ids: errors at trace time where these are NumPy arrays, whose values are known.

Arrays on a device are left alone: to read them would wait for the device. On CPU the kernel checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from . import shapes


def check(ops: Mapping[str, Any]) -> None:
    """Raises ValueError where a value is wrong, in the operands of one call of `varlen_attention` by name."""
    paged = "block_table" in ops
    defaults = {} if paged or "cu_seqlens_k" in ops else {"cu_seqlens_k": ops["cu_seqlens_q"]}
    ops = {**defaults, **ops}
    for side in ("q", "k"):
        cu_seqlens = ops.get(f"cu_seqlens_{side}")
        if not isinstance(cu_seqlens, np.ndarray) or cu_seqlens.ndim != 1 or cu_seqlens.size == 0:
            continue
        _check_offset_values(f"cu_seqlens_{side}", cu_seqlens, None if paged and side == "k" else ops[side])
        _check_seqused_values(f"seqused_{side}", ops.get(f"seqused_{side}"), _differences(cu_seqlens))
    if paged:
        _check_block_values(ops)


def check_context_parallel(ops: Mapping[str, Any], num_devices: int) -> None:
    """The same for `context_parallel_attention`, whose offsets count in the whole batch: q is the share of one device."""
    cu_seqlens, q = ops["cu_seqlens"], ops["q"]
    if isinstance(cu_seqlens, np.ndarray):
        tokens = jax.ShapeDtypeStruct((num_devices * q.shape[0], *q.shape[1:]), q.dtype)
        _check_offset_values("cu_seqlens", cu_seqlens, tokens)
        _check_seqused_values("seqused", ops.get("seqused"), _differences(cu_seqlens))


def _differences(cu_seqlens: np.ndarray) -> np.ndarray:
    return np.diff(cu_seqlens.astype(np.int64))


def _check_offset_values(name: str, cu_seqlens: np.ndarray, tokens) -> None:
    """`tokens` is the array that the offsets count in; None where their differences alone matter."""
    if tokens is not None and cu_seqlens[0] < 0:
        raise ValueError(f"{name} must not be negative: {name}[0] is {cu_seqlens[0]}.")
    falls = np.flatnonzero(_differences(cu_seqlens) < 0)
    if falls.size:
        b = falls[0] + 1
        raise ValueError(
            f"{name} must not decrease: {name}[{b}] is {cu_seqlens[b]} after {name}[{b - 1}] = {cu_seqlens[b - 1]}. "
            "Offsets are running sums of lengths: jax_varlen.cu_seqlens_from_lengths(lengths)."
        )
    total = tokens.shape[0] if tokens is not None and len(tokens.shape) == 3 else None
    if isinstance(total, int) and cu_seqlens[-1] > total:
        raise ValueError(
            f"{name} must end within the array: {name}[{cu_seqlens.size - 1}] is {cu_seqlens[-1]} of {total} tokens."
        )


def _check_seqused_values(name: str, seqused, lengths: np.ndarray) -> None:
    if not isinstance(seqused, np.ndarray) or seqused.shape != lengths.shape:
        return
    wrong = np.flatnonzero((seqused < 0) | (seqused > lengths))
    if wrong.size:
        b = wrong[0]
        raise ValueError(
            f"{name} must be between 0 and the length of its sequence: {name}[{b}] is {seqused[b]}, and sequence {b} has "
            f"{lengths[b]} tokens."
        )


def _check_block_values(ops) -> None:
    """Lengths that the table cannot hold, and ids that are not of the pool."""
    name = "seqused_k" if "seqused_k" in ops else "cu_seqlens_k"
    lengths, table = ops.get(name), ops["block_table"]
    sizes = (*ops["k"].shape[:2], *table.shape)
    right_shapes = len(ops["k"].shape) == 4 and len(table.shape) == 2 and all(isinstance(n, int) for n in sizes)
    if not isinstance(lengths, np.ndarray) or lengths.ndim != 1 or not right_shapes or 0 in ops["k"].shape[1:2]:
        return
    num_blocks, block_size, batch, max_blocks = sizes
    if name == "cu_seqlens_k":
        lengths = _differences(lengths)
    if lengths.shape != (batch,):
        return
    capacity = max_blocks * block_size
    wrong = np.flatnonzero((lengths < 0) | (lengths > capacity))
    if wrong.size:
        b = wrong[0]
        which = f"seqused_k[{b}]" if name == "seqused_k" else f"cu_seqlens_k[{b + 1}] - cu_seqlens_k[{b}]"
        raise ValueError(
            f"With block_table {table.shape} a sequence has 0 to max_blocks * block_size = {capacity} keys: {which} is "
            f"{lengths[b]}. For longer ones give the table more columns."
        )
    if isinstance(table, np.ndarray):
        _check_block_ids(table, lengths, num_blocks, block_size)


def _check_block_ids(table: np.ndarray, lengths: np.ndarray, num_blocks: int, block_size: int) -> None:
    blocks = -(-lengths // block_size)
    holds_keys = np.arange(table.shape[1]) < blocks[:, None]
    wrong = np.argwhere(holds_keys & ((table < 0) | (table >= num_blocks)))
    if wrong.size:
        b, i = wrong[0]
        raise ValueError(
            f"block_table must hold ids of the {num_blocks} blocks of k and v: block_table[{b}, {i}] is {table[b, i]}, and "
            f"sequence {b} has {lengths[b]} keys in {blocks[b]} blocks of {block_size}. Entries behind those may be anything."
        )


def check_append(ops: Mapping[str, Any]) -> None:
    """The same for `append_kv`: raises ValueError where NumPy arrays show that a token has no place in the pools."""
    shapes.check_append_operands(ops)
    cu_seqlens, seqused_k, block_table = (ops[name] for name in ("cu_seqlens", "seqused_k", "block_table"))
    num_blocks, block_size = ops["k_cache"].shape[:2]
    if not isinstance(cu_seqlens, np.ndarray):
        return
    _check_offset_values("cu_seqlens", cu_seqlens, ops["k"])
    if not isinstance(seqused_k, np.ndarray):
        return
    tokens = np.diff(cu_seqlens)
    first = seqused_k.astype(np.int64)
    _check_room(first, tokens, block_table.shape[1], block_size)
    if isinstance(block_table, np.ndarray):
        _check_blocks(block_table, first, tokens, num_blocks, block_size)


def _check_room(first: np.ndarray, tokens: np.ndarray, max_blocks: int, block_size: int) -> None:
    wrong = np.flatnonzero((tokens > 0) & ((first < 0) | (first + tokens > max_blocks * block_size)))
    if wrong.size and first[wrong[0]] < 0:
        raise ValueError(f"seqused_k must not be negative: seqused_k[{wrong[0]}] is {first[wrong[0]]}.")
    if wrong.size:
        b = wrong[0]
        raise ValueError(
            f"The tokens must fit in the block table, whose {max_blocks} blocks of {block_size} hold {max_blocks * block_size} "
            f"of a sequence: seqused_k[{b}] is {first[b]}, and cu_seqlens gives the sequence {tokens[b]} more."
        )


def _check_blocks(block_table: np.ndarray, first: np.ndarray, tokens: np.ndarray, num_blocks: int, block_size: int) -> None:
    begin = np.arange(block_table.shape[1])[None, :] * block_size
    needed = (first[:, None] < begin + block_size) & (begin < (first + tokens)[:, None]) & (tokens > 0)[:, None]
    wrong = np.argwhere(needed & ((block_table < 0) | (block_table >= num_blocks)))
    if wrong.size:
        b, column = wrong[0]
        raise ValueError(
            f"block_table must name blocks of the pool, which has {num_blocks}: block_table[{b}, {column}] is "
            f"{block_table[b, column]}, where sequence {b} appends the positions {first[b]} to {first[b] + tokens[b] - 1}."
        )
