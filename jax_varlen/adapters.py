"""Attention as JAX models call it, on arrays (B, T, N, H): a batch of rows, each one sequence or several with segment ids.

A row-major (B, T, N, H) array is a packed one already, `reshape(B * T, N, H)`; only offsets are made here. The letters are
those of `jax.nn.dot_product_attention`: B rows, T queries and S keys in each, N heads, K kv heads, H head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from . import shapes
from .attention import varlen_attention
from .packing import _integers, _known, _size

PADDING_ID = 0


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    scale: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    r"""`varlen_attention` on rows of one length: $out_{bi} = \sum_j P_{bij} v_{bj}$ over the keys $j$ that query $i$ sees.

    Nothing is copied: `query.reshape(B * T, N, H)` is packed. Without `segment_ids` each row is one sequence, and the call
    means what it means in `jax.nn.dot_product_attention`. With them every run of equal ids within a row is a sequence.

    **Arguments:**

    - `query`: `(B, T, N, H)`; `key`: `(B, S, K, H)`; `value`: `(B, S, K, Hv)`; dtypes as in `varlen_attention`, N a multiple
        of K.
    - `segment_ids`: integers `(B, T)`. A run of equal ids within a row is a sequence, and runs never cross rows. Tokens of
        id 0 are padding, which may stand anywhere: nobody sees them, their `out` is 0.
    - `kv_segment_ids`: integers `(B, S)`, by default `segment_ids`. Where they are given, a run of queries sees the run of
        keys that has its id in the same row, or nothing where there is none. Each id has one run in a row, and the ids that
        queries and keys share come in one order. Where traced ids break that, a run whose keys do not stand before those of
        all later runs sees nothing.
    - `max_segments`: the static number of runs, without padding, that a row may hold (of queries, and of keys); by default
        as many as it has tokens, which is always right. The kernel gets `B * max_segments` sequences, so a known bound saves
        work. Where ids are traced, runs beyond it are padding.
    - `query_seq_lengths`, `key_value_seq_lengths`: integers `(B,)`, in place of segment ids: the first tokens of each row
        count, the others are padding.
    - `is_causal`: query `i` sees key `j` only if `j <= i`.
    - `local_window_size`: `(left, right)`: query `i` sees key `j` only if `i - left <= j <= i + right`; None for no bound.
        One number is both bounds.
    - `scale`: a number or a scalar array, by default `H ** -0.5`.
    - `softcap`, `sinks`, `deterministic`: as in `varlen_attention`.
    - `return_lse`: whether to return `lse` too.

    `is_causal` and `local_window_size` count from the first token of a row or run, and are for self-attention: T and S are
    equal, there is no `kv_segment_ids`, and lengths are given for both sides or for neither, and are equal (of traced lengths
    that differ, the smaller one counts). For keys of another length call `varlen_attention`, whose masks are aligned at the
    last token.

    **Returns:** `out (B, T, N, Hv)` in the dtype of `query`; with `return_lse`, `(out, lse)` with `lse (B, T, N)` in float32.
    A query that sees no key has `out` 0 and `lse` -inf (`jax.nn.dot_product_attention` gives the mean of all values).

    **Raises:** `ValueError` or `TypeError` for a wrong call, and, where ids and lengths are known, for wrong values;
    `NotImplementedError` for what this build or platform cannot do.

    !!! example

        ```python
        ids = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])  # two documents and padding, then one document
        out = jax_varlen.dot_product_attention(query, key, value, segment_ids=ids, is_causal=True)
        ```
    """
    q, k, v = (shapes.as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    _check_rows(q, k, v)
    window_size = _window(local_window_size)
    is_causal = shapes.flag("is_causal", is_causal)
    positional = is_causal or window_size != (None, None)
    if positional and (q.shape[1] != k.shape[1] or kv_segment_ids is not None):
        raise ValueError(_not_self_attention(q, k, kv_segment_ids))
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    if segment_ids is None:
        _check_absent("segment_ids", {"kv_segment_ids": kv_segment_ids, "max_segments": max_segments}, "has no meaning without")
        offsets = _whole_rows(q, k, lengths, positional)
    else:
        _check_absent("segment_ids", lengths, "cannot be given beside")
        offsets = _segments(q, k, segment_ids, kv_segment_ids, max_segments)
    out, lse = varlen_attention(
        *(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (q, k, v)),
        **offsets,
        softmax_scale=scale,
        causal=is_causal,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        deterministic=deterministic,
        return_lse=True,
    )
    out = out.reshape(*q.shape[:2], *out.shape[1:])
    return (out, lse.T.reshape(q.shape[:3])) if shapes.flag("return_lse", return_lse) else out


def attention_fn(*, is_causal: bool = False, **options) -> Callable[..., Array]:
    """`dot_product_attention` with these options, as the `attention_fn` of flax's attention modules.

    For `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`, which call it with a mask, dropout and more
    by name. What these modules can ask for and a kernel cannot do is refused when it is asked for, and never left out.

    **Arguments:** the keyword arguments of `dot_product_attention`, but `return_lse`. `is_causal` holds if it is given here
    or in the module's call.

    **Returns:** a function `(query, key, value, bias=None, mask=None, ...) -> (B, T, N, Hv)`. The results are those of flax's
    own `dot_product_attention`. `precision` and `force_fp32_for_softmax` are always met: products are summed in float32, and
    the softmax is in float32.

    **Raises:** `NotImplementedError`, in the call, for `bias`, `mask`, dropout, weights that are to be sown, and other
    functions in the place of the products; `TypeError` for a `dtype` that is not that of `query`, and for `return_lse`.
    """
    if "return_lse" in options:
        raise TypeError("return_lse cannot be given here, as a module takes one array: call dot_product_attention.")
    factory_causal = shapes.flag("is_causal", is_causal)

    # flax.linen leaves out, without a word, what this signature does not name.
    def attend(
        query,
        key,
        value,
        bias=None,
        mask=None,
        broadcast_dropout=True,
        dropout_rng=None,
        dropout_rate=0.0,
        deterministic=False,
        dtype=None,
        precision=None,
        module=None,
        force_fp32_for_softmax=False,
        einsum_dot_general=None,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
        is_causal=False,
    ):
        asked = {
            "bias": bias,
            "mask": mask,
            "dropout_rate": None if deterministic or dropout_rate == 0 else dropout_rate,
            "module": module,
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        for name, x in asked.items():
            if x is not None:
                raise NotImplementedError(f"{name} cannot be given to this attention_fn. {_INSTEAD.get(name, _NO_EINSUM)}")
        if dtype is not None and jnp.dtype(dtype) != query.dtype:
            raise TypeError(f"dtype must be that of query, {query.dtype}, got {jnp.dtype(dtype)}: cast query, key, value.")
        causal = factory_causal or shapes.flag("is_causal", is_causal)
        return dot_product_attention(query, key, value, is_causal=causal, **options)

    return attend


_INSTEAD = {
    "bias": "Logits have no additive term.",
    "mask": "Say what it masks: attention_fn(is_causal=..., local_window_size=..., segment_ids=..., query_seq_lengths=...).",
    "dropout_rate": "Weights are never dropped: dropout_rate=0.0 in the module, or deterministic=True in its call.",
    "module": "It asks for the weights to be sown, and they are never stored: sow_weights=False.",
}
_NO_EINSUM = "The kernel computes both products itself: leave it out."


def _check_rows(q, k, v) -> None:
    for name, x, shape in (("query", q, "(B, T, N, H)"), ("key", k, "(B, S, K, H)"), ("value", v, "(B, S, K, Hv)")):
        if x.ndim != 4:
            raise ValueError(
                f"{name} must have rank 4 {shape}, got rank {x.ndim} {x.shape}. Several batch axes become one with reshape; "
                "packed arrays of rank 3 go to jax_varlen.varlen_attention."
            )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"query (B, T, N, H), key (B, S, K, H) and value (B, S, K, Hv) must agree in B, S and K, got query {q.shape}, key "
            f"{k.shape} and value {v.shape}."
        )


def _window(local_window_size) -> tuple[int | None, int | None]:
    if isinstance(local_window_size, (int, np.integer)) or local_window_size is None:
        local_window_size = (local_window_size, local_window_size)
    if not isinstance(local_window_size, (tuple, list)) or len(local_window_size) != 2:
        raise ValueError(f"local_window_size must be a number of tokens or a pair (left, right), got {local_window_size!r}.")
    if not all(bound is None or isinstance(bound, (int, np.integer)) for bound in local_window_size):
        raise TypeError(f"local_window_size must hold integers or None, got {local_window_size!r}.")
    left, right = (None if bound is None else int(bound) for bound in local_window_size)
    if min(left or 0, right or 0) < 0:
        raise ValueError(f"local_window_size must not be negative, got {local_window_size!r}. None is no bound.")
    return left, right


def _not_self_attention(q, k, kv_segment_ids) -> str:
    got = f"query {q.shape} and key {k.shape}" if kv_segment_ids is None else "kv_segment_ids"
    return (
        "is_causal and local_window_size are for self-attention, where T equals S and kv_segment_ids is left out, got "
        f"{got}. With keys of another length call jax_varlen.varlen_attention, whose masks are aligned at the last token."
    )


def _check_absent(name: str, others: dict[str, Any], why: str) -> None:
    for other, x in others.items():
        if x is not None:
            raise ValueError(
                f"{other} {why} {name}. Padding is either id {PADDING_ID} of segment_ids, or what lies behind lengths."
            )


def _whole_rows(q, k, lengths: dict[str, Any], positional: bool) -> dict[str, Any]:
    """The offsets of a call in which each row is a sequence."""
    batch, sizes = q.shape[0], (q.shape[1], k.shape[1])
    used = [_lengths(name, x, batch, n) for (name, x), n in zip(lengths.items(), sizes, strict=True)]
    if positional and any(x is not None for x in used):
        used = [_smaller_length(*used)] * 2
    cu_seqlens_q, cu_seqlens_k = (np.arange(batch + 1) * n for n in sizes)
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": used[0], "seqused_k": used[1]}


def _lengths(name: str, x, batch: int, size: int):
    if x is None:
        return None
    lengths = shapes.as_int32(name, x)
    if lengths.shape != (batch,):
        raise ValueError(f"{name} must have shape (B,) = ({batch},), got {lengths.shape}.")
    known = _known(lengths)
    if known is not None and (wrong := np.flatnonzero((known < 0) | (known > size))).size:
        raise ValueError(f"{name} must be between 0 and {size}, the tokens of a row: {name}[{wrong[0]}] is {known[wrong[0]]}.")
    return lengths


def _smaller_length(len_q, len_k):
    if len_q is None or len_k is None:
        raise ValueError(
            "With is_causal or local_window_size the lengths of both sides must be given, or none, got "
            f"{'key_value_seq_lengths' if len_q is None else 'query_seq_lengths'} alone. Padded self-attention gives the same "
            "lengths as both."
        )
    known_q, known_k = _known(len_q), _known(len_k)
    if known_q is not None and known_k is not None and (wrong := np.flatnonzero(known_q != known_k)).size:
        b = wrong[0]
        raise ValueError(
            "With is_causal or local_window_size query_seq_lengths and key_value_seq_lengths must be equal, got "
            f"{known_q[b]} and {known_k[b]} in row {b}. jax_varlen.varlen_attention takes those, aligned at the last token."
        )
    return jnp.minimum(len_q, len_k)


def _segments(q, k, segment_ids, kv_segment_ids, max_segments) -> dict[str, Any]:
    """The offsets of a call in which each run of ids is a sequence: max_segments of each row, the last ones empty.

    What lies between two runs, padding of either row, ends the earlier sequence, behind its `seqused` rows.
    """
    ids = _ids("segment_ids", segment_ids, q, "query")
    if kv_segment_ids is None and q.shape[1] != k.shape[1]:
        raise ValueError(f"kv_segment_ids must be given where S differs from T, got query {q.shape} and key {k.shape}.")
    begin, used, run_ids = _runs("segment_ids", ids, max_segments)
    offsets = {"cu_seqlens_q": _offsets(begin, ids.shape), "seqused_q": used.reshape(-1)}
    if kv_segment_ids is None:
        return offsets | {"seqused_k": offsets["seqused_q"]}
    kv_ids = _ids("kv_segment_ids", kv_segment_ids, k, "key")
    if ids.dtype != kv_ids.dtype:
        raise TypeError(f"segment_ids and kv_segment_ids must have one dtype, got {ids.dtype} and {kv_ids.dtype}.")
    _check_order(_known(ids), _known(kv_ids))
    begin, used = jax.vmap(_meet)(run_ids, *_runs("kv_segment_ids", kv_ids, max_segments))
    begin, used = jnp.where(begin == _NOWHERE, kv_ids.shape[1], begin), used.reshape(-1)
    return offsets | {"cu_seqlens_k": _offsets(begin, kv_ids.shape), "seqused_k": used}


_NOWHERE = np.int32(2**31 - 1)


def _ids(name: str, ids, rows, of: str) -> Array | np.ndarray:
    ids = _integers(name, ids, rank=2, shape="(B, T)" if name == "segment_ids" else "(B, S)")
    if ids.shape != rows.shape[:2]:
        raise ValueError(f"{name} must have shape {rows.shape[:2]}, one id per token of {of} {rows.shape}, got {ids.shape}.")
    return ids


def _runs(name: str, ids: Array | np.ndarray, max_segments: int | None) -> tuple[Array, Array, Array]:
    """Place, length and id of the runs of each row, all (B, max_segments); (T, 0, padding) where a row has fewer."""
    size = ids.shape[1]
    count = max(size, 1) if max_segments is None else _size("max_segments", max_segments)
    if count == 0:
        raise ValueError("max_segments must be at least 1, got 0.")
    if (known := _known(ids)) is not None:
        _check_count(name, known, count)
    padded = jnp.pad(jnp.asarray(ids), ((0, 0), (1, 1)), constant_values=PADDING_ID)
    row, real = padded[:, 1:-1], padded[:, 1:-1] != PADDING_ID
    first = _places(real & (row != padded[:, :-2]), count, size)
    last = _places(real & (row != padded[:, 2:]), count, size - 1)
    return first, last + 1 - first, jnp.take_along_axis(padded, first + 1, axis=1)


def _places(marks: Array, count: int, nowhere: int) -> Array:
    """(B, count): the first places of True in each row, then `nowhere`."""
    place = lambda row: jnp.flatnonzero(row, size=count, fill_value=nowhere)
    return jax.vmap(place)(marks).astype(jnp.int32)


def _offsets(begin: Array, shape: tuple[int, ...]) -> Array:
    """cu_seqlens of sequences that begin at these places of their rows: each ends where the next one begins."""
    batch, size = shape
    row = np.arange(batch, dtype=np.int32)[:, None] * np.int32(size)
    return jnp.append((begin + row).reshape(-1), np.int32(batch * size))


def _meet(ids: Array, kv_begin: Array, kv_used: Array, kv_ids: Array) -> tuple[Array, Array]:
    """Of one row: place and length of the run of keys that has each id, where the places do not fall.

    A run without keys has length 0, and stands where the next one with keys does.
    """
    order = jnp.argsort(kv_ids)
    place = order[jnp.searchsorted(kv_ids[order], ids).clip(max=kv_ids.size - 1)]
    found = (ids != PADDING_ID) & (kv_ids[place] == ids)
    begin = jnp.where(found, kv_begin[place], _NOWHERE)
    next_begin = jax.lax.cummin(jnp.append(begin[1:], _NOWHERE), reverse=True)
    return jnp.minimum(begin, next_begin), jnp.where(found & (begin < next_begin), kv_used[place], 0)


def _check_count(name: str, ids: np.ndarray, max_segments: int) -> None:
    for b, row in enumerate(ids):
        if (count := len(_run_ids(row))) > max_segments:
            raise ValueError(
                f"{name} holds {count} runs of equal ids in row {b}, max_segments is {max_segments}. Raise max_segments to at "
                f"least {count}."
            )


def _check_order(ids: np.ndarray | None, kv_ids: np.ndarray | None) -> None:
    if ids is None or kv_ids is None:
        return
    for b, rows in enumerate(zip(ids, kv_ids, strict=True)):
        runs, kv_runs = map(_run_ids, rows)
        for name, x in (("segment_ids", runs), ("kv_segment_ids", kv_runs)):
            if len(set(x)) < len(x):
                raise ValueError(f"With kv_segment_ids an id has one run in a row, got the runs {x} in row {b} of {name}.")
        if [x for x in runs if x in kv_runs] != [x for x in kv_runs if x in runs]:
            raise ValueError(
                "segment_ids and kv_segment_ids must hold the ids that they share in one order, got the runs "
                f"{runs} and {kv_runs} in row {b}."
            )


def _run_ids(row: np.ndarray) -> list[int]:
    """The ids of the runs of one row, without padding."""
    starts = np.append(np.ones(min(row.size, 1), bool), row[1:] != row[:-1])
    return [x for x in row[starts].tolist() if x != PADDING_ID]
