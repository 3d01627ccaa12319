"""The forward pass in plain JAX, tile by tile, for platforms and head dims that no kernel covers.

A tile of q holds rows of one sequence, so that a tile of keys can be cleared of everything that those rows do not see before
it is multiplied. Both loops run over as many tiles as the offsets ask for, whatever the static shapes are. Memory is linear
in tokens. Wrong offsets are clamped into the arrays.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

MAX_TILE_Q = 128
MIN_TILE_Q = 8
TILE_K = 128


def fwd(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    seqused_q: Array | None,
    seqused_k: Array | None,
    softmax_scale: Array,
    alibi_slopes: Array | None,
    sinks: Array | None,
    *,
    window_left: int,
    window_right: int,
    softcap: float,
) -> tuple[Array, Array]:
    """out (total_q, num_heads, head_dim_v) in q's dtype and lse (num_heads, total_q) in float32."""
    (total_q, num_heads, head_dim), (total_k, num_kv_heads, head_dim_v) = q.shape, v.shape
    out = jnp.zeros_like(q, shape=(total_q, num_heads, head_dim_v))
    lse = jnp.full_like(q, -jnp.inf, jnp.float32, shape=(total_q, num_heads))
    batch = cu_seqlens_q.shape[0] - 1
    if batch == 0 or total_q == 0:
        return out, lse.T
    if total_k == 0:  # one key that no row sees
        k, v = (jnp.zeros((1, *x.shape[1:]), x.dtype) for x in (k, v))
    # A bound that no pair of rows can reach is no bound, and the others add up in int32.
    left = None if window_left == -1 or window_left >= total_k else window_left
    right = None if window_right == -1 or window_right >= total_q else window_right
    first_q, len_q = _sequences(cu_seqlens_q, seqused_q, total_q)
    first_k, len_k = _sequences(cu_seqlens_k, seqused_k, total_k)
    tile_q = _tile_q(total_q, batch)
    tiles = -(-len_q // tile_q)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)  # of each sequence's tiles among all tiles
    # Looked up here and not by bisection in the loop: XLA for GPUs (jaxlib 0.11.2) cannot compile a loop whose slices depend
    # on an inner loop's result. https://github.com/openxla/xla/issues/49299
    owner = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), tiles, total_repeat_length=total_q // tile_q + batch)
    group = (num_kv_heads, num_heads // num_kv_heads)
    slopes = None if alibi_slopes is None else jnp.broadcast_to(alibi_slopes, (batch, num_heads)).reshape(batch, *group)
    sinks = None if sinks is None else sinks.reshape(group)

    def tile(t, carry):
        out, lse = carry
        b = owner[t]
        start = (t - (ends[b] - tiles[b])) * tile_q  # place of the tile's first row in its sequence
        tile_rows = _Slice.of(first_q[b] + start, tile_q, total_q)
        place = tile_rows.rows - first_q[b]
        inside = (place >= start) & (place < len_q[b])
        q_tile = tile_rows.read(q, inside).reshape(tile_q, *group, head_dim)
        diagonal = place + len_k[b] - len_q[b]
        lo = jnp.zeros_like(place) if left is None else jnp.maximum(diagonal - left, 0)
        hi = len_k[b] if right is None else jnp.minimum(diagonal + right + 1, len_k[b])
        hi = jnp.where(inside, hi, 0)
        bias = None if slopes is None else (slopes[b], diagonal)
        out_tile, lse_tile = _attend(
            q_tile, k, v, first_k[b], lo, hi, bias, sinks, softmax_scale=softmax_scale, softcap=softcap
        )
        out_tile = out_tile.reshape(tile_q, num_heads, head_dim_v).astype(out.dtype)
        return tile_rows.write(out, out_tile, inside), tile_rows.write(lse, lse_tile.reshape(tile_q, num_heads), inside)

    out, lse = jax.lax.fori_loop(0, jnp.minimum(ends[-1], owner.size), tile, (out, lse))
    return out, lse.T


def _attend(q, k, v, first_k, lo, hi, bias, sinks, *, softmax_scale, softcap):
    """Online softmax of one tile of q (tile_q, num_kv_heads, group_size, head_dim).

    Row i sees the keys lo[i] <= j < hi[i] of the sequence whose keys start at row `first_k`.
    """
    tile_q, num_kv_heads, group_size, _ = q.shape
    tile_k = min(TILE_K, k.shape[0])
    q = q.astype(jnp.float32) * softmax_scale
    tile_hi = jnp.max(jnp.where(lo < hi, hi, 0))
    tile_lo = jnp.min(jnp.where(lo < hi, lo, tile_hi))

    def step(n, state):
        row_max, row_sum, acc = state
        start = tile_lo + n * tile_k
        keys = _Slice.of(first_k + start, tile_k, k.shape[0])
        j = keys.rows - first_k
        fresh = (j >= start) & (j < tile_hi)
        k_tile, v_tile = (keys.read(x, fresh).astype(jnp.float32) for x in (k, v))
        s = jnp.einsum("mkgd,nkd->kgmn", q, k_tile, precision="highest")
        if softcap:
            s = softcap * jnp.tanh(s / softcap)
        if bias is not None:
            slopes, diagonal = bias
            distance = jnp.abs(diagonal[:, None] - j[None, :]).astype(jnp.float32)
            s = s - slopes[:, :, None, None] * distance[None, None]
        seen = fresh[None, :] & (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
        s = jnp.where(seen[None, None], s, -jnp.inf)
        new_max = jnp.maximum(row_max, s.max(-1))
        shift = jnp.where(new_max == -jnp.inf, 0, new_max)
        p = jnp.exp(s - shift[..., None])
        decay = jnp.exp(row_max - shift)
        acc = acc * decay[..., None] + jnp.einsum("kgmn,nkd->kgmd", p, v_tile, precision="highest")
        return new_max, row_sum * decay + p.sum(-1), acc

    rows = (num_kv_heads, group_size, tile_q)
    full = functools.partial(jnp.full_like, q, dtype=jnp.float32)  # like q: varies over the same axes of a mesh
    if sinks is None:
        row_max, row_sum = full(-jnp.inf, shape=rows), full(0, shape=rows)
    else:
        row_max, row_sum = jnp.broadcast_to(sinks[:, :, None], rows), full(1, shape=rows)
    num_tiles = -(-(tile_hi - tile_lo) // tile_k)
    acc = full(0, shape=(*rows, v.shape[2]))
    row_max, row_sum, acc = jax.lax.fori_loop(0, num_tiles, step, (row_max, row_sum, acc))
    empty = row_sum == 0
    row_sum = jnp.where(empty, 1, row_sum)
    out = acc / row_sum[..., None]
    lse = jnp.where(empty, -jnp.inf, row_max + jnp.log(row_sum))
    return jnp.moveaxis(out, 2, 0), jnp.moveaxis(lse, 2, 0)


class _Slice(NamedTuple):
    """A stretch of rows of fixed size that is moved back into the array where it would leave it."""

    start: Array  # ()
    rows: Array  # (size,)

    @classmethod
    def of(cls, start, size: int, total: int) -> _Slice:
        start = jnp.clip(start, 0, total - size)
        return cls(start, start + jnp.arange(size, dtype=jnp.int32))

    def read(self, x, valid):
        """The rows, zero where not valid: 0 * NaN is NaN, so nothing else may enter a product."""
        rows = jax.lax.dynamic_slice_in_dim(x, self.start, self.rows.shape[0])
        return jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), rows, 0)

    def write(self, x, rows, valid):
        old = jax.lax.dynamic_slice_in_dim(x, self.start, self.rows.shape[0])
        rows = jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), rows, old)
        return jax.lax.dynamic_update_slice_in_dim(x, rows, self.start, 0)


def _sequences(cu_seqlens, seqused, total: int) -> tuple[Array, Array]:
    """First row and length of each sequence, both (batch,), within the array."""
    cu_seqlens = jnp.clip(cu_seqlens, 0, total)
    length = jnp.maximum(jnp.diff(cu_seqlens), 0)
    return cu_seqlens[:-1], length if seqused is None else jnp.clip(seqused, 0, length)


def _tile_q(total_q: int, batch: int) -> int:
    """The mean length as a power of two: sequences are many or long, seldom both."""
    mean = -(-total_q // batch)
    tile = min(max(1 << (mean - 1).bit_length(), MIN_TILE_Q), MAX_TILE_Q)
    return min(tile, total_q)
