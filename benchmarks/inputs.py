"""The arrays of a workload, and what the right result of some of its rows is."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .workloads import Workload

# Relative error norms. Rounding of P and of out to bfloat16 alone gives about 4e-3; a kernel with a wrong tile is far above.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Random normal q, k, v of a workload, on the default device."""

    workload: Workload
    dtype: str
    q: jax.Array
    k: jax.Array
    v: jax.Array
    cu_seqlens: jax.Array

    @property
    def platform(self) -> str:
        return jax.default_backend()

    @property
    def softmax_scale(self) -> float:
        return self.workload.head_dim**-0.5

    @property
    def group_size(self) -> int:
        return self.workload.num_heads // self.workload.num_kv_heads


def make(workload: Workload, dtype: str, seed: int = 0) -> Inputs:
    w = workload
    shapes = [(w.total, heads, w.head_dim) for heads in (w.num_heads, w.num_kv_heads, w.num_kv_heads)]
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (_normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    return Inputs(w, dtype, q, k, v, jnp.asarray(w.cu_seqlens))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


def num_threads() -> int:
    """Threads of every contender on CPU: XLA takes one for each core that the process may use."""
    return len(os.sched_getaffinity(0))


class Comparison(NamedTuple):
    error: float
    """The relative error in the rows whose truth is known. It is 1 for zeros."""
    finite: bool
    difference: float
    """The relative difference from our result, in all rows."""


class Truth:
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

    def _heads(self, kv_head: int) -> slice:
        return slice(kv_head * self.inputs.group_size, (kv_head + 1) * self.inputs.group_size)

    def _row(self, q, k, v, row: int, kv_head: int) -> np.ndarray:
        w = self.inputs.workload
        b = np.searchsorted(w.cu_seqlens, row, side="right") - 1
        begin = w.cu_seqlens[b]
        first, last = w.visible(row - begin, w.lengths[b])
        keys = slice(begin + first, begin + last + 1)
        s = q[row, self._heads(kv_head)].astype(np.float64) @ k[keys, kv_head].astype(np.float64).T
        p = np.exp(self.inputs.softmax_scale * (s - s.max(-1, keepdims=True)))
        return p / p.sum(-1, keepdims=True) @ v[keys, kv_head].astype(np.float64)

    def compare(self, packed: jax.Array, ours: jax.Array) -> Comparison:
        """What is to be known of a packed result before it is timed."""
        rows, finite, apart = _facts(packed, ours, self.rows)
        rows = np.asarray(rows).astype(np.float64)
        heads = np.stack([row[self._heads(head)] for row, head in zip(rows, self.kv_heads, strict=True)])
        return Comparison(float(np.linalg.norm(heads - self.out) / np.linalg.norm(self.out)), bool(finite), float(apart))


@jax.jit
def _facts(packed, ours, rows):
    a, b = packed.astype(jnp.float32), ours.astype(jnp.float32)
    return packed[rows], jnp.isfinite(packed).all(), jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))
