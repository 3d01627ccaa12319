"""Both passes in one compiled program, whose offsets change where they stand. Run by test_graph.py in a process of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_bwd

from jax_varlen import varlen_attention

TOTAL = 1024
LENGTHS = ([3, 0, 5, 1, 1], [300, 7, 0, 129, 64], [3, 0, 5, 1, 1], [1000, 3, 1, 0, 20], [200, 210, 190, 205, 219])


@functools.partial(jax.jit, static_argnames="deterministic")
def step(arrays, cu_seqlens, dout, dlse, *, deterministic):
    def attend(arrays):
        return varlen_attention(**arrays, cu_seqlens_q=cu_seqlens, causal=True, deterministic=deterministic, return_lse=True)

    results, backward = jax.vjp(attend, arrays)
    return results, backward((dout, dlse))[0]


@functools.partial(jax.jit, donate_argnums=0)
def replace(old, new):
    """`new` in the memory of `old`: what a graph has captured of its arguments are their addresses."""
    return old * 0 + new


def run(deterministic):
    rng = np.random.default_rng(0)
    bfloat16 = jnp.dtype("bfloat16")
    q, dout = (rng.normal(size=(TOTAL, 4, 64)).astype(bfloat16) for _ in range(2))
    k, v = (rng.normal(size=(TOTAL, 2, 64)).astype(bfloat16) for _ in range(2))
    sinks, dlse = rng.normal(size=4).astype(np.float32), rng.normal(size=(4, TOTAL)).astype(np.float32)
    arrays = {name: jnp.asarray(x) for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks))}
    others = {"dout": jnp.asarray(dout), "dlse": jnp.asarray(dlse)}
    cu_seqlens = jnp.zeros(len(LENGTHS[0]) + 1, jnp.int32)
    address = cu_seqlens.unsafe_buffer_pointer()
    compiled = step.lower(arrays, cu_seqlens, **others, deterministic=deterministic).compile()
    for lengths in LENGTHS:
        offsets = np.cumsum([0, *lengths], dtype=np.int32)
        cu_seqlens = replace(cu_seqlens, offsets)
        assert cu_seqlens.unsafe_buffer_pointer() == address
        for _ in range(3):
            (out, lse), gradients = jax.tree.map(np.asarray, compiled(arrays, cu_seqlens, **others))
            call = (q, k, v, offsets), {"causal": True, "sinks": sinks}
            oracle.check((out, lse), *call[0], **call[1])
            oracle_bwd.check(gradients, *call[0], **call[1], dout=dout, dlse=dlse)


if __name__ == "__main__":
    run(deterministic=False)
    run(deterministic=True)
