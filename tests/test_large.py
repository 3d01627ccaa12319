"""Tensors of more than 2^31 elements: an address that is computed in 32 bits leads elsewhere. Some 50 GB of a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import PLATFORM

from jax_varlen import varlen_attention

NUM_HEADS, HEAD_DIM = 16, 128
LENGTHS = (2048,) * 514 + (3000, 1096)  # the last two begin behind element 2^31
LAST = 4096


def fill(seed, first, rows):
    """Rows of an array, from row `first` on: numbers in [-1, 1) that depend on nothing but the seed and their place."""
    columns = NUM_HEADS * HEAD_DIM
    row, column = first + jnp.arange(rows, dtype=jnp.uint32), jnp.arange(columns, dtype=jnp.uint32)
    x = row[:, None] * np.uint32(columns) + column[None, :]
    for factor in np.uint32([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D]) ^ np.uint32(seed << 8):
        x = (x ^ (x >> 15)) * factor
    x = (x >> 8).astype(jnp.float32) * 2**-23 - 1
    return x.astype(jnp.bfloat16).reshape(rows, NUM_HEADS, HEAD_DIM)


@functools.partial(jax.jit, static_argnames=("rows", "deterministic"))
def last_rows(first, cu_seqlens, *, rows, deterministic):
    """Of out, lse, dq, dk and dv of `rows` rows that begin with row `first` of the arrays that `fill` gives."""
    q, k, v, dout = (fill(seed, first, rows) for seed in range(4))

    def attend(q, k, v):
        return varlen_attention(q, k, v, cu_seqlens, causal=True, deterministic=deterministic, return_lse=True)

    (out, lse), backward = jax.vjp(attend, q, k, v)
    return out[-LAST:], lse[:, -LAST:], *(x[-LAST:] for x in backward((dout, jnp.ones_like(lse))))


@pytest.mark.skipif(PLATFORM != "gpu", reason="needs a GPU with 60 GB of free memory")
@pytest.mark.parametrize("deterministic", [False, True])
def test_more_than_2_31_elements(deterministic):
    """The last rows are those of a small call with the last two sequences alone."""
    cu_seqlens, total = np.cumsum([0, *LENGTHS], dtype=np.int32), sum(LENGTHS)
    assert (total - LAST) * NUM_HEADS * HEAD_DIM >= 2**31
    large = last_rows.lower(np.uint32(0), cu_seqlens, rows=total, deterministic=deterministic).compile()
    assert large.memory_analysis().temp_size_in_bytes < 60e9
    actual = [np.asarray(x) for x in large(np.uint32(0), cu_seqlens)]
    small = last_rows(np.uint32(total - LAST), cu_seqlens[-3:] - cu_seqlens[-3], rows=LAST, deterministic=deterministic)
    expected = [np.asarray(x) for x in small]
    for name, x, y in zip(("out", "lse"), actual[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)
    for name, x, y in zip("qkv", actual[2:], expected[2:], strict=True):  # XLA sums delta, in an order that sizes may change
        x, y = x.astype(np.float32), y.astype(np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=oracle.eps("bfloat16") * np.abs(y).max(), err_msg=f"d{name}")
        assert y.any()
