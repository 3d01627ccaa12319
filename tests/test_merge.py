"""`merge_attention`: two sets of keys give what one call over both gives, and a state that has seen nothing changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from conftest import DTYPES

import jax_varlen as jv
from jax_varlen import merge_attention, reference, varlen_attention

merge = jax.jit(merge_attention)
TOTAL, HEADS, WIDTH = 12, 3, 8


def state(seed, dtype="float32", empty=()):
    """(out, lse) as a call gives them; the rows `empty` have seen no key."""
    rng = np.random.default_rng(seed)
    out = rng.normal(size=(TOTAL, HEADS, WIDTH)).astype(jnp.dtype(dtype))
    lse = rng.normal(scale=3, size=(HEADS, TOTAL)).astype(np.float32)
    out[list(empty)], lse[:, list(empty)] = 0, -np.inf
    return out, lse


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def bits_equal(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(bits(x), bits(y))


def softmax_of_two(out_a, lse_a, out_b, lse_b):
    """(out, lse) in float64, for states that have seen a key."""
    lse = np.logaddexp(lse_a.astype(np.float64), lse_b)
    a, b = (np.exp(x - lse).T[..., None] for x in (lse_a, lse_b))
    return a * out_a.astype(np.float64) + b * out_b.astype(np.float64), lse


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_equals_the_definition(dtype):
    a, b = state(0, dtype), state(1, dtype)
    out, lse = merge(*a, *b)
    expected = softmax_of_two(*a, *b)
    assert out.dtype == a[0].dtype and lse.dtype == np.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), expected[0], rtol=0, atol=oracle.eps(a[0].dtype) * 4)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6)


def test_out_has_the_dtype_of_the_first():
    a, b = state(0, "bfloat16"), state(1, "float32")
    assert merge(*a, *b)[0].dtype == jnp.bfloat16
    assert merge(*b, *a)[0].dtype == np.float32


@pytest.mark.parametrize("apart", [1e4, -1e4, 3e38], ids=str)
def test_logits_far_apart(apart):
    (out_a, lse_a), (out_b, lse_b) = state(0), state(1)
    out, lse = merge(out_a, lse_a + np.float32(apart), out_b, lse_b)
    wins = (out_a, lse_a + np.float32(apart)) if apart > 0 else (out_b, lse_b)
    bits_equal((lse,), (wins[1],))
    np.testing.assert_allclose(out, wins[0], rtol=1e-6)


@pytest.mark.parametrize("garbage", [0, np.nan, np.inf], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_empty_state_changes_no_bit(dtype, garbage):
    out, lse = state(0, dtype, empty=(2, 3))
    out[0], lse[:, 0] = -0.0, -0.0
    nothing = np.full_like(out, garbage), np.full_like(lse, -np.inf)
    bits_equal(merge(out, lse, *nothing), (out, lse))
    bits_equal(merge(*nothing, out, lse), (out, lse))
    bits_equal(merge(*nothing, *nothing), (np.zeros_like(out), nothing[1]))


def test_rows_are_empty_one_by_one():
    a, b = state(0, empty=(0, 1, 2)), state(1, empty=(2, 3))
    out, lse = (np.asarray(x) for x in merge(*a, *b))
    bits_equal((out[:2], lse[:, :2]), (b[0][:2], b[1][:, :2]))
    bits_equal((out[3], lse[:, 3]), (a[0][3], a[1][:, 3]))
    assert not out[2].any() and np.isneginf(lse[:, 2]).all()
    expected = softmax_of_two(*(x for s in (a, b) for x in (s[0][4:], s[1][:, 4:])))
    np.testing.assert_allclose(out[4:], expected[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse[:, 4:], expected[1], rtol=1e-6)


OPTIONS = {"plain": {}, "softcap": {"softcap": 2.0}, "scale": {"softmax_scale": 0.4}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_halves_of_the_keys_merge_into_the_whole(options, dtype):
    (q, k, v, cu_q, cu_k), _ = Case("", "", (3, 0, 40, 7), (130, 5, 65, 1)).inputs(dtype)
    half = np.diff(cu_k) // 2
    attend = lambda k, v, lens: varlen_attention(q, k, v, cu_q, jv.cu_seqlens_from_lengths(lens), return_lse=True, **options)
    first = (np.arange(len(k)) - np.repeat(cu_k[:-1], np.diff(cu_k))) < np.repeat(half, np.diff(cu_k))
    out, lse = merge(*attend(k[first], v[first], half), *attend(k[~first], v[~first], np.diff(cu_k) - half))
    whole = varlen_attention(q, k, v, cu_q, cu_k, return_lse=True, **options)
    tolerance = 1e-3 if dtype == np.float32 else 2 * oracle.eps(dtype) * np.abs(v.astype(np.float32)).max()
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(whole[0], np.float32), rtol=0, atol=tolerance)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-3, atol=1e-3)


def test_a_shared_prefix_and_causal_keys_merge_into_causal_attention(dtype):
    """The prefix is one sequence that all queries see whole; behind it come the own keys of each request."""
    (q, k, v, cu), _ = Case("", "", (4, 1, 9)).inputs(dtype)
    prefix = np.random.default_rng(1).normal(size=(2, 20, 2, 64)).astype(dtype)
    own = varlen_attention(q, k, v, cu, causal=True, return_lse=True)
    out, lse = merge(*varlen_attention(q, *prefix, [0, len(q)], [0, 20], return_lse=True), *own)
    pieces = [[x for b in range(3) for x in (p, y[cu[b] : cu[b + 1]])] for p, y in zip(prefix, (k, v), strict=True)]
    k, v = (np.concatenate(x) for x in pieces)
    expected = oracle.attention(q, k, v, cu, cu + 20 * np.arange(4), causal=True)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected[0], rtol=0, atol=6 * oracle.eps(dtype) + 1e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-3, atol=1e-3)


def test_a_sink_counts_once(dtype):
    (q, k, v, cu_q, cu_k), options = Case("", "", (5, 3), (40, 21), sinks="random").inputs(dtype)
    sinks = options["sinks"] + 3
    parts = [np.r_[:30, 40:51], np.r_[30:40, 51:61]]
    with_sink = varlen_attention(q, k[parts[0]], v[parts[0]], cu_q, [0, 30, 41], sinks=sinks, return_lse=True)
    without = varlen_attention(q, k[parts[1]], v[parts[1]], cu_q, [0, 10, 20], return_lse=True)
    whole = varlen_attention(q, k, v, cu_q, cu_k, sinks=sinks, return_lse=True)
    for out, lse in (merge(*with_sink, *without), merge(*without, *with_sink)):
        np.testing.assert_allclose(lse, whole[1], rtol=1e-3, atol=1e-3)
        tolerance = 4 * oracle.eps(dtype) + 1e-5
        np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(whole[0], np.float32), rtol=0, atol=tolerance)


def loss(out, lse):
    """Of both results. Rows that have seen nothing have no lse to speak of."""
    weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return (out.astype(jnp.float32) * weights).sum() + jnp.sin(jnp.where(lse == -jnp.inf, 0, lse)).sum()


def test_gradients_are_those_of_one_call():
    """Through two calls and the merge, in q, k, v, against autodiff of the reference over all keys."""
    dtype = jnp.dtype(DTYPES[0])
    (q, k, v, cu_q, cu_k), _ = Case("", "", (6, 9, 2), (20, 0, 7), head_dim=32).inputs(dtype)
    odd = np.arange(len(k)) % 2 == 1
    cu_odd, cu_even = (np.append(0, np.cumsum(part))[cu_k] for part in (odd, ~odd))

    def parts(q, k, v):
        a = varlen_attention(q, k[odd], v[odd], cu_q, cu_odd, return_lse=True)
        b = varlen_attention(q, k[~odd], v[~odd], cu_q, cu_even, return_lse=True)
        return loss(*merge_attention(*a, *b))

    whole = lambda q, k, v: loss(*reference.varlen_attention(q, k, v, cu_q, cu_k, return_lse=True))
    actual = jax.jit(jax.grad(parts, (0, 1, 2)))(q, k, v)
    expected = jax.jit(jax.grad(whole, (0, 1, 2)))(*(x.astype(np.float32) for x in (q, k, v)))
    for x, y in zip(actual, expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=(8 * oracle.eps(dtype) + 1e-5) * np.abs(y).max())


def test_gradients_are_those_of_finite_differences():
    step = 1e-3
    arrays = [np.asarray(x, np.float64) for x in (*state(0), *state(1))]

    def value(*arrays):
        out, lse = softmax_of_two(*arrays)
        return (out * np.cos(np.arange(out.size)).reshape(out.shape)).sum() + np.sin(lse).sum()

    actual = jax.grad(lambda *args: loss(*merge_attention(*args)), (0, 1, 2, 3))(*(x.astype(np.float32) for x in arrays))
    for n, x in enumerate(arrays):
        for index in np.random.default_rng(n).choice(x.size, 6, replace=False):
            moved = [[y.copy() for y in arrays] for _ in range(2)]
            moved[0][n].flat[index] += step
            moved[1][n].flat[index] -= step
            slope = (value(*moved[0]) - value(*moved[1])) / (2 * step)
            np.testing.assert_allclose(np.asarray(actual[n]).flat[index], slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("garbage", [0, np.nan], ids=str)
@pytest.mark.parametrize("lse_counts", [False, True], ids=["out", "out_and_lse"])
def test_gradients_of_empty_states_are_finite(garbage, lse_counts):
    a, b = state(0, empty=(0, 1, 2)), state(1, empty=(2, 3))
    a[0][:3], b[0][2:4] = garbage, garbage

    def f(*states):
        out, lse = merge_attention(*states)
        return loss(out, lse) if lse_counts else out.sum()

    d_out_a, d_lse_a, d_out_b, d_lse_b = (np.asarray(x) for x in jax.jit(jax.grad(f, (0, 1, 2, 3)))(*a, *b))
    assert all(np.isfinite(x).all() for x in (d_out_a, d_lse_a, d_out_b, d_lse_b))
    assert not d_out_a[:3].any() and not d_out_b[2:4].any()  # what was not taken
    assert not d_lse_a[:, :3].any() and not d_lse_b[:, 2:4].any()
    one = jax.grad(lambda out, lse: loss(out, lse) if lse_counts else out.sum(), (0, 1))
    for x, y in zip((d_out_a[3], d_lse_a[:, 3]), (one(*a)[0][3], one(*a)[1][:, 3]), strict=True):
        np.testing.assert_array_equal(x, y)  # of a state beside an empty one: its own
    assert d_out_a[4:].all() and d_lse_a[:, 4:].all()


def test_many_states():
    states = [state(seed, empty=(seed,)) for seed in range(5)]
    out, lse = states[0]
    for other in states[1:]:
        out, lse = merge(out, lse, *other)
    outs, lses = (np.stack(x).astype(np.float64) for x in zip(*states, strict=True))
    expected = np.logaddexp.reduce(lses, 0)
    weights = np.exp(lses - expected).swapaxes(1, 2)[..., None]
    np.testing.assert_allclose(lse, expected, rtol=1e-5)
    np.testing.assert_allclose(out, (weights * outs).sum(0), rtol=0, atol=1e-6)


def test_no_rows():
    out, lse = merge(*[np.zeros((0, HEADS, WIDTH), np.float32), np.zeros((HEADS, 0), np.float32)] * 2)
    assert out.shape == (0, HEADS, WIDTH) and lse.shape == (HEADS, 0)


def changed(i, x):
    return [x if n == i else y for n, y in enumerate((*state(0), *state(1)))]


ERRORS = [
    (
        changed(0, np.zeros((TOTAL, HEADS), np.float32)),
        ValueError,
        r"out_a must have rank 3 \(total_q, num_heads, head",
    ),
    (
        changed(2, np.zeros((TOTAL, HEADS, 4), np.float32)),
        ValueError,
        r"one shape, .* got \(12, 3, 8\) and \(12, 3, 4\)",
    ),
    (
        changed(1, np.zeros((TOTAL, HEADS), np.float32)),
        ValueError,
        r"lse_a must have shape .* \(3, 12\) .* got \(12, 3\). It",
    ),
    (changed(3, np.zeros((HEADS, 9), np.float32)), ValueError, r"lse_b must have shape \(num_heads, total_q\) = \(3, 12\)"),
    (changed(3, np.zeros((HEADS, TOTAL), np.float16)), TypeError, "lse_b must be float32, got float16"),
    (changed(0, np.zeros((TOTAL, HEADS, WIDTH), np.int32)), TypeError, "out_a must be float32, bfloat16, float16, got int32"),
    (changed(1, 0.0), TypeError, "lse_a must be an array, got float"),
]


@pytest.mark.parametrize("args, error, text", ERRORS, ids=[text for *_, text in ERRORS])
def test_errors(args, error, text):
    with pytest.raises(error, match=text):
        merge_attention(*args)
