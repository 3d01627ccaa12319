import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_varlen import varlen_attention


def attend(args, options):
    """(out, lse), as NumPy arrays."""
    out, lse = varlen_attention(*(jnp.asarray(x) for x in args), **options, return_lse=True)
    return np.asarray(out), np.asarray(lse)


def check(case, dtype):
    args, options = case.inputs(dtype)
    oracle.check(attend(args, options), *args, **options, factor=3.0 if "softcap" in options else 2.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize(
    "heads", [(1, 1), (2, 1), (6, 2), (5, 1), (12, 2), (7, 1), (12, 1), (16, 1), (64, 2), (64, 1), (128, 1)], ids=str
)
def test_gqa_ratios(heads, any_dtype):
    check(Case("", "", (70, 3, 1), (90, 1, 64), *heads, 32, options={"causal": True}), any_dtype)


@pytest.mark.parametrize(
    "head_dim", [1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 65, 72, 80, 95, 96, 97, 111, 112, 127, 128]
)
def test_head_dims(head_dim, any_dtype):
    check(Case("", "", (70, 3), (90, 1), head_dim=head_dim, options={"causal": True}), any_dtype)


@pytest.mark.parametrize("head_dim", [129, 144, 160, 161, 176, 191, 192, 200, 224, 240, 255, 256, 257, 320, 511, 512])
def test_large_head_dims(head_dim, any_dtype):
    case = Case(
        "",
        "",
        (70, 3),
        (90, 1),
        head_dim=head_dim,
        sinks="random",
        alibi="heads",
        options={"window_size": (40, 3), "softcap": 8.0},
    )
    check(case, any_dtype)


@pytest.mark.parametrize(
    "dims", [(1, 64), (64, 1), (40, 72), (72, 40), (192, 128), (128, 256), (256, 16), (16, 512), (300, 64)], ids=str
)
def test_head_dim_v(dims, dtype):
    check(Case("", "", (70, 3), (90, 1), 4, 2, *dims, options={"causal": True}), dtype)


LENGTHS_AROUND_TILES = tuple(n + d for n in (64, 80, 96, 112, 128, 176, 192) for d in (-1, 0, 1))


@pytest.mark.parametrize("lens_k", [None, LENGTHS_AROUND_TILES[::-1]], ids=["equal", "unequal"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (64, 16)}], ids=str)
def test_lengths_around_tiles(lens_k, options, dtype):
    check(Case("", "", LENGTHS_AROUND_TILES, lens_k, 2, 1, 64, options=options), dtype)


@pytest.mark.parametrize("batch", [31, 32, 33, 992, 993])
def test_batches(batch, any_dtype):
    lens = tuple(np.random.default_rng(batch).integers(0, 40, batch).tolist())
    check(Case("", "", lens, lens[::-1], 2, 1, 16, options={"causal": True}), any_dtype)


def test_70000_sequences(any_dtype):
    lens_q, lens_k = (np.random.default_rng(seed).integers(1, 3, 70_000) for seed in (0, 1))
    (q, k, v, cu_q, cu_k), _ = Case("", "", tuple(lens_q.tolist()), tuple(lens_k.tolist()), 2, 1, 16).inputs(any_dtype)
    out, lse = attend((q, k, v, cu_q, cu_k), {"causal": True})
    for first in (0, 34_567, 69_500):  # the oracle is a loop: three stretches of 500 sequences
        batch = slice(first, first + 501)
        rows, keys = (slice(cu[batch][0], cu[batch][-1]) for cu in (cu_q, cu_k))
        offsets = (cu[batch] - cu[first] for cu in (cu_q, cu_k))
        oracle.check((out[rows], lse[:, rows]), q[rows], k[keys], v[keys], *offsets, causal=True)


def test_65600_heads(any_dtype):
    check(Case("", "", (3, 0, 2), None, 65_600, 32_800, 8, options={"causal": True}), any_dtype)


@st.composite
def random_cases(draw):
    batch = draw(st.integers(0, 5))
    lens = lambda: tuple(draw(st.lists(st.integers(0, 150), min_size=batch, max_size=batch)))
    used = lambda lens: tuple(draw(st.integers(0, n)) for n in lens)
    bound = st.one_of(st.none(), st.integers(0, 160))
    lens_q = lens()
    lens_k = draw(st.sampled_from([None, lens()]))
    options = {"causal": draw(st.booleans()), "window_size": (draw(bound), draw(bound))}
    if draw(st.booleans()):
        options["seqused_q"] = used(lens_q)
    if draw(st.booleans()):
        options["seqused_k"] = used(lens_q if lens_k is None else lens_k)
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 20.0]))
    if draw(st.booleans()):
        options["softmax_scale"] = draw(st.sampled_from([-0.1, 0.0, 0.5]))
    num_kv_heads, group_size = draw(st.sampled_from([(1, 1), (2, 3), (1, 8)]))
    return Case(
        *("random", "", lens_q, lens_k, num_kv_heads * group_size, num_kv_heads),
        *draw(st.sampled_from([(8, 8), (64, 64), (37, 50), (128, 128)])),
        gap=draw(st.integers(0, 5)),
        tail=draw(st.integers(0, 70)),
        options=options,
        alibi=draw(st.sampled_from([None, "heads", "batch"])),
        sinks=draw(st.sampled_from([None, "random"])),
        seed=draw(st.integers(0, 99)),
    )


@settings(deadline=None, max_examples=60, derandomize=True)
@given(random_cases(), st.integers(0, 2))
def test_random_cases(case, dtype):
    from conftest import DTYPES

    check(case, jnp.dtype(DTYPES[dtype % len(DTYPES)]))
