import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_bwd
import pytest
from cases import CASES, Case, cotangents, padded
from conftest import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fwd import LENGTHS_AROUND_TILES, random_cases

from jax_varlen import reference, varlen_attention

STATIC = ("causal", "window_size", "softcap", "deterministic")


@functools.partial(jax.jit, static_argnames=STATIC)
def _gradients(arrays, others, dout, dlse, **static):
    def attend(arrays):
        return varlen_attention(**arrays, **others, **static, return_lse=True)

    return jax.vjp(attend, arrays)[1]((dout, dlse))[0]


def gradients(args, options, dout, dlse):
    """The gradients of q, k, v and sinks by name, as NumPy arrays."""
    q, k, v, *offsets = args
    arrays = {"q": q, "k": k, "v": v}
    if "sinks" in options:
        arrays["sinks"] = options["sinks"]
    others = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=False))
    others |= {name: x for name, x in options.items() if name not in (*STATIC, "sinks")}
    if "softmax_scale" in others:
        others["softmax_scale"] = np.float32(others["softmax_scale"])
    static = {name: options[name] for name in STATIC if name in options}
    return {name: np.asarray(x) for name, x in _gradients(arrays, others, dout, dlse, **static).items()}


def check(args, options):
    dout, dlse = cotangents(args, options)
    actual = gradients(args, options, dout, dlse)
    options = {name: x for name, x in options.items() if name != "deterministic"}
    oracle_bwd.check(actual, *args, dout=dout, dlse=dlse, **options)
    return actual


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, dtype):
    args, options = case.inputs(dtype)
    small = max(len(args[0]), len(args[1])) <= 512 and len(args[3]) <= 10
    if dtype != DTYPES[0] and small:  # in buffers of one size, so that cases share compiled code
        args, options = padded(args, options)
    check(args, options)


@pytest.mark.parametrize(
    "heads", [(1, 1), (2, 1), (6, 2), (5, 1), (12, 2), (7, 1), (12, 1), (16, 1), (64, 2), (64, 1), (128, 1)], ids=str
)
def test_gqa_ratios(heads, any_dtype):
    check(*Case("", "", (70, 3, 1), (90, 1, 64), *heads, 32, options={"causal": True}).inputs(any_dtype))


@pytest.mark.parametrize("head_dim", [1, 3, 8, 15, 16, 17, 24, 33, 40, 63, 72, 80, 96, 97, 111, 127, 128])
def test_head_dims(head_dim, any_dtype):
    check(*Case("", "", (70, 3), (90, 1), head_dim=head_dim, options={"causal": True}).inputs(any_dtype))


@pytest.mark.parametrize("head_dim", [129, 144, 161, 192, 200, 224, 255, 256, 257, 320])
def test_large_head_dims(head_dim, any_dtype):
    options = {"window_size": (40, 3), "softcap": 8.0}
    case = Case("", "", (70, 3), (90, 1), head_dim=head_dim, sinks="random", alibi="heads", options=options)
    check(*case.inputs(any_dtype))


@pytest.mark.parametrize("dims", [(1, 64), (64, 1), (40, 72), (192, 128), (128, 256), (256, 16), (300, 64)], ids=str)
def test_head_dim_v(dims, any_dtype):
    check(*Case("", "", (70, 3), (90, 1), 4, 2, *dims, options={"causal": True}).inputs(any_dtype))


@pytest.mark.parametrize("lens_k", [None, LENGTHS_AROUND_TILES[::-1]], ids=["equal", "unequal"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (64, 16)}], ids=str)
def test_lengths_around_tiles(lens_k, options, any_dtype):
    check(*Case("", "", LENGTHS_AROUND_TILES, lens_k, 2, 1, 64, options=options).inputs(any_dtype))


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (4, 1)},
    "scale": {"softmax_scale": 0.9},
    "seqused": {"seqused_q": (3, 2, 5), "seqused_k": (4, 2, 7)},
    "softcap": {"softcap": 0.7},
    "together": {"causal": True, "window_size": (5, None), "softcap": 0.9, "softmax_scale": -0.4, "seqused_k": (5, 3, 2)},
}


def _small(options):
    return Case("", "", (4, 2, 6), (5, 3, 9), 4, 2, 8, 6, gap=1, tail=2, alibi="batch", sinks="random", options=options)


@functools.partial(jax.jit, static_argnames="softcap")
def _gradients_of_reference(arrays, others, dout, dlse, left, right, softcap):
    """Options are values here, so that all calls share compiled code."""

    def attend(arrays):
        names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table", "softmax_scale", "alibi_slopes"
        positional = (others.get(name) for name in names)
        q, k, v, sinks = (arrays[name] for name in oracle_bwd.NAMES)
        return reference._attention(q, k, v, *positional, sinks, left, right, softcap)

    return jax.vjp(attend, arrays)[1]((dout, dlse))[0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_against_autodiff_of_the_reference(options, any_dtype):
    """The oracle's gradients are those of the reference to float64, and the kernel's are the oracle's."""
    args, options = _small(options).inputs(any_dtype)
    dout, dlse = cotangents(args, options)
    check(args, options)
    expected = oracle_bwd.gradients(*args, dout=dout, dlse=dlse, **options)
    lens_q, lens_k = np.diff(args[3]), np.diff(args[4])
    everything = {"causal": False, "window_size": (None, None), "softcap": None, "softmax_scale": 8**-0.5}
    everything |= {"seqused_q": lens_q, "seqused_k": lens_k} | options
    left, right = reference._window(everything.pop("window_size"), everything.pop("causal"))
    softcap = everything.pop("softcap")
    with jax.enable_x64(True):
        arrays = {"q": args[0], "k": args[1], "v": args[2], "sinks": everything.pop("sinks")}
        arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
        others = everything | {"cu_seqlens_q": args[3], "cu_seqlens_k": args[4]}
        dout, dlse = dout.astype(np.float64), dlse.astype(np.float64)
        actual = _gradients_of_reference(arrays, others, dout, dlse, np.int32(left), np.int32(right), softcap)
        for name, x in expected.values.items():
            np.testing.assert_allclose(actual[name], x, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_against_finite_differences(options, any_dtype):
    """Along a random direction, of a loss on out and lse that the oracle computes in float64."""
    (q, k, v, *offsets), options = _small(options).inputs(any_dtype)
    dout, dlse = (np.nan_to_num(x.astype(np.float64)) for x in cotangents((q, k, v, *offsets), options))
    arrays = {"q": q, "k": k, "v": v, "sinks": options.pop("sinks")}
    actual = gradients((q, k, v, *offsets), options | {"sinks": arrays["sinks"]}, dout.astype(q.dtype), dlse.astype(np.float32))
    rng = np.random.default_rng(3)
    for name, x in arrays.items():
        direction = rng.normal(size=x.shape)

        def loss(step, name=name, direction=direction):
            moved = arrays | {name: arrays[name].astype(np.float64) + step * direction}
            out, lse = oracle.attention(*(moved[n] for n in "qkv"), *offsets, **options, sinks=moved["sinks"])
            return (out * dout.astype(q.dtype).astype(np.float64)).sum() + (np.where(np.isinf(lse), 0, lse) * dlse).sum()

        expected = (loss(1e-5) - loss(-1e-5)) / 2e-5
        terms = actual[name].astype(np.float64) * direction
        assert abs(terms.sum() - expected) <= oracle.eps(any_dtype) * np.abs(terms).sum() + 1e-5, name


def test_keys_that_no_row_has_get_exactly_nothing(dtype):
    args, options = next(case for case in CASES if case.name == "no_row_for_keys").inputs(dtype)
    actual = check(args, options)
    assert not actual["k"][100:200].any() and not actual["v"][100:200].any()


def test_one_token_gives_its_cotangent_to_its_value(dtype):
    args, options = next(case for case in CASES if case.name == "one_token").inputs(dtype)
    dout, dlse = cotangents(args, options)
    actual = gradients(args, options, dout, np.zeros_like(dlse))
    for name in "qk":
        np.testing.assert_allclose(actual[name].astype(np.float32), 0, atol=1e-4)
    np.testing.assert_allclose(actual["v"].astype(np.float32), dout.astype(np.float32), rtol=2 * oracle.eps(dtype))


@pytest.mark.parametrize("huge", [1e4, np.inf, np.nan])
def test_keys_behind_the_last_reach_nothing(huge, dtype):
    """The tile of 5 rows and 70 keys is longer than both."""
    (q, k, v, cu_q, cu_k), options = Case("", "", (5,), (70,), tail=123).inputs(dtype)
    for x, n in ((q, 5), (k, 70), (v, 70)):
        x[n:] = huge
    check((q, k, v, cu_q, cu_k), options)


SEE_NOTHING = {
    "causal": Case("", "", (9, 130, 40), (4, 70, 41), options={"causal": True}),
    "window": Case("", "", (8, 200), (2, 40), 6, 2, options={"window_size": (None, 2)}),
    "window_both_sides": Case("", "", (70, 300), (9, 100), options={"window_size": (30, 5), "softcap": 3.0}),
    "no_keys": Case("", "", (3, 20, 64), (0, 4, 64), options={"seqused_k": (0, 4, 0)}, alibi="heads"),
}


@pytest.mark.parametrize("sinks", [None, "random"])
@pytest.mark.parametrize("case", SEE_NOTHING.values(), ids=SEE_NOTHING)
def test_rows_that_see_no_key_get_and_give_nothing(case, sinks, dtype):
    """Whatever their q and their cotangents are. With a sink their lse is the sink, whose gradient is dlse."""
    args, options = dataclasses.replace(case, sinks=sinks).inputs(dtype)
    q, _, _, cu_q, cu_k = args
    dout, dlse = cotangents(args, options)
    lens_k = options.get("seqused_k", np.diff(cu_k))
    masks = options.get("causal", False), options.get("window_size", (None, None))
    seen = [oracle.visible(n, m, *masks).any(1) for n, m in zip(np.diff(cu_q), lens_k, strict=True)]
    sees_nothing = ~np.concatenate(seen)
    q[sees_nothing], dout[sees_nothing] = np.nan, np.nan
    if sinks is None:
        dlse[:, sees_nothing] = np.nan
    actual = gradients(args, options, dout, dlse)
    oracle_bwd.check(actual, *args, dout=dout, dlse=dlse, **options)
    assert sees_nothing.any() and not actual["q"][sees_nothing].any()


MASKS = {"plain": {}, "causal": {"causal": True}, "window": {"window_size": (33, 5)}, "softcap": {"softcap": 3.0}}
RAGGED = {"lens_q": (65, 1, 70, 128), "lens_k": (100, 64, 3, 130)}


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_a_neighbour_reaches_nothing(poison, options, dtype):
    (q, k, v, cu_q, cu_k), options = Case("", "", **RAGGED, options=options | {"deterministic": True}).inputs(dtype)
    cotangent = cotangents((q, k, v, cu_q, cu_k), options)
    expected = gradients((q, k, v, cu_q, cu_k), options, *cotangent)
    for b in range(4):
        rows, keys = (slice(cu[b], cu[b + 1]) for cu in (cu_q, cu_k))
        poisoned = [x.copy() for x in (q, k, v, *cotangent)]
        for x, where in zip(poisoned, (rows, keys, keys, rows, np.s_[:, rows]), strict=True):
            x[where] = poison
        actual = gradients((*poisoned[:3], cu_q, cu_k), options, *poisoned[3:])
        for name, where in (("q", rows), ("k", keys), ("v", keys)):
            np.testing.assert_array_equal(*(np.delete(x[name], where, 0) for x in (actual, expected)), err_msg=name)


@pytest.mark.parametrize("case", ["tail", "gap_and_tail", "seqused", "keys_for_no_rows"])
def test_memory_left_by_others_reaches_nothing(case, dtype):
    """Results and workspace come from memory that held NaN a moment before; rows of nobody get exactly 0 there."""
    args, options = next(c for c in CASES if c.name == case).inputs(dtype)
    dout, dlse = cotangents(args, options)
    options["deterministic"] = True
    expected = gradients(args, options, dout, dlse)
    nobody = np.isnan(args[0].astype(np.float32)).any((1, 2)), np.isnan(args[1].astype(np.float32)).any((1, 2))
    for _ in range(20):
        shapes = [x.shape for x in args[:3]] * 2 + [(x.size,) for x in args[:3]] * 2
        garbage = [jax.block_until_ready(jnp.full(shape, jnp.nan, dtype)) for shape in shapes]
        del garbage
        actual = gradients(args, options, dout, dlse)
        for name, rows in (("q", nobody[0]), ("k", nobody[1]), ("v", nobody[1])):
            np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
            assert not actual[name][rows].any(), name


def test_a_product_with_the_gradient_of_a_buffer_stays_finite(any_dtype):
    """A projection's gradient is x.T @ dk over the whole buffer, rows of nobody included."""
    args, options = next(case for case in CASES if case.name == "mostly_tail").inputs(any_dtype)
    actual = gradients(args, options, *cotangents(args, options))
    for name in "qkv":
        dx = jnp.asarray(actual[name]).reshape(len(actual[name]), -1)
        assert jnp.isfinite(dx.T @ jnp.full_like(dx, 1e3)).all(), name


MANY = {
    "70000_of_1_or_2": (
        np.random.default_rng(0).integers(1, 3, 70_000),
        np.random.default_rng(1).integers(1, 3, 70_000),
        2,
        1,
        16,
    ),
    "12288_of_8_with_16_heads": (np.full(12_288, 8), np.full(12_288, 8), 16, 16, 16),
}


@pytest.mark.parametrize("lens_q, lens_k, num_heads, num_kv_heads, head_dim", MANY.values(), ids=MANY)
def test_many_sequences(lens_q, lens_k, num_heads, num_kv_heads, head_dim, any_dtype):
    case = Case("", "", tuple(lens_q.tolist()), tuple(lens_k.tolist()), num_heads, num_kv_heads, head_dim)
    (q, k, v, cu_q, cu_k), _ = case.inputs(any_dtype)
    dout, dlse = cotangents((q, k, v, cu_q, cu_k), {})
    actual = gradients((q, k, v, cu_q, cu_k), {"causal": True}, dout, dlse)
    for first in (0, len(lens_q) // 2, len(lens_q) - 200):  # the oracle is a loop: three stretches of 200 sequences
        batch = slice(first, first + 201)
        rows, keys = (slice(cu[batch][0], cu[batch][-1]) for cu in (cu_q, cu_k))
        offsets = (cu[batch] - cu[first] for cu in (cu_q, cu_k))
        part = {"q": actual["q"][rows], "k": actual["k"][keys], "v": actual["v"][keys]}
        options = {"dout": dout[rows], "dlse": dlse[:, rows], "causal": True}
        oracle_bwd.check(part, q[rows], k[keys], v[keys], *offsets, **options)


DETERMINISTIC = {
    "gqa": Case("", "", (300, 7, 0, 129, 64), (200, 333, 5, 129, 1), 8, 2, 64, sinks="random", options={"causal": True}),
    "mqa_window": Case("", "", (512, 40, 1), None, 16, 1, 128, options={"window_size": (100, 0), "softcap": 9.0}),
    "long": Case("", "", (2000,), None, 2, 2, 64),
}


@pytest.mark.parametrize("case", DETERMINISTIC.values(), ids=DETERMINISTIC)
def test_deterministic_gradients_have_the_same_bits(case, dtype):
    args, options = case.inputs(dtype)
    cotangent = cotangents(args, options)
    options["deterministic"] = True
    expected = check(args, options)
    for _ in range(20):
        actual = gradients(args, options, *cotangent)
        for name, x in expected.items():
            np.testing.assert_array_equal(actual[name], x, err_msg=name)


def test_a_change_in_one_sequence_changes_no_bit_of_another(dtype):
    (q, k, v, cu_q, cu_k), options = Case("", "", **RAGGED, options={"causal": True, "deterministic": True}).inputs(dtype)
    cotangent = cotangents((q, k, v, cu_q, cu_k), options)
    expected = gradients((q, k, v, cu_q, cu_k), options, *cotangent)
    q, k, v = (x.copy() for x in (q, k, v))
    q[cu_q[1] : cu_q[3]] *= 3
    k[cu_k[1] : cu_k[3]] *= -2
    actual = gradients((q, k, v, cu_q, cu_k), options, *cotangent)
    for name, cu in (("q", cu_q), ("k", cu_k), ("v", cu_k)):
        rows = np.r_[: cu[1], cu[3] : cu[4]]
        np.testing.assert_array_equal(actual[name][rows], expected[name][rows], err_msg=name)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(random_cases(), st.integers(0, 2), st.booleans())
def test_random_cases(case, dtype, deterministic):
    args, options = case.inputs(jnp.dtype(DTYPES[dtype % len(DTYPES)]))
    check(args, options | {"deterministic": deterministic})
