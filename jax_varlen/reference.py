"""The definition of the attention in plain jax.numpy: what every kernel is tested against, and what runs anywhere.

Nothing here is shared with the rest of the package, and nothing is fast: each row of q looks at all keys of the batch.
"""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

INT32_MAX = 2**31 - 1


def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    softmax_scale: ArrayLike | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """The attention of every sequence of a packed batch, as it is defined.

    For row i of a sequence with len_q rows of q and len_k keys, and d = i + len_k - len_q:

        s_j = softmax_scale * dot(q_i, k_j)
        s_j = softcap * tanh(s_j / softcap)                       (with softcap)
        s_j = s_j - alibi_slope * |d - j|                         (with alibi_slopes)
        key j is seen iff d - left <= j <= d + right              (window_size; causal makes right 0)
        lse = log(sum over seen j of exp(s_j) + exp(sink))        (no exp(sink) without sinks)
        out = sum over seen j of exp(s_j - lse) * v_j

    A row that sees no key has out 0 and lse = sink, or -inf without sinks. A row that belongs to no sequence has out 0
    and lse -inf. What a row does not see, NaN and Inf included, reaches neither its result nor a gradient.

    k and v are first multiplied by the k_scale and the v_scale of their kv head, where these are given.

    Arguments, shapes and results are those of `jax_varlen.varlen_attention`. It computes in float32, or in float64 for
    float64 inputs, and lse has that dtype. Everything of floating point is differentiable, paged keys and values too.
    `deterministic` changes nothing: the result always is. A call that is wrong there is a ValueError or TypeError here too.
    """
    _check_options(softmax_scale, softcap, causal=causal, deterministic=deterministic, return_lse=return_lse)
    left, right = _window(window_size, causal)
    _check_pools(q, k, cu_seqlens_q, cu_seqlens_k, block_table)
    if k_scale is not None:
        k = _scaled(k, k_scale)
    if v_scale is not None:
        v = _scaled(v, v_scale)
    arrays = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table, softmax_scale, alibi_slopes, sinks)
    out, lse = _attention(*(x if x is None else jnp.asarray(x) for x in arrays), left, right, softcap)
    return (out, lse) if return_lse else out


def _check_options(softmax_scale, softcap, **flags) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name} must be a Python bool, got {flag!r}.")
    if not isinstance(softmax_scale, Array | None) and not np.isfinite(softmax_scale).all():
        raise ValueError(f"softmax_scale must be finite, got {softmax_scale}.")
    if softcap is None:
        return
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float, np.integer, np.floating)):
        raise TypeError(f"softcap must be a Python number or None, got {softcap!r}.")
    if not 2.0**-126 <= softcap < 2.0**128:
        raise ValueError(f"softcap must be greater than 0 and finite in float32, or None for no cap, got {softcap}.")


def _check_pools(q, k, cu_seqlens_q, cu_seqlens_k, block_table) -> None:
    q, k = jnp.asarray(q), jnp.asarray(k)
    if q.dtype.itemsize == 1:
        raise TypeError(f"q must be float32, bfloat16, float16 or float64, got {q.dtype}.")
    if block_table is None:
        return
    if k.ndim == 4 and k.shape[1] == 0:
        raise ValueError(f"block_size must be at least 1, got 0 in k {k.shape}.")
    if cu_seqlens_k is not None and np.shape(cu_seqlens_k) != np.shape(cu_seqlens_q):
        raise ValueError(
            f"cu_seqlens_k must have the shape of cu_seqlens_q, got {np.shape(cu_seqlens_k)} and {np.shape(cu_seqlens_q)}."
        )


def _check_arrays(q, k, v, alibi_slopes, sinks) -> None:
    """Whatever would be computed, though it means nothing; what cannot be computed fails anyway."""
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"q, k and v must have one dtype of floating point, got {q.dtype}, {k.dtype} and {v.dtype}.")
    if q.ndim != 3 or 0 in q.shape[1:]:
        raise ValueError(f"q must have shape (total_q, num_heads, head_dim), with heads and columns, got {q.shape}.")
    if alibi_slopes is not None and alibi_slopes.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"alibi_slopes must be float32, got {alibi_slopes.dtype}.")
    if sinks is not None and sinks.dtype == bool:
        raise TypeError(f"sinks must hold real numbers, got {sinks.dtype}.")


@jax.jit
def _attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table, softmax_scale, alibi_slopes, sinks,
    left, right, softcap,
):  # fmt: skip
    _check_arrays(q, k, v, alibi_slopes, sinks)
    if block_table is not None:
        k, v, cu_seqlens_k, seqused_k = _contiguous(k, v, block_table, cu_seqlens_k, seqused_k)
    elif cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
        if len(q) != len(k):
            raise ValueError(f"cu_seqlens_k may be left out only when total_k == total_q, got {len(q)} and {len(k)} tokens.")
    queries = _rows(cu_seqlens_q, seqused_q, q.shape[0])
    keys = _rows(cu_seqlens_k, seqused_k, k.shape[0])
    diagonal = queries.place + (keys.length - queries.length)[queries.owner]

    (total_q, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}.")
    group_size, batch = num_heads // num_kv_heads, cu_seqlens_q.shape[0] - 1
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    scale = jnp.asarray(head_dim**-0.5 if softmax_scale is None else softmax_scale, dtype)
    slopes = _slopes_of_rows(alibi_slopes, queries.owner, num_heads, dtype)
    sinks = jnp.full(num_heads, -jnp.inf, dtype) if sinks is None else sinks.astype(dtype)

    def attend_group(q, k, v, slopes, sinks):
        """The query heads that share a kv head: q (total_q, group_size, head_dim), k and v (total_k, head_dim)."""

        @jax.checkpoint
        def attend_row(q_i, slope, owner, d):
            seen = (keys.owner == owner) & (owner < batch) & (d - keys.place <= left) & (keys.place - d <= right)
            k_seen = jnp.where(seen[:, None], k, 0).astype(dtype)
            v_seen = jnp.where(seen[:, None], v, 0).astype(dtype)
            s = scale * jnp.dot(q_i.astype(dtype), k_seen.T, precision="highest")
            if softcap is not None:
                s = softcap * jnp.tanh(s / softcap)
            s = s - slope[:, None] * jnp.abs(d - keys.place).astype(dtype)[None, :]
            s = jnp.where(seen[None, :], s, -jnp.inf)

            top = jax.lax.stop_gradient(jnp.maximum(s.max(-1, initial=-jnp.inf), sinks))
            top = jnp.where(top == -jnp.inf, 0, top)
            p = jnp.exp(s - top[:, None])
            total = p.sum(-1) + jnp.exp(sinks - top)
            sees_nothing = total == 0
            total = jnp.where(sees_nothing, 1, total)
            out = jnp.dot(p / total[:, None], v_seen, precision="highest")
            return out, jnp.where(sees_nothing, -jnp.inf, jnp.log(total) + top)

        return jax.lax.map(lambda row: attend_row(*row), (q, slopes, queries.owner, diagonal), batch_size=8)

    owned = queries.owner < batch
    q_groups = jnp.where(owned[:, None, None], q, 0).reshape(total_q, num_kv_heads, group_size, head_dim)
    groups = (x.swapaxes(0, 1) for x in (q_groups, k, v, slopes.reshape(total_q, num_kv_heads, group_size)))
    out, lse = jax.lax.map(lambda group: attend_group(*group), (*groups, sinks.reshape(num_kv_heads, group_size)))
    out = out.swapaxes(0, 1).reshape(total_q, num_heads, v.shape[2])
    lse = lse.swapaxes(1, 2).reshape(num_heads, total_q)
    return jnp.where(owned[:, None, None], out, 0).astype(q.dtype), jnp.where(owned[None, :], lse, -jnp.inf)


class _Rows(NamedTuple):
    owner: Array  # (total,) sequence of each row, batch for a row of nobody
    place: Array  # (total,) place of each row in its sequence
    length: Array  # (batch + 1,) length of each sequence, 0 for nobody


def _rows(cu_seqlens, seqused, total: int) -> _Rows:
    for name, x in (("cu_seqlens", cu_seqlens), ("seqused", seqused)):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must hold integers, got {x.dtype}.")
    if cu_seqlens.ndim != 1 or not cu_seqlens.size:
        raise ValueError(f"cu_seqlens must have shape (batch + 1,), got {cu_seqlens.shape}.")
    batch = cu_seqlens.shape[0] - 1
    cu_seqlens = jnp.clip(cu_seqlens.astype(jnp.int32), 0, total)
    length = jnp.maximum(jnp.diff(cu_seqlens), 0)
    if seqused is not None:
        length = jnp.clip(seqused.astype(jnp.int32), 0, length)
    length = jnp.append(length, jnp.int32(0))

    row = jnp.arange(total, dtype=jnp.int32)
    owner = jnp.searchsorted(cu_seqlens, row, side="right").astype(jnp.int32) - 1  # the last sequence that starts here
    owner = jnp.where(owner < 0, batch, owner)
    place = row - cu_seqlens[owner]
    return _Rows(jnp.where(place < length[owner], owner, batch), place, length)


def _contiguous(k, v, block_table, cu_seqlens_k, seqused_k):
    """The keys and values of paged sequences, each in its own stretch of max_blocks * block_size rows."""
    if seqused_k is None and cu_seqlens_k is None:
        raise ValueError("a block_table needs the lengths of the keys: pass seqused_k or cu_seqlens_k.")
    batch, max_blocks = block_table.shape
    capacity = max_blocks * k.shape[1]
    if cu_seqlens_k is not None:
        lengths = jnp.diff(cu_seqlens_k)
        seqused_k = lengths if seqused_k is None else jnp.minimum(lengths, seqused_k)
    k, v = (jnp.take(x, block_table.reshape(-1), axis=0, mode="clip") for x in (k, v))
    k, v = (x.reshape(batch * capacity, *x.shape[2:]) for x in (k, v))
    return k, v, jnp.arange(batch + 1, dtype=jnp.int32) * capacity, seqused_k


def _scaled(x, scale) -> Array:
    """x (..., num_kv_heads, dim) times the scale of each head, in float32 (float64 for float64)."""
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    scale = jnp.broadcast_to(scale.astype(dtype), x.shape[-2:-1]).reshape(*[1] * (x.ndim - 2), -1, 1)
    return x.astype(dtype) * scale


def _slopes_of_rows(alibi_slopes, owner, num_heads: int, dtype) -> Array:
    """(total_q, num_heads)."""
    if alibi_slopes is None:
        return jnp.zeros((owner.shape[0], num_heads), dtype)
    if alibi_slopes.ndim == 1:
        return jnp.broadcast_to(alibi_slopes.astype(dtype)[None, :], (owner.shape[0], num_heads))
    return jnp.pad(alibi_slopes.astype(dtype), ((0, 1), (0, 0)))[owner]  # one more row, for nobody


def _window(window_size: tuple[int | None, int | None], causal: bool) -> tuple[int, int]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size must be a pair (left, right), got {window_size!r}.")
    left, right = (-1 if bound is None else operator.index(bound) for bound in window_size)
    if left < -1 or right < -1:
        raise ValueError(f"window_size bounds must be None, -1 or at least 0, got {window_size}.")
    left, right = (INT32_MAX if bound == -1 else min(bound, INT32_MAX) for bound in (left, right))
    return left, 0 if causal else right
