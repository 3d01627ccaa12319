"""Offsets, and the way between padded and packed arrays.

A packed array holds the tokens of all sequences behind each other; sequence b owns the rows cu_seqlens[b] .. cu_seqlens[b + 1].
Shapes of results depend on shapes of arguments alone, so everything here runs under `jax.jit`. Where values are wrong, values
that are known raise a ValueError; traced ones cannot, and each function says what it does with them.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike


def cu_seqlens_from_lengths(lengths: ArrayLike) -> Array:
    """Offsets of sequences of these lengths: cu_seqlens[b] = lengths[0] + ... + lengths[b - 1].

    **Arguments:** `lengths`: integers `(batch,)`, none negative.

    **Returns:** `(batch + 1,)` int32.

    **Raises:** `ValueError` for another rank, and where values are known, for a negative length or a sum of 2^31 or more;
    `TypeError` for anything but integers.
    """
    lengths = _integers("lengths", lengths, rank=1, shape="(batch,)")
    if (known := _known(lengths)) is not None:
        _check_lengths(known)
    return jnp.cumulative_sum(jnp.asarray(lengths, jnp.int32), dtype=jnp.int32, include_initial=True)


def cu_seqlens_from_segment_ids(segment_ids: ArrayLike, max_sequences: int, *, padding_id: int = 0) -> tuple[Array, Array]:
    """Offsets of the runs of equal ids: each run is one sequence, in the order of the tokens.

    A run of `padding_id` is a sequence too, of which no row counts (`seqused` 0). Sequences that are left over, at the end,
    are empty. An id that comes back after another one starts a new sequence. Takes O(total) time and memory.

    With more runs than `max_sequences`, tokens of the surplus runs belong to nobody (`cu_seqlens[-1]` is where they start);
    where ids are known, that is a ValueError unless the surplus is padding alone. Sequences never merge.

    **Arguments:** `segment_ids`: integers `(total,)`; `max_sequences`: the static number of sequences.

    **Returns:** `cu_seqlens (max_sequences + 1,)` and `seqused (max_sequences,)`, both int32, for `varlen_attention`'s
    `cu_seqlens_q` and `seqused_q` (and those of k).

    **Raises:** `ValueError` for another rank, a `max_sequences` below 0, or more runs; `TypeError` for anything but integers.
    """
    ids = _integers("segment_ids", segment_ids, rank=1, shape="(total,)")
    max_sequences = _size("max_sequences", max_sequences)
    total = ids.shape[0]
    if (known := _known(ids)) is not None:
        _check_runs(known, max_sequences, padding_id)
    ids = jnp.asarray(ids)
    starts = jnp.append(jnp.ones(min(total, 1), bool), ids[1:] != ids[:-1])
    run = jnp.cumsum(starts, dtype=jnp.int32) - 1
    slot = jnp.where(starts, run, max_sequences + 1)  # past the end: dropped
    cu_seqlens = jnp.full(max_sequences + 1, total, jnp.int32)
    cu_seqlens = cu_seqlens.at[slot].set(jnp.arange(total, dtype=jnp.int32), mode="drop")
    is_padding = jnp.append(ids == padding_id, jnp.ones(1, bool))[cu_seqlens[:-1]]
    return cu_seqlens, jnp.where(is_padding, 0, jnp.diff(cu_seqlens))


def segment_ids(cu_seqlens: ArrayLike, total: int) -> Array:
    """The sequence that owns each row, -1 for rows of nobody: b where cu_seqlens[b] <= row < cu_seqlens[b + 1].

    **Arguments:** `cu_seqlens`: integers `(batch + 1,)`, not decreasing; `total`: the static number of rows.

    **Returns:** `(total,)` int32.

    **Raises:** `ValueError` for another rank, no entry or a negative `total`; `TypeError` for anything but integers.
    """
    return _owners(_offsets(cu_seqlens), _size("total", total))


def positions(cu_seqlens: ArrayLike, total: int) -> Array:
    """The place of each row in its sequence: row - cu_seqlens[b] for a row of sequence b, 0 for rows of nobody.

    **Arguments:** `cu_seqlens`: integers `(batch + 1,)`, not decreasing; `total`: the static number of rows.

    **Returns:** `(total,)` int32, for example for rotary or learnt position embeddings.

    **Raises:** `ValueError` for another rank, no entry or a negative `total`; `TypeError` for anything but integers.
    """
    cu_seqlens = _offsets(cu_seqlens)
    owner = _owners(cu_seqlens, _size("total", total))
    row = jnp.arange(total, dtype=jnp.int32)
    return jnp.where(owner < 0, 0, row - cu_seqlens[jnp.maximum(owner, 0)])


def pack(padded: ArrayLike, lengths: ArrayLike, total: int) -> Array:
    """The first lengths[b] rows of every padded[b] behind each other: packed[cu_seqlens[b] + i] = padded[b, i].

    `cu_seqlens` is `cu_seqlens_from_lengths(lengths)`. Rows behind the last sequence are 0. What stands in the padding, NaN
    included, reaches neither the result nor a gradient. With traced lengths, rows past `total` are left out, and rows that
    `padded` does not have (a length above seqlen) are 0.

    **Arguments:** `padded`: `(batch, seqlen, ...)`; `lengths`: integers `(batch,)`, at most seqlen each; `total`: the static
    number of rows of the result, at least the sum of the lengths.

    **Returns:** `(total, ...)` in the dtype of `padded`.

    **Raises:** `ValueError` for wrong ranks, a batch that differs, and, where values are known, lengths that do not fit;
    `TypeError` for lengths that are not integers.
    """
    padded = jnp.asarray(padded)
    if padded.ndim < 2:
        raise ValueError(f"padded must have shape (batch, seqlen, ...), got rank {padded.ndim} {padded.shape}.")
    lengths = _integers("lengths", lengths, rank=1, shape="(batch,)")
    total = _size("total", total)
    batch, seqlen = padded.shape[:2]
    if lengths.shape[0] != batch:
        raise ValueError(f"lengths must have shape (batch,) = ({batch},) as padded is {padded.shape}, got {lengths.shape}.")
    if (known := _known(lengths)) is not None:
        _check_packed_lengths(known, seqlen, total)
    cu_seqlens = cu_seqlens_from_lengths(lengths)
    owner, place = _owners(cu_seqlens, total), positions(cu_seqlens, total)
    row = jnp.where((owner >= 0) & (place < seqlen), owner * seqlen + place, -1)
    return _take_or_zero(padded.reshape(batch * seqlen, *padded.shape[2:]), row)


def unpack(packed: ArrayLike, cu_seqlens: ArrayLike, max_seqlen: int) -> Array:
    """The inverse of `pack`: padded[b, i] = packed[cu_seqlens[b] + i] for the rows of sequence b, 0 behind them.

    Rows of `packed` that belong to nobody, NaN included, reach neither the result nor a gradient. With traced offsets, a
    sequence longer than `max_seqlen` loses the rows behind, and rows that `packed` does not have are 0.

    **Arguments:** `packed`: `(total, ...)`; `cu_seqlens`: integers `(batch + 1,)`; `max_seqlen`: the static length of the
    result, at least the longest sequence.

    **Returns:** `(batch, max_seqlen, ...)` in the dtype of `packed`.

    **Raises:** `ValueError` for wrong ranks and, where values are known, for a longer sequence or offsets past the end;
    `TypeError` for offsets that are not integers.
    """
    packed = jnp.asarray(packed)
    if packed.ndim < 1:
        raise ValueError("packed must have shape (total, ...), got a scalar.")
    total, max_seqlen = packed.shape[0], _size("max_seqlen", max_seqlen)
    known = _known(cu_seqlens)
    cu_seqlens = _offsets(cu_seqlens)
    if known is not None:
        _check_unpacked_offsets(known, total, max_seqlen)
    place = jnp.arange(max_seqlen, dtype=jnp.int32)
    row = cu_seqlens[:-1, None] + place[None, :]
    return _take_or_zero(packed, jnp.where((row < cu_seqlens[1:, None]) & (row < total), row, -1))


def _owners(cu_seqlens: Array, total: int) -> Array:
    batch = cu_seqlens.shape[0] - 1
    row = jnp.arange(total, dtype=jnp.int32)
    owner = jnp.searchsorted(cu_seqlens, row, side="right").astype(jnp.int32) - 1  # the last sequence that starts here
    return jnp.where(owner < batch, owner, -1)


def _take_or_zero(x: Array, rows: Array) -> Array:
    """x[rows], 0 where rows is negative."""
    if x.shape[0] == 0:
        return jnp.zeros((*rows.shape, *x.shape[1:]), x.dtype)
    taken = x[jnp.maximum(rows, 0)]
    return jnp.where((rows >= 0).reshape(*rows.shape, *[1] * (x.ndim - 1)), taken, jnp.zeros((), x.dtype))


def _integers(name: str, x: ArrayLike, *, rank: int, shape: str) -> Array | np.ndarray:
    array = x if isinstance(x, (jax.Array, np.ndarray)) else np.asarray(x, None if np.size(x) else np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got {array.dtype} {array.shape}. Cast it with .astype(jnp.int32).")
    if array.ndim != rank:
        raise ValueError(f"{name} must have shape {shape}, got rank {array.ndim} {array.shape}.")
    return array


def _offsets(cu_seqlens: ArrayLike) -> Array:
    array = _integers("cu_seqlens", cu_seqlens, rank=1, shape="(batch + 1,)")
    if array.shape[0] == 0:
        raise ValueError("cu_seqlens must have shape (batch + 1,), at least one entry, got (0,).")
    return jnp.asarray(array, jnp.int32)


def _size(name: str, x: int) -> int:
    if jax.export.is_symbolic_dim(x):
        return cast(int, x)
    if isinstance(x, jax.core.Tracer) or not isinstance(x, (int, np.integer)):
        raise TypeError(f"{name} must be a Python int, as it is a shape, got {type(x).__name__}.")
    if x < 0:
        raise ValueError(f"{name} must be at least 0, got {x}.")
    return int(x)


def _known(x: ArrayLike) -> np.ndarray | None:
    """The values, unless they are traced."""
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _check_lengths(lengths: np.ndarray) -> None:
    if lengths.size and lengths.min() < 0:
        b = int(lengths.argmin())
        raise ValueError(f"lengths must not be negative, got lengths[{b}] = {lengths[b]}.")
    if (total := int(lengths.sum(dtype=np.int64))) >= 2**31:
        raise ValueError(f"offsets are int32: lengths must add up to less than 2^31, got {total}.")


def _check_runs(ids: np.ndarray, max_sequences: int, padding_id: int) -> None:
    starts = np.flatnonzero(np.append(np.ones(min(ids.size, 1), bool), ids[1:] != ids[:-1]))
    if (ids[starts[max_sequences:]] != padding_id).any():
        raise ValueError(
            f"segment_ids hold {starts.size} runs of equal ids, max_sequences is {max_sequences}. Raise max_sequences to at "
            f"least {starts.size}; runs of padding count."
        )


def _check_packed_lengths(lengths: np.ndarray, seqlen: int, total: int) -> None:
    _check_lengths(lengths)
    if lengths.size and lengths.max() > seqlen:
        b = int(lengths.argmax())
        raise ValueError(f"lengths must be at most seqlen = {seqlen} of padded, got lengths[{b}] = {lengths[b]}.")
    if lengths.sum() > total:
        raise ValueError(f"total must be at least the sum of lengths, {lengths.sum()}, got {total}.")


def _check_unpacked_offsets(cu_seqlens: np.ndarray, total: int, max_seqlen: int) -> None:
    lengths = np.diff(cu_seqlens)
    if lengths.size and lengths.max() > max_seqlen:
        b = int(lengths.argmax())
        raise ValueError(f"max_seqlen must be at least the longest sequence, got {max_seqlen}; sequence {b} has {lengths[b]}.")
    if cu_seqlens[0] < 0 or (lengths.size and (lengths.min() < 0 or cu_seqlens[-1] > total)):
        raise ValueError(
            f"cu_seqlens must rise from 0 or more to at most total = {total}, the rows of packed, got {cu_seqlens.tolist()}."
        )
