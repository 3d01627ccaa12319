"""Tiles of q and of keys of a packed batch, or of paged keys, as the loops of `blocked` walk over them.

A tile of q holds rows of one sequence, so that a tile of keys can be cleared of everything that those rows do not see before
it is multiplied. There are as many tiles as the offsets ask for, whatever the static shapes are. Wrong offsets and block ids
are clamped into the arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax import Array

MAX_TILE_Q = 128
MIN_TILE_Q = 8
TILE_K = 128


class Batch(NamedTuple):
    """The sequences of a call, and the tiles of q that they are cut into."""

    first_q: Array  # (batch,), like all arrays here but `owner`
    len_q: Array
    first_k: Array  # 0 with a block table
    len_k: Array
    tiles: Array  # of each sequence
    ends: Array  # of each sequence's tiles among all tiles
    owner: Array  # the sequence of each tile
    slopes: Array | None  # (batch, num_kv_heads, group_size)
    total_q: int
    total_k: int  # with a block table, of one sequence
    left: int | None
    right: int | None
    block_table: Array | None  # (batch, max_blocks)

    @classmethod
    def of(
        cls,
        q,
        k,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        alibi_slopes,
        window_left: int,
        window_right: int,
        block_table=None,
    ) -> Batch:
        (total_q, num_heads, _), num_kv_heads = q.shape, k.shape[-2]
        total_k = k.shape[0] if block_table is None else block_table.shape[1] * k.shape[1]
        batch = cu_seqlens_q.shape[0] - 1
        if any(jax.export.is_symbolic_dim(n) for n in (total_q, total_k, batch)):
            raise NotImplementedError(
                "Symbolic shapes take a kernel: on CPU, and for cuda with head_dim up to 256, with jax.grad alone of all "
                f"derivatives, and once. Got q {q.shape}, k {k.shape} and cu_seqlens_q {cu_seqlens_q.shape}. Export the "
                "function for sizes that are numbers."
            )
        # A bound that no pair of rows can reach is no bound, and the others add up in int32.
        left = None if window_left == -1 or window_left >= total_k else window_left
        right = None if window_right == -1 or window_right >= total_q else window_right
        first_q, len_q = _sequences(cu_seqlens_q, seqused_q, total_q)
        if block_table is None:
            first_k, len_k = _sequences(cu_seqlens_k, seqused_k, total_k)
        else:
            first_k, len_k = jnp.zeros_like(len_q), _lengths(cu_seqlens_k, seqused_k, total_k)
        tile_q = _tile_q(total_q, batch)
        tiles = -(-len_q // tile_q)
        ends = jnp.cumsum(tiles, dtype=jnp.int32)
        # Looked up here and not by bisection in the loop: XLA for GPUs (jaxlib 0.11.2) cannot compile a loop whose slices
        # depend on an inner loop's result. https://github.com/openxla/xla/issues/49299
        owner = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), tiles, total_repeat_length=total_q // tile_q + batch)
        group = (num_kv_heads, num_heads // num_kv_heads)
        slopes = None if alibi_slopes is None else jnp.broadcast_to(alibi_slopes, (batch, num_heads)).reshape(batch, *group)
        return cls(first_q, len_q, first_k, len_k, tiles, ends, owner, slopes, total_q, total_k, left, right, block_table)

    def for_each_tile(self, step, carry):
        """`carry` after `carry = step(tile, carry)` for every tile of q."""
        count = jnp.minimum(self.ends[-1], self.owner.size)
        return jax.lax.fori_loop(0, count, lambda t, carry: step(self._tile(t), carry), carry)

    def _tile(self, t) -> TileQ:
        b, tile_q = self.owner[t], _tile_q(self.total_q, self.first_q.shape[0])
        start = (t - (self.ends[b] - self.tiles[b])) * tile_q  # place of the tile's first row in its sequence
        rows = Slice.of(self.first_q[b] + start, tile_q, self.total_q)
        place = rows.rows - self.first_q[b]
        inside = (place >= start) & (place < self.len_q[b])
        diagonal = place + self.len_k[b] - self.len_q[b]
        lo = jnp.zeros_like(place) if self.left is None else jnp.maximum(diagonal - self.left, 0)
        hi = self.len_k[b] if self.right is None else jnp.minimum(diagonal + self.right + 1, self.len_k[b])
        hi = jnp.where(inside, hi, 0)
        slopes = None if self.slopes is None else self.slopes[b]
        table = None if self.block_table is None else self.block_table[b]
        return TileQ(rows, inside, diagonal, lo, hi, slopes, self.first_k[b], self.total_k, table)


class TileQ(NamedTuple):
    """Rows of one sequence. Row i sees the keys lo[i] <= j < hi[i] of its sequence."""

    rows: Slice
    inside: Array  # (tile_q,) whether the row is one of this tile's
    diagonal: Array  # (tile_q,) the key that the row is aligned with
    lo: Array  # (tile_q,)
    hi: Array  # (tile_q,)
    slopes: Array | None  # (num_kv_heads, group_size)
    first_k: Array  # ()
    total_k: int
    table: Array | None  # (max_blocks,)

    def read(self, x, num_kv_heads: int):
        """The tile's rows (tile_q, num_kv_heads, group_size, ...) of x (total_q, num_heads, ...) in float32.

        Rows that see no key are zero: nothing of theirs, NaN included, reaches a product.
        """
        x = self.rows.read(x, self.lo < self.hi).astype(jnp.float32)
        return x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])

    def write(self, x, rows):
        """x with the tile's rows (tile_q, num_kv_heads, group_size, ...)."""
        rows = rows.reshape(rows.shape[0], *x.shape[1:]).astype(x.dtype)
        return self.rows.write(x, rows, self.inside)

    def for_each_tile_k(self, step, carry):
        """`carry` after `carry = step(tile, carry)` for every tile of keys that a row of this one sees."""
        tile_k = min(TILE_K, self.total_k)
        tile_hi = jnp.max(jnp.where(self.lo < self.hi, self.hi, 0))
        tile_lo = jnp.min(jnp.where(self.lo < self.hi, self.lo, tile_hi))

        def numbered_step(n, carry):
            start = tile_lo + n * tile_k
            rows = Slice.of(self.first_k + start, tile_k, self.total_k)
            j = rows.rows - self.first_k
            fresh = (j >= start) & (j < tile_hi)
            seen = fresh[None, :] & (j[None, :] >= self.lo[:, None]) & (j[None, :] < self.hi[:, None])
            distance = jnp.abs(self.diagonal[:, None] - j[None, :])
            return step(TileK(rows, fresh, seen, distance, self.slopes, self.table), carry)

        return jax.lax.fori_loop(0, -(-(tile_hi - tile_lo) // tile_k), numbered_step, carry)


class TileK(NamedTuple):
    """Keys of one sequence, beside a tile of q."""

    rows: Slice
    fresh: Array  # (tile_k,) whether the key is one of this tile's
    seen: Array  # (tile_q, tile_k)
    distance: Array  # (tile_q, tile_k) from the row's diagonal
    slopes: Array | None  # (num_kv_heads, group_size)
    table: Array | None  # (max_blocks,): the rows are those of a sequence that lies in blocks

    def read(self, x):
        """The tile's rows of x (total_k, num_kv_heads, ...), or (num_blocks, block_size, num_kv_heads, ...), in float32."""
        if self.table is None:
            return self.rows.read(x, self.fresh).astype(jnp.float32)
        num_blocks, block_size = x.shape[:2]
        block = jnp.clip(self.table[self.rows.rows // block_size], 0, num_blocks - 1)
        rows = x[block, self.rows.rows % block_size].astype(jnp.float32)
        return jnp.where(self.fresh.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)

    def add(self, x, rows):
        """x with `rows` added to the tile's; those of other tiles must be zero."""
        return self.rows.write(x, self.rows.read(x, self.fresh) + rows, self.fresh)

    def logits(self, q, k, softcap: float):
        """s and tanh(q.k / softcap) (None without one), both (num_kv_heads, group_size, tile_q, tile_k).

        q (tile_q, num_kv_heads, group_size, head_dim) has the scale in it; s is -inf where the key is not seen.
        """
        s, tanh = jnp.einsum("mkgd,nkd->kgmn", q, k, precision="highest"), None
        if softcap:
            tanh = jnp.tanh(s / softcap)
            s = softcap * tanh
        if self.slopes is not None:
            s = s - self.slopes[:, :, None, None] * self.distance.astype(jnp.float32)[None, None]
        return jnp.where(self.seen[None, None], s, -jnp.inf), tanh


class Slice(NamedTuple):
    """A stretch of rows of fixed size that is moved back into the array where it would leave it."""

    start: Array  # ()
    rows: Array  # (size,)

    @classmethod
    def of(cls, start, size: int, total: int) -> Slice:
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


def _lengths(cu_seqlens, seqused, capacity: int) -> Array:
    """(batch,), of sequences that have a stretch of `capacity` rows each. One of the two may be absent."""
    if cu_seqlens is not None:
        length = jnp.maximum(jnp.diff(cu_seqlens), 0)
        seqused = length if seqused is None else jnp.minimum(seqused, length)
    return jnp.clip(seqused, 0, min(capacity, 2**31 - 1))


def _tile_q(total_q: int, batch: int) -> int:
    """The mean length as a power of two: sequences are many or long, seldom both."""
    mean = -(-total_q // batch)
    tile = min(max(1 << (mean - 1).bit_length(), MIN_TILE_Q), MAX_TILE_Q)
    return min(tile, total_q)
