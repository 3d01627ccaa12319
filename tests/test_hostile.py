"""Whatever a row does not see reaches nothing, and every run gives the same bits."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from test_fwd import attend

from jax_varlen import varlen_attention

OPTIONS = {"plain": {}, "causal": {"causal": True}, "window": {"window_size": (33, 5)}, "softcap": {"softcap": 3.0}}
RAGGED = {"lens_q": (65, 1, 70, 128), "lens_k": (100, 64, 3, 130)}


def same(actual, expected, rows):
    np.testing.assert_array_equal(actual[0][rows], expected[0][rows])
    np.testing.assert_array_equal(actual[1][:, rows], expected[1][:, rows])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("head_dim", [64, 128, 40])
def test_a_neighbour_reaches_nothing(poison, options, head_dim, dtype):
    (q, k, v, cu_q, cu_k), options = Case("", "", **RAGGED, head_dim=head_dim, options=options).inputs(dtype)
    expected = attend((q, k, v, cu_q, cu_k), options)
    for b in range(4):
        poisoned = [x.copy() for x in (q, k, v)]
        for x, cu in zip(poisoned, (cu_q, cu_k, cu_k), strict=True):
            x[cu[b] : cu[b + 1]] = poison
        others = np.r_[: cu_q[b], cu_q[b + 1] : cu_q[-1]]
        same(attend((*poisoned, cu_q, cu_k), options), expected, others)


def test_a_change_in_one_sequence_changes_no_bit_of_another(dtype):
    (q, k, v, cu_q, cu_k), options = Case("", "", **RAGGED, options={"causal": True}).inputs(dtype)
    expected = attend((q, k, v, cu_q, cu_k), options)
    q, k, v = (x.copy() for x in (q, k, v))
    q[cu_q[1] : cu_q[3]] *= 3
    k[cu_k[1] : cu_k[3]] *= -2
    v[cu_k[1] : cu_k[3]] += 1
    actual = attend((q, k, v, cu_q, cu_k), options)
    rows = np.r_[: cu_q[1], cu_q[3] : cu_q[4]]
    same(actual, expected, rows)
    assert (actual[0][cu_q[1] : cu_q[3]] != expected[0][cu_q[1] : cu_q[3]]).any()


def test_a_sequence_gives_the_same_bits_with_padding_around_it(dtype):
    (q, k, v, cu), options = Case("", "", (65, 3, 130), options={"causal": True}).inputs(dtype)
    expected = attend((q, k, v, cu), options)
    nan = lambda n, x: np.full((n, *x.shape[1:]), np.nan, x.dtype)
    q, k, v = (np.concatenate([nan(7, x), x, nan(1000, x)]) for x in (q, k, v))
    out, lse = attend((q, k, v, cu + 7), options)
    same((out[7:-1000], lse[:, 7:-1000]), expected, slice(None))
    assert not out[:7].any() and not out[-1000:].any()
    assert np.isneginf(lse[:, :7]).all() and np.isneginf(lse[:, -1000:]).all()


def test_keys_left_of_the_window_reach_nothing(dtype):
    """Row 0 of 20 sees key 556 and later: whole tiles in front of it may be gone."""
    (q, k, v, cu_q, cu_k), options = Case("", "", (20,), (640,), options={"window_size": (64, None)}).inputs(dtype)
    expected = attend((q, k, v, cu_q, cu_k), options)
    k, v = k.copy(), v.copy()
    k[:256], v[:256] = np.nan, np.nan
    same(attend((q, k, v, cu_q, cu_k), options), expected, slice(None))


@pytest.mark.parametrize(
    "case", [Case("", "", (65, 1)), Case("", "", (128, 128)), Case("", "", (3, 4), tail=9)], ids=lambda c: str(c.lens_q)
)
def test_memory_left_by_others_reaches_nothing(case, dtype):
    """Outputs and workspace come from memory that held NaN a moment before."""
    (q, k, v, cu), _ = case.inputs(dtype)
    q, k, v, cu = (jnp.asarray(x) for x in (q, k, v, cu))
    expected = varlen_attention(q, k, v, cu, causal=True, return_lse=True)
    expected = [np.asarray(x) for x in expected]
    for _ in range(10):
        garbage = [jax.block_until_ready(jnp.full(shape, jnp.nan, q.dtype)) for shape in [q.shape] * 4 + [(q.size,)] * 4]
        del garbage
        gc.collect()
        actual = varlen_attention(q, k, v, cu, causal=True, return_lse=True)
        same([np.asarray(x) for x in actual], expected, slice(None))


def test_the_same_call_gives_the_same_bits(dtype):
    case = Case(
        "", "", (300, 7, 0, 129, 64), (200, 333, 5, 129, 1), 8, 2, 64, sinks="random", alibi="batch", options={"softcap": 9.0}
    )
    args, options = case.inputs(dtype)
    expected = attend(args, options)
    for _ in range(20):
        same(attend(args, options), expected, slice(None))


def test_equal_masks_agree(any_dtype):
    (q, k, v, cu), _ = Case("", "", (257, 3, 64)).inputs(any_dtype)
    expected = attend((q, k, v, cu), {"causal": True})
    for window_size in ((257, 0), (None, 0), (256, 0), (2**31 - 1, 0), (-1, 0)):
        actual = attend((q, k, v, cu), {"window_size": window_size})
        np.testing.assert_allclose(actual[0].astype(np.float32), expected[0].astype(np.float32), rtol=2e-2, atol=1e-6)
        np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5)
