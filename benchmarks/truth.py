"""What the right result of a workload is, where it is cheap enough to know."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .inputs import Inputs
from .paged_inputs import PagedInputs

# Relative error norms. Rounding of P and of out to bfloat16 alone gives about 4e-3; a kernel with a wrong tile is far above.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}
CHUNK = 128


class Comparison(NamedTuple):
    error: float
    """The relative error where the truth is known. It is 1 for zeros."""
    finite: bool
    difference: float
    """The relative difference from our result, everywhere."""


class Outputs:
    """Attention in float64 of some rows of a batch, among them the ends of its longest and its shortest sequence."""

    def __init__(self, inputs: Inputs, count: int = 96):
        w = inputs.workload
        rng = np.random.default_rng(0)
        ends = np.cumsum(w.lengths)
        special = [ends[i] - n for i in (np.argmax(w.lengths), np.argmin(w.lengths)) for n in (w.lengths[i], 1)]
        self.rows = np.concatenate([special, rng.integers(0, w.total, count)])
        self.kv_heads = rng.integers(0, w.num_kv_heads, self.rows.size)
        self.inputs = inputs
        q, k, v = (np.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
        self.out = np.stack([self._row(q, k, v, row, head) for row, head in zip(self.rows, self.kv_heads, strict=True)])

    def _row(self, q, k, v, row: int, kv_head: int) -> np.ndarray:
        w = self.inputs.workload
        b = np.searchsorted(w.cu_seqlens, row, side="right") - 1
        begin = w.cu_seqlens[b]
        first, last = w.visible(row - begin, w.lengths[b])
        keys = slice(begin + first, begin + last + 1)
        return _attend(q[row, self.inputs.query_heads(kv_head)], k[keys, kv_head], v[keys, kv_head], self.inputs.softmax_scale)

    def compare(self, packed: jax.Array, ours: jax.Array) -> Comparison:
        """What is to be known of a packed result before it is timed."""
        rows = np.asarray(packed[self.rows]).astype(np.float64)
        heads = np.stack([row[self.inputs.query_heads(head)] for row, head in zip(rows, self.kv_heads, strict=True)])
        return Comparison(_relative(heads, self.out), *facts(packed, ours))


class PagedOutputs(Outputs):
    """The same over the elements that the first cache holds, of fewer rows: their keys alone leave the device."""

    def __init__(self, inputs: PagedInputs, count: int = 6):
        w = inputs.workload
        rng = np.random.default_rng(0)
        ends = w.cu_seqlens_q[1:]
        longest, shortest = np.argmax(w.lengths), np.argmin(w.lengths)
        special = [ends[longest] - w.queries[longest], ends[longest] - 1, ends[shortest] - 1]
        self.rows = np.concatenate([special, rng.integers(0, w.total_q, count)])
        self.kv_heads = rng.integers(0, w.num_kv_heads, self.rows.size)
        self.inputs = inputs
        self.out = np.stack([self._paged_row(row, head) for row, head in zip(self.rows, self.kv_heads, strict=True)])

    def _paged_row(self, row: int, kv_head: int) -> np.ndarray:
        inputs, w = self.inputs, self.inputs.workload
        b = np.searchsorted(w.cu_seqlens_q, row, side="right") - 1
        visible = w.lengths[b] - (w.cu_seqlens_q[b + 1] - 1 - row)
        k, v = (np.asarray(_of_sequence(pool, inputs.block_table[b], kv_head))[:visible] for pool in inputs.caches[0])
        if inputs.scales is not None:
            k, v = (x.astype(np.float64) * float(scale[kv_head]) for x, scale in zip((k, v), inputs.scales, strict=True))
        return _attend(np.asarray(inputs.q[row, inputs.query_heads(kv_head)]), k, v, inputs.softmax_scale)


@jax.jit
def _of_sequence(pool, blocks, kv_head):
    return pool[blocks, :, kv_head].reshape(-1, pool.shape[-1])


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float) -> np.ndarray:
    """Of the heads q (group_size, head_dim) of one row over the keys that it sees."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = q @ k.T
    p = np.exp(softmax_scale * (s - s.max(-1, keepdims=True)))
    return p / p.sum(-1, keepdims=True) @ v


class Gradients:
    """dq, dk and dv of some heads of the longest, the shortest and another sequence: JAX's derivative of a plain softmax."""

    def __init__(self, inputs: Inputs):
        w = inputs.workload
        rng = np.random.default_rng(0)
        self.inputs = inputs
        sequences = dict.fromkeys([int(np.argmax(w.lengths)), int(np.argmin(w.lengths)), int(rng.integers(len(w.lengths)))])
        self.parts = [(b, int(rng.integers(w.num_kv_heads))) for b in sequences]
        self.expected = [self._part(b, kv_head) for b, kv_head in self.parts]

    def _part(self, b: int, kv_head: int) -> list[np.ndarray]:
        inputs, length = self.inputs, self.inputs.workload.lengths[b]
        q, k, v = self._cut((inputs.q, inputs.k, inputs.v), b, kv_head)
        (dout,) = self._cut((inputs.dout,), b, kv_head)
        first, last = inputs.workload.visible(np.arange(length), length)
        gradients = _dense_gradients(q, k, v, dout, first, last, inputs.softmax_scale)
        return [np.asarray(x).astype(np.float64) for x in gradients]

    def _cut(self, arrays, b: int, kv_head: int) -> list[jax.Array]:
        """The part of the first array, which has query heads, and of the others, which have kv heads."""
        cu_seqlens = self.inputs.workload.cu_seqlens
        rows = slice(cu_seqlens[b], cu_seqlens[b + 1])
        return [x[rows, kv_head if i else self.inputs.query_heads(kv_head)] for i, x in enumerate(arrays)]

    def compare(self, packed: Sequence[jax.Array], ours: Sequence[jax.Array]) -> Comparison:
        parts = [[np.asarray(x).astype(np.float64) for x in self._cut(packed, *part)] for part in self.parts]
        error = max(
            _relative(*(np.concatenate([x.ravel() for x in xs]) for xs in (actual, expected)))
            for actual, expected in zip(zip(*parts, strict=True), zip(*self.expected, strict=True), strict=True)
        )
        found = [facts(x, y) for x, y in zip(packed, ours, strict=True)]
        return Comparison(error, all(finite for finite, _ in found), max(apart for _, apart in found))


@jax.jit
def _dense_gradients(q, k, v, dout, first, last, softmax_scale):
    """Of q and dout (length, group_size, head_dim), k and v (length, head_dim), in float32; row i sees first[i] to last[i]."""
    q, k, v, dout = (x.astype(jnp.float32) for x in (q, k, v, dout))
    keys = jnp.arange(k.shape[0])
    dot = functools.partial(jnp.einsum, precision="highest")

    def attend(q, k, v):
        @jax.checkpoint
        def row(q, first, last):
            s = jnp.where((keys >= first) & (keys <= last), softmax_scale * dot("gd,nd->gn", q, k), -jnp.inf)
            return dot("gn,nd->gd", jax.nn.softmax(s), v)

        return jax.lax.map(lambda x: row(*x), (q, first, last), batch_size=CHUNK)

    return jax.vjp(attend, q, k, v)[1](dout)


def _relative(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def facts(packed: jax.Array, ours: jax.Array) -> tuple[bool, float]:
    """Whether a result is finite everywhere, and its relative difference from ours."""
    finite, apart = _compare(packed, ours)
    return bool(finite), float(apart)


@jax.jit
def _compare(packed, ours):
    a, b = packed.astype(jnp.float32), ours.astype(jnp.float32)
    return jnp.isfinite(packed).all(), jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))
