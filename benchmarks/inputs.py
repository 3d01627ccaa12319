"""The arrays of a workload."""

from __future__ import annotations

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp

from .workloads import Workload


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Random normal q, k, v of a workload, and a dout for the backward pass, on the default device."""

    workload: Workload
    dtype: str
    q: jax.Array
    k: jax.Array
    v: jax.Array
    cu_seqlens: jax.Array
    seed: int

    @property
    def platform(self) -> str:
        return jax.default_backend()

    @property
    def softmax_scale(self) -> float:
        return self.workload.head_dim**-0.5

    @property
    def group_size(self) -> int:
        return self.workload.num_heads // self.workload.num_kv_heads

    def query_heads(self, kv_head: int) -> slice:
        return slice(kv_head * self.group_size, (kv_head + 1) * self.group_size)

    @functools.cached_property
    def dout(self) -> jax.Array:
        w = self.workload
        return _normal(jax.random.key(self.seed + 1), (w.total, w.num_heads, w.head_dim_v), self.dtype)


def make(workload: Workload, dtype: str, seed: int = 0) -> Inputs:
    w = workload
    shapes = [(w.total, heads, w.head_dim) for heads in (w.num_heads, w.num_kv_heads, w.num_kv_heads)]
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (_normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    return Inputs(w, dtype, q, k, v, jnp.asarray(w.cu_seqlens), seed)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


def num_threads() -> int:
    """Threads of every contender on CPU: XLA takes one for each core that the process may use."""
    return len(os.sched_getaffinity(0))
