"""The forward and the backward pass in plain JAX, tile by tile, for platforms and head dims that no kernel covers, and the
forward derivative on every platform.

Memory is linear in tokens, and the work is that of the tiles which the offsets ask for. In the comments of shapes, m are the
rows of a tile of q, n the keys of a tile of keys, k the kv heads and g the query heads of one of them.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from .tiles import Batch, TileQ

_einsum = functools.partial(jnp.einsum, precision="highest")


def fwd(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    seqused_q: Array | None,
    seqused_k: Array | None,
    softmax_scale: Array,
    alibi_slopes: Array | None,
    sinks: Array | None,
    block_table: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    window_left: int,
    window_right: int,
    softcap: float,
) -> tuple[Array, Array]:
    """out (total_q, num_heads, head_dim_v) in q's dtype and lse (num_heads, total_q) in float32."""
    (total_q, num_heads, _), (num_kv_heads, head_dim_v) = q.shape, v.shape[-2:]
    out = jnp.zeros_like(q, shape=(total_q, num_heads, head_dim_v))
    lse = jnp.full_like(q, -jnp.inf, jnp.float32, shape=(total_q, num_heads))
    if cu_seqlens_q.shape[0] == 1 or total_q == 0:
        return out, lse.T
    if k.shape[0] == 0 or (block_table is not None and block_table.shape[1] == 0):  # one key, or block, that no row sees
        k, v = (jnp.zeros((1, *x.shape[1:]), x.dtype) for x in (k, v))
        seqused_k = jnp.zeros_like(cu_seqlens_q[1:])
        block_table = None if block_table is None else seqused_k[:, None]
    offsets = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    batch = Batch.of(q, k, *offsets, alibi_slopes, window_left, window_right, block_table)
    sinks = None if sinks is None else sinks.reshape(num_kv_heads, -1)
    logit_scale = softmax_scale if k_scale is None else (softmax_scale * k_scale)[None, :, None, None]

    def step(tile: TileQ, carry):
        out, lse = carry
        out_tile, lse_tile = _attend(tile, tile.read(q, num_kv_heads) * logit_scale, k, v, sinks, softcap)
        out_tile = out_tile if v_scale is None else out_tile * v_scale[None, :, None, None]
        return tile.write(out, out_tile), tile.write(lse, lse_tile)

    out, lse = batch.for_each_tile(step, (out, lse))
    return out, lse.T


def _attend(tile: TileQ, q, k, v, sinks, softcap: float):
    """out (m, k, g, head_dim_v) and lse (m, k, g) of q (m, k, g, head_dim), by online softmax."""

    def step(keys, state):
        row_max, row_sum, acc = state
        s, _ = keys.logits(q, keys.read(k), softcap)
        new_max = jnp.maximum(row_max, s.max(-1))
        shift = jnp.where(new_max == -jnp.inf, 0, new_max)
        p = jnp.exp(s - shift[..., None])
        decay = jnp.exp(row_max - shift)
        acc = acc * decay[..., None] + _einsum("kgmn,nkd->kgmd", p, keys.read(v))
        return new_max, row_sum * decay + p.sum(-1), acc

    rows = (*q.shape[1:3], q.shape[0])
    full = functools.partial(jnp.full_like, q)  # like q: varies over the same axes of a mesh
    if sinks is None:
        row_max, row_sum = full(-jnp.inf, shape=rows), full(0, shape=rows)
    else:
        row_max, row_sum = jnp.broadcast_to(sinks[:, :, None], rows), full(1, shape=rows)
    row_max, row_sum, acc = tile.for_each_tile_k(step, (row_max, row_sum, full(0, shape=(*rows, v.shape[-1]))))
    empty = row_sum == 0
    row_sum = jnp.where(empty, 1, row_sum)
    out = acc / row_sum[..., None]
    lse = jnp.where(empty, -jnp.inf, row_max + jnp.log(row_sum))
    return jnp.moveaxis(out, 2, 0), jnp.moveaxis(lse, 2, 0)


def bwd(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    seqused_q: Array | None,
    seqused_k: Array | None,
    softmax_scale: Array,
    alibi_slopes: Array | None,
    dout: Array,
    lse: Array,
    delta: Array,
    *,
    window_left: int,
    window_right: int,
    softcap: float,
) -> tuple[Array, Array, Array]:
    """dq, dk, dv in the dtypes of q, k, v, from lse and delta = rowsum(dout * out) - dlse, both (num_heads, total_q)."""
    num_kv_heads = k.shape[1]
    dq = jnp.zeros_like(q)
    dk, dv = (jnp.zeros_like(q, jnp.float32, shape=x.shape) for x in (k, v))  # like q: see _attend
    if cu_seqlens_q.shape[0] > 1 and q.shape[0] and k.shape[0]:
        offsets = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        batch = Batch.of(q, k, *offsets, alibi_slopes, window_left, window_right)
        lse, delta = lse.T, delta.T

        def step(tile: TileQ, carry):
            dq, dk, dv = carry
            q_tile, dout_tile, lse_tile, delta_tile = (tile.read(x, num_kv_heads) for x in (q, dout, lse, delta))
            rows = (q_tile * softmax_scale, dout_tile, lse_tile, delta_tile)
            dq_tile, dk, dv = _differentiate(tile, rows, k, v, dk, dv, softcap)
            return tile.write(dq, dq_tile * softmax_scale), dk, dv

        dq, dk, dv = batch.for_each_tile(step, (dq, dk, dv))
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def _differentiate(tile: TileQ, rows, k, v, dk, dv, softcap: float):
    """dq (m, k, g, head_dim) before it is scaled, and dk and dv with what the tile adds to them.

    `rows` are q, scaled, and dout, lse and delta, all (m, k, g, ...).
    """
    q, dout, lse, delta = rows
    lse, delta = (jnp.moveaxis(x, 0, 2)[..., None] for x in (lse, delta))  # (k, g, m, 1)
    live = lse > -jnp.inf

    def step(keys, carry):
        dq, dk, dv = carry
        k_tile, v_tile = keys.read(k), keys.read(v)
        s, tanh = keys.logits(q, k_tile, softcap)
        p = jnp.where(live, jnp.exp(s - lse), 0)
        ds = p * (_einsum("mkgd,nkd->kgmn", dout, v_tile) - delta)
        ds = jnp.where(live & keys.seen[None, None], ds, 0)
        if tanh is not None:
            ds = ds * (1 - tanh * tanh)
        dq = dq + _einsum("kgmn,nkd->mkgd", ds, k_tile)
        dk = keys.add(dk, _einsum("kgmn,mkgd->nkd", ds, q))
        dv = keys.add(dv, _einsum("kgmn,mkgd->nkd", p, dout))
        return dq, dk, dv

    return tile.for_each_tile_k(step, (jnp.zeros_like(q), dk, dv))


def tangent(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    seqused_q: Array | None,
    seqused_k: Array | None,
    softmax_scale: Array,
    alibi_slopes: Array | None,
    lse: Array,
    q_dot: Array | None,
    k_dot: Array | None,
    v_dot: Array | None,
    *,
    window_left: int,
    window_right: int,
    softcap: float,
) -> tuple[Array, Array]:
    """The sums over the keys of P v_dot + P s_dot v (total_q, num_heads, head_dim_v), and of P s_dot (num_heads, total_q).

    Both in float32, where s_dot is the tangent of the logits and P = exp(s - lse). An absent tangent is zero.
    """
    (total_q, num_heads, _), (num_kv_heads, head_dim_v) = q.shape, v.shape[-2:]
    out_dot = jnp.zeros_like(q, jnp.float32, shape=(total_q, num_heads, head_dim_v))
    lse_dot = jnp.zeros_like(q, jnp.float32, shape=(total_q, num_heads))
    if cu_seqlens_q.shape[0] > 1 and q.shape[0] and k.shape[0]:
        offsets = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        batch = Batch.of(q, k, *offsets, alibi_slopes, window_left, window_right)
        pairs = ((q, q_dot), (k, k_dot), (v, v_dot))
        q_dot, k_dot, v_dot = (jnp.zeros_like(x) if x_dot is None else x_dot for x, x_dot in pairs)
        lse = lse.T

        def step(tile: TileQ, carry):
            out_dot, lse_dot = carry
            q_tile, q_dot_tile, lse_tile = (tile.read(x, num_kv_heads) for x in (q, q_dot, lse))
            rows = (q_tile * softmax_scale, q_dot_tile * softmax_scale, lse_tile)
            out_dot_tile, lse_dot_tile = _push_forward(tile, rows, k, v, k_dot, v_dot, softcap)
            return tile.write(out_dot, out_dot_tile), tile.write(lse_dot, lse_dot_tile)

        out_dot, lse_dot = batch.for_each_tile(step, (out_dot, lse_dot))
    return out_dot, lse_dot.T


def _push_forward(tile: TileQ, rows, k, v, k_dot, v_dot, softcap: float):
    """The sums (m, k, g, head_dim_v) and (m, k, g) of the tile's rows: q and q_dot, scaled, and lse, all (m, k, g, ...)."""
    q, q_dot, lse = rows
    lse = jnp.moveaxis(lse, 0, 2)[..., None]  # (k, g, m, 1)
    live = lse > -jnp.inf

    def step(keys, carry):
        out_dot, lse_dot = carry
        k_tile, v_tile, k_dot_tile, v_dot_tile = (keys.read(x) for x in (k, v, k_dot, v_dot))
        s, tanh = keys.logits(q, k_tile, softcap)
        p = jnp.where(live, jnp.exp(s - lse), 0)
        s_dot = _einsum("mkgd,nkd->kgmn", q_dot, k_tile) + _einsum("mkgd,nkd->kgmn", q, k_dot_tile)
        if tanh is not None:
            s_dot = s_dot * (1 - tanh * tanh)
        p_dot = jnp.where(live & keys.seen[None, None], p * s_dot, 0)
        out_dot = out_dot + _einsum("kgmn,nkd->mkgd", p_dot, v_tile) + _einsum("kgmn,nkd->mkgd", p, v_dot_tile)
        return out_dot, lse_dot + jnp.moveaxis(p_dot.sum(-1), 2, 0)

    zeros = (jnp.zeros_like(q, shape=(*q.shape[:3], v.shape[-1])), jnp.zeros_like(q, shape=q.shape[:3]))
    return tile.for_each_tile_k(step, zeros)


def tangent_of_results(out_dot: Array, lse_dot: Array, sinks: Array | None, sinks_dot: Array | None, out: Array, lse: Array):
    """The tangents of out and lse from what `tangent` returns. A sink is a logit whose value is zero."""
    if sinks is not None and sinks_dot is not None:
        lse_dot = lse_dot + sinks_probability(sinks, lse) * sinks_dot[:, None]
    lse_dot = jnp.where(lse == -jnp.inf, 0, lse_dot)  # so that no cotangent of a row of nobody goes further
    out_dot = out_dot - lse_dot.T[..., None] * out.astype(jnp.float32)
    return out_dot.astype(out.dtype), lse_dot


def sinks_probability(sinks: Array, lse: Array) -> Array:
    """P = exp(sink - lse), (num_heads, total_q); 0 in rows of nobody, whose lse is -inf."""
    return jnp.exp(sinks[:, None] - jnp.where(lse == -jnp.inf, jnp.inf, lse))
