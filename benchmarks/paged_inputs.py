"""The arrays of a batch over a paged cache."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from .paged_workloads import PagedWorkload

Cache = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class PagedInputs:
    """Random normal q and pools, one pair of pools for each cache, and a block table in random order that fills them."""

    workload: PagedWorkload
    dtype: str
    q: jax.Array
    caches: tuple[Cache, ...]
    block_table: np.ndarray
    scales: tuple[jax.Array, jax.Array] | None = None
    """k_scale and v_scale (num_kv_heads,) of pools in float8_e4m3fn, the same for all caches."""

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


def make(workload: PagedWorkload, dtype: str, seed: int = 0) -> PagedInputs:
    w = workload
    count = w.caches(jnp.dtype(dtype).itemsize)
    key_q, *keys = jax.random.split(jax.random.key(seed), 1 + 2 * count)
    q = _normal(key_q, (w.total_q, w.num_heads, w.head_dim), dtype)
    pools = [_normal(key, (int(w.blocks.sum()), w.block_size, w.num_kv_heads, w.head_dim), dtype) for key in keys]
    return PagedInputs(w, dtype, q, tuple(zip(pools[::2], pools[1::2], strict=True)), _block_table(w.blocks, seed))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    """Made in float32: what JAX makes in bfloat16 has a mean of -0.007, which is more than the average of many keys."""
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def _block_table(blocks: np.ndarray, seed: int) -> np.ndarray:
    """(batch, max_blocks) that names every block of the pool once; entries that are not used are 0."""
    table = np.zeros((blocks.size, blocks.max()), np.int32)
    table[np.arange(blocks.max()) < blocks[:, None]] = np.random.default_rng(seed).permutation(blocks.sum())
    return table


def in_float8(inputs: PagedInputs) -> PagedInputs:
    """The same cache in float8_e4m3fn, with scales that bring the largest element of each kv head of the first one to 448."""
    k_scale, v_scale = (_scale(pool) for pool in inputs.caches[0])
    caches = tuple((_round(k, k_scale), _round(v, v_scale)) for k, v in inputs.caches)
    return dataclasses.replace(inputs, caches=caches, scales=(k_scale, v_scale))


@jax.jit
def _scale(pool):
    return jnp.abs(pool).max((0, 1, 3)).astype(jnp.float32) / 448


@jax.jit
def _round(pool, scale):
    return (pool.astype(jnp.float32) / scale[:, None]).clip(-448, 448).astype(jnp.float8_e4m3fn)


def packed_cache(inputs: PagedInputs, cache: Cache) -> Cache:
    """The keys and values of all sequences behind each other, with no block between them."""
    w = inputs.workload
    owner = np.repeat(np.arange(w.batch), w.lengths)
    position = np.arange(owner.size) - w.cu_seqlens_k[owner]
    block = inputs.block_table[owner, position // w.block_size]
    k, v = (_gather(pool, block, position % w.block_size) for pool in cache)
    return k, v


@jax.jit
def _gather(pool, block, row):
    return pool[block, row]
