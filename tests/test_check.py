"""JAX_VARLEN_CHECK=1: on a GPU wrong values are the errors that they are on a CPU, which these tests take as well."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DTYPES
from test_offsets import WRONG, attend, gradient

from jax_varlen import append_kv, export_checks, varlen_attention

POOL = jnp.zeros((5, 8, 2, 16), jnp.bfloat16)
TABLE = jnp.array([[4, 1, 99], [0, 2, 3]], jnp.int32)


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    monkeypatch.setenv("JAX_VARLEN_CHECK", "1")
    jax.clear_caches()  # the variable is read when a call is lowered
    yield
    jax.clear_caches()


def decode(lengths, table=TABLE):
    q, cu_seqlens = jnp.ones((2, 4, 16), jnp.bfloat16), jnp.arange(3)
    return varlen_attention(q, POOL, POOL, cu_seqlens, seqused_k=lengths, block_table=table, causal=True)


def append(seqused_k, table=TABLE, pool=POOL):
    return append_kv(pool, pool, *jnp.ones((2, 3, 2, 16), jnp.bfloat16), jnp.array([0, 2, 3]), seqused_k, table)


CALLS = {
    "length": (
        lambda: decode(jnp.array([8, 25])),
        r"0 to max_blocks \* block_size = 24 keys: seqused_k\[1\] is 25",
    ),
    "negative_length": (lambda: decode(jnp.array([-1, 9])), r"seqused_k must not be negative: seqused_k\[0\] is -1"),
    "block": (lambda: decode(jnp.array([17, 9])), r"ids of the 5 blocks of k and v: block_table\[0, 2\] is 99"),
    "full": (lambda: append(jnp.array([0, 24])), r"whose 3 blocks of 8 hold 24 of a sequence: seqused_k\[1\] is 24"),
    "append_block": (lambda: append(jnp.array([15, 0])), r"blocks of the pool, which has 5: block_table\[0, 2\] is 99"),
}


@pytest.mark.parametrize("call, text", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_blocks_and_lengths(call, text, wrap):
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(wrap(call)())


@pytest.fixture
def qkv():
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, 300, 2, 16)), DTYPES[0])


@pytest.mark.parametrize("name", WRONG)
def test_offsets(qkv, name):
    offsets, seqused, text = WRONG[name]
    for call in (lambda: attend(qkv, offsets, seqused), lambda: gradient(qkv, offsets, seqused, False)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(call())


def test_right_values_pass(qkv, monkeypatch):
    right = [lambda: attend(qkv, [0, 2, 2, 300], [2, 0, 7]), lambda: gradient(qkv, [0, 2, 2, 300], None, True)]
    right += [lambda: decode(jnp.array([16, 24])), lambda: append(jnp.array([14, 23]))]
    checked = [jax.tree.map(np.asarray, call()) for call in right]
    monkeypatch.delenv("JAX_VARLEN_CHECK")
    jax.clear_caches()
    for call, expected in zip(right, checked, strict=True):
        jax.tree.map(np.testing.assert_array_equal, call(), expected)


LOWERED = {
    "forward": (lambda q, lengths: varlen_attention(q, q, q, lengths), "jax_varlen_check_v1", "jax_varlen_fwd_v1", 1),
    "gradient": (
        lambda q, lengths: jax.grad(lambda q: varlen_attention(q, q, q, lengths).astype(jnp.float32).sum())(q),
        "jax_varlen_check_v1",
        "jax_varlen_(?:fwd|bwd)_v1",
        2,
    ),
    "large_head_dim": (lambda q, lengths: varlen_attention(*[q.repeat(20, 2)] * 3, lengths), "jax_varlen_check_v1", None, 1),
    "paged": (
        lambda q, lengths: varlen_attention(q, POOL, POOL, lengths, seqused_k=lengths[1:], block_table=TABLE),
        "jax_varlen_check_v1",
        "jax_varlen_fwd_v1",
        1,
    ),
    "append": (lambda q, lengths: append(lengths[1:]), "jax_varlen_check_append_v1", "jax_varlen_append_v1", 1),
}


def lower(f):
    args = jnp.ones((8, 2, 16), jnp.bfloat16), jnp.array([0, 3, 8], jnp.int32)
    return jax.export.export(jax.jit(f), platforms=("cuda",), disabled_checks=export_checks())(*args).mlir_module()


@pytest.mark.parametrize("f, check, kernel, count", LOWERED.values(), ids=LOWERED)
def test_the_kernel_takes_the_offsets_from_the_check(f, check, kernel, count):
    module = lower(f)
    results = re.findall(rf"(%\d+) = stablehlo.custom_call @{check}\(", module)
    assert len(results) == count
    if kernel:
        operands = re.findall(rf"custom_call @{kernel}\((.*?)\)", module)
        assert len(operands) == count
        assert all(x in line.split(", ") for x, line in zip(results, operands, strict=True))


def test_no_check_unless_it_is_asked_for(monkeypatch):
    for value in ("0", None):
        monkeypatch.setenv("JAX_VARLEN_CHECK", value) if value else monkeypatch.delenv("JAX_VARLEN_CHECK")
        for f, *_ in LOWERED.values():
            assert "jax_varlen_check" not in lower(f)


def test_a_value_that_means_nothing_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_VARLEN_CHECK", "yes")
    with pytest.raises(ValueError, match="JAX_VARLEN_CHECK must be 0 or 1, got 'yes'"):
        lower(LOWERED["forward"][0])
