"""Wrong values in offsets that are arrays on a device: an error on CPU, and nothing outside the arrays on a GPU."""

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


@pytest.fixture
def qkv(any_dtype):
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, TOTAL, 2, 16)), any_dtype)


def attend(qkv, offsets, seqused):
    seqused = None if seqused is None else jnp.asarray(seqused, jnp.int32)
    return varlen_attention(*qkv, jnp.asarray(offsets, jnp.int32), seqused_q=seqused, causal=True)


@pytest.mark.parametrize(("offsets", "seqused", "message"), WRONG.values(), ids=WRONG)
def test_forward(qkv, offsets, seqused, message):
    if ON_CPU:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            attend(qkv, offsets, seqused).block_until_ready()
    else:
        attend(qkv, offsets, seqused).block_until_ready()
        assert np.isfinite(np.asarray(attend(qkv, [0, TOTAL], None), np.float32)).all()


@pytest.mark.parametrize(("offsets", "seqused", "message"), WRONG.values(), ids=WRONG)
def test_backward(qkv, offsets, seqused, message):
    gradient = jax.jit(jax.grad(lambda qkv, offsets: attend(qkv, offsets, seqused).astype(jnp.float32).sum()))
    if ON_CPU:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            gradient(qkv, offsets).block_until_ready()
    else:
        gradient(qkv, offsets).block_until_ready()


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
