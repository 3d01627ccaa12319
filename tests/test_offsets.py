"""Wrong values in offsets that are arrays on a device: an error on CPU, and nothing outside the arrays on a GPU.

There a value outside an array is clamped, and where offsets fall every row is nobody's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_varlen import varlen_attention

ON_CPU = jax.default_backend() == "cpu"
TOTAL = 300

# name: offsets of q and k, seqused_q, and what the CPU says
WRONG = {
    "falls": ([0, 9, 7, 300], None, r"cu_seqlens_q must not decrease: cu_seqlens_q\[2\] is 7 after cu_seqlens_q\[1\] = 9"),
    "negative": ([-5, 2, 3, 7], None, r"cu_seqlens_q must not be negative: cu_seqlens_q\[0\] is -5"),
    "past_the_end": ([0, 2, 3, 301], None, r"must end within the 300 rows of q: cu_seqlens_q\[3\] is 301"),
    "huge": ([0, 2**31 - 1, 2**31 - 1, 2**31 - 1], None, r"must end within the 300 rows of q: cu_seqlens_q\[3\] is 2147483647"),
    "overlap": ([0, 250, 0, 250], None, r"cu_seqlens_q must not decrease: cu_seqlens_q\[2\] is 0"),
    "too_many_used": (
        [0, 2, 5, 300],
        [2, 4, 1],
        r"seqused_q must lie between 0 .*: seqused_q\[1\] is 4 for",
    ),
    "negative_used": ([0, 2, 5, 300], [2, -1, 1], r"seqused_q must lie between 0 .*: seqused_q\[1\] is -1"),
}


FALL = ("falls", "overlap")


@pytest.fixture
def qkv(any_dtype):
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, TOTAL, 2, 16)), any_dtype)


def attend(qkv, offsets, seqused, **options):
    seqused = None if seqused is None else jnp.asarray(seqused, jnp.int32)
    return varlen_attention(*qkv, jnp.asarray(offsets, jnp.int32), seqused_q=seqused, causal=True, **options)


@functools.partial(jax.jit, static_argnames="deterministic")
def gradient(qkv, offsets, seqused, deterministic):
    loss = lambda qkv: attend(qkv, offsets, seqused, deterministic=deterministic).astype(jnp.float32).sum()
    return jax.grad(loss)(qkv)


def check(call, name):
    if ON_CPU:
        with pytest.raises(jax.errors.JaxRuntimeError, match=WRONG[name][2]):
            call().block_until_ready()
    else:
        x = np.asarray(call(), np.float32)
        assert np.isfinite(x).all() and x.any() == (name not in FALL)


@pytest.mark.parametrize("name", WRONG)
def test_forward(qkv, name):
    check(lambda: attend(qkv, *WRONG[name][:2]), name)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_backward(qkv, name, deterministic):
    check(lambda: gradient(qkv, *WRONG[name][:2], deterministic), name)


@pytest.mark.skipif(ON_CPU, reason="needs a GPU: on a CPU these offsets are errors")
@pytest.mark.parametrize("offsets", [[0, 5000] * 40, [0, 5000, 100, 4000, 3000, 5000], [-9, 2000, 7000, 2**31 - 1]], ids=len)
def test_tiles_of_keys_wait_for_none_that_does_not_come(offsets, any_dtype):
    """The additions to dq of a sequence of many tiles take turns. Such offsets would have sequences share tiles of dq."""
    qkv = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5000, 2, 64)), any_dtype)
    dq, dk, dv = np.asarray(gradient(qkv, offsets, None, True), np.float32)
    for x in (dq, dk, dv):
        assert np.isfinite(x).all() and x.any() == (offsets == sorted(offsets))


@pytest.mark.parametrize("wide", [2**32 + 3, 2**31 + 3])
def test_wide_offsets_do_not_wrap_into_the_array(wide):
    with jax.enable_x64(True):
        qkv = jnp.zeros((3, 8, 2, 16), jnp.bfloat16)
        call = lambda: varlen_attention(*qkv, jnp.asarray([0, wide, 8], jnp.int64)).block_until_ready()
        if ON_CPU:
            with pytest.raises(jax.errors.JaxRuntimeError, match="cu_seqlens_q must not decrease"):
                call()
        else:
            call()
