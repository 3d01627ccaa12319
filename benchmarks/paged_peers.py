"""Ours over a paged cache and its peers: each takes the inputs of a workload and gives a call that is ready to be timed.

What is timed are calls behind each other in one program, as those of the layers of a decode step are: the q of each is the out
of the one before it, so that none can be left out, and its cache is the next one in turn. The same call alone stands beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_varlen

from . import paged_inputs, truth
from .paged_inputs import PagedInputs
from .peers import need, ready
from .ready import CannotRun, Ready


def ours(inputs: PagedInputs, **about) -> Ready:
    """jax_varlen.varlen_attention with a block table."""
    names = ("seqused_k", "block_table", "k_scale", "v_scale")

    def attention(q, k, v, cu_seqlens_q, *others):
        return jax_varlen.varlen_attention(q, k, v, cu_seqlens_q, causal=True, **dict(zip(names, others, strict=False)))

    w = inputs.workload
    others = (w.cu_seqlens_q, jnp.asarray(w.lengths, jnp.int32), inputs.block_table, *(inputs.scales or ()))
    return _ready(inputs, attention, inputs.q, inputs.caches, others, **about)


def float8(inputs: PagedInputs) -> Ready:
    """Ours with pools in float8_e4m3fn. What is right is the attention over the elements that they hold."""
    rounded = paged_inputs.in_float8(inputs)
    w = inputs.workload
    return ours(rounded, truth=truth.PagedOutputs(rounded), bytes=w.bytes(jnp.dtype(inputs.dtype).itemsize, 1))


def packed(inputs: PagedInputs) -> Ready:
    """Ours on the same keys and values in packed arrays: what the block table costs."""

    def attention(q, k, v, cu_seqlens_q, cu_seqlens_k):
        return jax_varlen.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True)

    w = inputs.workload
    caches = tuple(paged_inputs.packed_cache(inputs, cache) for cache in inputs.caches)
    return _ready(inputs, attention, inputs.q, caches, (w.cu_seqlens_q, w.cu_seqlens_k))


def cudnn(inputs: PagedInputs) -> Ready:
    """cuDNN's paged attention; JAX's public functions do not offer it."""
    w = inputs.workload
    need(inputs, "gpu", ("bfloat16", "float16"))
    if not w.is_decode:
        raise CannotRun("takes one query of each sequence")
    if inputs.block_table.size != w.blocks.sum():
        raise CannotRun("takes a pool of batch x max_blocks blocks")
    from jax._src.cudnn import fused_attention_stablehlo as lib

    def attention(q, k, v, queries, lengths, table):
        return lib.paged_attention(q, k, v, queries, lengths, table, table, scale=scale, mask_type=lib.MaskType.PADDING)

    scale = inputs.softmax_scale
    table = inputs.block_table[:, None, :, None]
    others = (jnp.ones(w.batch, jnp.int32), jnp.asarray(w.lengths, jnp.int32), table)
    return _ready(inputs, attention, inputs.q[:, None], inputs.caches, others, packed=lambda out: out[:, 0])


def _ready(
    inputs: PagedInputs,
    attention: Callable,
    q: jax.Array,
    caches: Sequence[paged_inputs.Cache],
    others: tuple,
    packed: Callable = lambda out: out,
    **about: Any,
) -> Ready:
    """`attention(q, k, v, *others)` gives out in the layout of q. The first call that is made alone takes the first cache."""
    calls = inputs.workload.calls
    others = jax.device_put(others)

    def one_behind_the_other(q, caches, others):
        for cache in itertools.islice(itertools.cycle(caches), calls):
            q = attention(q, *cache, *others)
        return q

    chain, one, turn = jax.jit(one_behind_the_other), jax.jit(attention), itertools.cycle(caches)
    single = ready(inputs, lambda: one(q, *next(turn), *others), packed)
    return dataclasses.replace(ready(inputs, lambda: chain(q, caches, others), packed), count=calls, single=single, **about)
