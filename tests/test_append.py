"""`append_kv` against a loop over tokens: bit by bit, in every dtype on every platform, for right and for wrong places."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle_append
import pytest
from conftest import PLATFORM
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_append import E4M3

import jax_varlen as jv
from jax_varlen import paged

DTYPES = ("float32", "bfloat16", "float16")  # a copy asks nothing of the platform
POOLS = ("k_cache", "v_cache")
OFFSETS = ("cu_seqlens", "seqused_k", "block_table")
RUNTIME_ERRORS = (ValueError, jax.errors.JaxRuntimeError)  # JAX raises the first where it runs a small program at once


def inputs(
    lens=(3, 0, 6, 1),
    used=(2, 5, 7, 0),
    *,
    block_size=4,
    max_blocks=4,
    heads=2,
    head_dim=16,
    head_dim_v=8,
    gap=0,
    tail=0,
    dtype="float32",
    pool_dtype=None,
    seed=0,
):
    """The arguments by name. Rows of nobody hold NaN, and table entries that no token needs are far outside the pool."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    batch, total = len(lens), gap + sum(lens) + tail
    num_blocks = batch * max_blocks + 3
    table = rng.permutation(num_blocks)[: batch * max_blocks].reshape(batch, max_blocks).astype(np.int32)
    used = np.array(used, np.int32)
    needed = np.arange(max_blocks)[None, :] * block_size
    needed = (needed < (used + np.array(lens, np.int32))[:, None]) & (needed > used[:, None] - block_size)
    k, v = (rng.normal(size=(total, heads, d)).astype(dtype) for d in (head_dim, head_dim_v))
    for x in (k, v):
        x[:gap], x[total - tail :] = np.nan, np.nan
    shape = (num_blocks, block_size, heads)
    k_cache, v_cache = (rng.normal(size=(*shape, d)).astype(pool_dtype or dtype) for d in (head_dim, head_dim_v))
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k,
        "v": v,
        "cu_seqlens": gap + np.cumsum([0, *lens], dtype=np.int32),
        "seqused_k": used,
        "block_table": np.where(needed, table, rng.choice([-1, 2**31 - 1], table.shape)).astype(np.int32),
    }


append = jax.jit(lambda arrays: jv.append_kv(**arrays))
append_in_place = jax.jit(jv.append_kv, donate_argnums=(0, 1))
scatter = jax.jit(lambda arrays: paged._scatter(dict.fromkeys(paged.OPERANDS) | arrays))


def same(actual, expected):
    """Of NaN only that it is one: no platform keeps its sign in float8."""
    for x, y in zip(actual, expected, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape
        if x.dtype == E4M3:
            np.testing.assert_array_equal(np.isnan(x.astype(np.float32)), np.isnan(y.astype(np.float32)))
            x, y = (np.where(np.isnan(a.astype(np.float32)), 0, a.astype(np.float32)) for a in (x, y))
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        np.testing.assert_array_equal(x.view(unsigned), y.view(unsigned))


CASES = {
    "ragged": {},
    "decode": {"lens": (1,) * 9, "used": (0, 1, 3, 4, 7, 8, 11, 12, 15)},
    "from_empty": {"lens": (16, 1, 5), "used": (0, 0, 0)},
    "all_empty": {"lens": (0, 0), "used": (3, 16), "tail": 2},
    "up_to_the_last_row": {"lens": (5, 16), "used": (11, 0)},
    "full_and_nothing_more": {"lens": (0, 2), "used": (16, 1)},
    "nobody_around": {"gap": 3, "tail": 5},
    "no_tokens": {"lens": (0, 0), "used": (1, 2)},
    "no_sequence": {"lens": (), "used": (), "tail": 4},
    "no_sequence_no_tokens": {"lens": (), "used": ()},
    "no_columns": {"lens": (0, 0), "used": (0, 0), "max_blocks": 0, "tail": 3},
    "one_head": {"heads": 1},
    "seven_heads": {"heads": 7},
    "widths_1_and_3": {"head_dim": 1, "head_dim_v": 3},
    "widths_5_and_2": {"head_dim": 5, "head_dim_v": 2},
    "widths_192_and_128": {"head_dim": 192, "head_dim_v": 128},
    "width_600": {"head_dim": 600, "head_dim_v": 8},
    "many_units": {"lens": (700, 3, 900), "used": (5, 60, 1000), "block_size": 64, "max_blocks": 32, "head_dim": 128},
} | {
    f"block_size_{n}": {"lens": (9, 1, 40), "used": (1, n, 2), "block_size": n, "max_blocks": 44 // n + 2}
    for n in (1, 2, 3, 7, 16, 64, 100, 256)
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_loop(case, dtype):
    arrays = inputs(**case, dtype=dtype)
    expected = oracle_append.append(**arrays)
    assert not any(np.isnan(x).any() for x in expected)
    same(append(arrays), expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plain_jax_equals_the_loop(case):
    arrays = inputs(**case)
    same(scatter(arrays), oracle_append.append(**arrays))


SMALL = {"lens": (2, 3, 2), "used": (0, 0, 0), "block_size": 3, "max_blocks": 3, "heads": 1, "head_dim": 8, "head_dim_v": 1}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_right_places(data):
    """Shapes stay, so nothing compiles again."""
    arrays = inputs(**SMALL, gap=1, tail=2)
    cuts = sorted(data.draw(st.lists(st.integers(0, 10), min_size=4, max_size=4)))
    lens = np.diff(cuts)
    room = 9 - lens
    if (room < 0).any():
        cuts, room = [1, 3, 3, 8], np.array([7, 9, 4])
    arrays["cu_seqlens"] = np.array(cuts, np.int32)
    arrays["seqused_k"] = np.array([data.draw(st.integers(0, int(n))) for n in room], np.int32)
    arrays["block_table"] = np.array(data.draw(st.permutations(range(12))), np.int32)[:9].reshape(3, 3)
    arrays["k"], arrays["v"] = (np.nan_to_num(arrays[name]) for name in "kv")
    expected = oracle_append.append(**arrays)
    same(append(arrays), expected)
    same(scatter(arrays), expected)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_wrong_places_are_written_nowhere(data):
    arrays = inputs(**SMALL)
    anywhere = st.integers(-3, 12) | st.sampled_from([2**31 - 1, -(2**31)])
    draw = lambda n: np.array(data.draw(st.lists(anywhere, min_size=n, max_size=n)), np.int32)
    arrays["seqused_k"] = draw(3)
    table = draw(9)
    first = np.unique(table, return_index=True)[1]
    table[np.setdiff1d(np.arange(9), first)] = -1  # two sequences in one place would be the caller's mistake
    arrays["block_table"] = table.reshape(3, 3)
    expected = oracle_append.append(**arrays)
    same(scatter(arrays), expected)
    if PLATFORM != "cpu":
        same(append(arrays), expected)


# name: what is changed, and what is said of it
WRONG = {
    "full": (
        "seqused_k",
        [2, 5, 16, 0],
        r"4 blocks of 4 hold 16 of a sequence: seqused_k\[2\] is 16, .* 6 more",
    ),
    "one_too_many": ("seqused_k", [2, 5, 11, 0], r"hold 16 of a sequence: seqused_k\[2\] is 11, .* 6 more"),
    "huge": ("seqused_k", [2, 5, 2**31 - 1, 0], r"seqused_k\[2\] is 2147483647"),
    "negative": ("seqused_k", [-1, 5, 7, 0], r"seqused_k must not be negative: seqused_k\[0\] is -1"),
    "id_beyond": ((0, 1), 19, r"blocks of the pool, which has 19: block_table\[0, 1\] is 19, .* positions 2 to 4"),
    "id_negative": ((2, 2), -1, r"block_table\[2, 2\] is -1, where sequence 2 appends the positions 7 to 12"),
    "id_huge": ((3, 0), 2**31 - 1, r"block_table\[3, 0\] is 2147483647"),
    "falls": ("cu_seqlens", [0, 3, 2, 9, 10], r"cu_seqlens must not decrease: cu_seqlens\[2\] is 2"),
    "past_the_end": ("cu_seqlens", [0, 3, 3, 9, 11], r"cu_seqlens must end within .*cu_seqlens\[4\] is 11"),
    "before_the_start": ("cu_seqlens", [-1, 3, 3, 9, 10], r"cu_seqlens must not be negative: cu_seqlens\[0\] is -1"),
}


def wrong(what, value):
    arrays = inputs()
    if isinstance(what, str):
        arrays[what] = np.array(value, np.int32)
    else:
        arrays["block_table"][what] = value
    return arrays


@pytest.mark.parametrize("what, value, message", WRONG.values(), ids=WRONG)
def test_wrong_numpy_values_raise_at_trace_time(what, value, message):
    arrays = wrong(what, value)
    known = {name: arrays.pop(name) for name in OFFSETS}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda arrays: jv.append_kv(**arrays, **known), arrays)


@pytest.mark.parametrize("what, value, message", WRONG.values(), ids=WRONG)
def test_wrong_values_on_the_device(what, value, message):
    arrays = wrong(what, value)
    if PLATFORM == "cpu":
        with pytest.raises(RUNTIME_ERRORS, match=message):
            jax.block_until_ready(append(arrays))
    elif what == "cu_seqlens":
        jax.block_until_ready(append(arrays))
    else:
        same(append(arrays), oracle_append.append(**arrays))


@pytest.mark.parametrize("known", [("cu_seqlens",), ("cu_seqlens", "seqused_k"), ("block_table",), ("seqused_k",)], ids=str)
def test_some_values_may_be_known(known):
    arrays = inputs()
    fixed = {name: arrays.pop(name) for name in known}
    same(jax.jit(lambda arrays: jv.append_kv(**arrays, **fixed))(arrays), oracle_append.append(**arrays, **fixed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_equal_one_call(dtype):
    """5, 0 and 11 tokens after 16, 3 and 4: at once, and in three pieces of each."""
    pieces = [(2, 0, 4), (0, 0, 7), (3, 0, 0)]
    arrays = inputs((5, 0, 11), (16, 3, 4), block_size=3, max_blocks=8, dtype=dtype)
    starts = arrays["cu_seqlens"][:-1].copy()
    state = {name: arrays[name] for name in POOLS} | {"seqused_k": arrays["seqused_k"]}
    for lens in pieces:
        rows = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lens, strict=True)])
        cu_seqlens = jv.cu_seqlens_from_lengths(np.array(lens))
        tokens = {"k": arrays["k"][rows], "v": arrays["v"][rows], "cu_seqlens": cu_seqlens}
        pools = append(state | tokens | {"block_table": arrays["block_table"]})
        state = dict(zip(POOLS, pools, strict=True)) | {"seqused_k": state["seqused_k"] + jnp.diff(cu_seqlens)}
        starts += lens
    same([state[name] for name in POOLS], append(arrays))


def test_offsets_of_any_integer_dtype():
    expected = oracle_append.append(**inputs())
    for dtype in (np.int64, np.uint8, np.int16):
        arrays = inputs()
        arrays["block_table"] = np.where(arrays["block_table"] > 18, 18, arrays["block_table"].clip(0))
        same(append({name: x.astype(dtype) if name in OFFSETS else x for name, x in arrays.items()}), expected)


@pytest.mark.parametrize("wide", [2**32, -(2**32), 2**31, -(2**31) - 1], ids=str)
@pytest.mark.parametrize("name", ["seqused_k", "block_table"])
def test_int64_values_do_not_wrap_into_the_pool(name, wide):
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x) for name, x in inputs().items()}
        arrays[name] = arrays[name].astype(jnp.int64)
        same(append(arrays), oracle_append.append(**inputs()))
        arrays[name] = arrays[name].at[0].set(wide)
        if PLATFORM == "cpu":
            with pytest.raises(RUNTIME_ERRORS, match=rf"{name}\[0"):
                jax.block_until_ready(append(arrays))
        else:
            same(append(arrays), oracle_append.append(**{name: np.asarray(x) for name, x in arrays.items()}))


SCALES = {
    "none": {},
    "scalars": {"k_scale": np.float32(0.3), "v_scale": np.float32(2.5)},
    "heads": {"k_scale": np.array([0.1, 0.7], np.float32), "v_scale": np.array([3, 0.013], np.float32)},
    "k_alone": {"k_scale": np.array([0.1, 0.7], np.float32)},
}


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_float8(dtype, scales):
    widths = {"head_dim": 16, "head_dim_v": 8} if "v_scale" in scales else {"head_dim": 5, "head_dim_v": 7}
    arrays = inputs(**widths, dtype=dtype, pool_dtype=E4M3)
    arrays["k"] *= np.array(60, arrays["k"].dtype)
    expected = oracle_append.append(**arrays, **scales)
    same(append(arrays | scales), expected)
    scales = {name: np.broadcast_to(x, 2) for name, x in scales.items()}
    same(scatter(arrays | scales), expected)


def every_number(dtype):
    """Every finite number of a 16-bit format, infinities and NaN; of float32, all near the numbers of float8 and halfway."""
    if dtype != "float32":
        return np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    numbers = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    halfway = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, [464, 1e9, np.inf, np.nan, 1e-30]])
    halfway = halfway.astype(np.float32)
    near = np.concatenate([halfway, np.nextafter(halfway, np.float32(np.inf)), np.nextafter(halfway, np.float32(0))])
    return np.concatenate([near, -near])


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_of_every_number(dtype):
    x = every_number(dtype).reshape(1, 1, -1)
    pool = np.zeros((1, 1, 1, x.size), E4M3)
    arrays = {"k": x, "v": x[:, :, :3], "k_cache": pool, "v_cache": pool[..., :3]}
    arrays |= {"cu_seqlens": np.array([0, 1]), "seqused_k": np.array([0]), "block_table": np.array([[0]])}
    stored = np.asarray(append(arrays)[0]).astype(np.float32).ravel()
    x = x.ravel().astype(np.float32)
    np.testing.assert_array_equal(np.isnan(stored), np.isnan(x))
    with np.errstate(invalid="ignore"):  # which some versions of NumPy raise for NaN
        nearest = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(stored[~np.isnan(x)], nearest[~np.isnan(x)])
    np.testing.assert_array_equal(np.signbit(stored[~np.isnan(x)]), np.signbit(x[~np.isnan(x)]))


def test_70_000_sequences():
    lens = tuple(np.random.default_rng(0).integers(0, 3, 70_000).tolist())
    arrays = inputs(lens, (1,) * len(lens), block_size=2, max_blocks=2, heads=1, head_dim=8)
    k_cache, _ = append(arrays)
    owner, i = np.repeat(np.arange(len(lens)), lens), np.concatenate([np.arange(n) for n in lens])
    expected = arrays["k_cache"].copy()
    expected[arrays["block_table"][owner, (1 + i) // 2], (1 + i) % 2] = arrays["k"]
    same([k_cache], [expected])


def test_a_pool_of_more_than_2_to_the_31_elements():
    """Whatever the pool holds: to fill it would take longer than all other tests."""
    num_blocks = 131_082
    ends = lambda pool: np.concatenate([np.array(pool[:8]), np.array(pool[-8:])]).view(np.uint8)
    pools = [jnp.empty((num_blocks, 16, 8, d), E4M3) for d in (128, 1)]
    k, v = (jnp.full((3, 8, d), 7, jnp.bfloat16) for d in (128, 1))
    expected = [ends(pool) for pool in pools]
    for x in expected:
        x[15, 15] = x[14, 1] = x[14, 2] = np.array(7, E4M3).view(np.uint8)
    table = jnp.array([[num_blocks - 1, 0], [5, num_blocks - 2]])
    pools = append_in_place(*pools, k, v, jnp.array([0, 1, 3]), jnp.array([15, 17]), table)
    for x, y in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(ends(x), y)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


ERRORS = [
    ({"k_cache": zeros(76, 2, 16)}, ValueError, r"k_cache must be a pool \(num_blocks, block_size, num_kv_heads, head_dim\)"),
    ({"v_cache": zeros(19, 0, 2, 8)}, ValueError, r"v_cache must be a pool .* at least 1, got \(19, 0, 2, 8\)"),
    (
        {"v_cache": zeros(18, 4, 2, 8)},
        ValueError,
        r"agree in all but the last .* k_cache \(19, 4, 2, 16\) and v_cache \(18",
    ),
    ({"k": zeros(1, 10, 2, 16)}, ValueError, r"k must have shape .* = \(total, 2, 16\) as k_cache is .* with no batch axis"),
    ({"k": zeros(10, 4, 16)}, ValueError, r"k must have shape \(total, num_kv_heads, head_dim\) .*got \(10, 4, 16\)"),
    ({"v": zeros(10, 2, 16)}, ValueError, r"v must have shape \(total, num_kv_heads, head_dim_v\) = \(total, 2, 8\)"),
    ({"v": zeros(11, 2, 8)}, ValueError, r"k and v must hold the same tokens, got k \(10, 2, 16\) and v \(11, 2, 8\)"),
    ({"k": [1.0]}, TypeError, "k must be an array, got list"),
    ({"v": zeros(10, 2, 8, dtype=np.float16)}, TypeError, "k and v must both be one of .* got k float32 and v float16"),
    ({"v_cache": zeros(19, 4, 2, 8, dtype=np.float16)}, TypeError, "one dtype, got k_cache float32 and v_cache float16"),
    (
        {"k_cache": zeros(19, 4, 2, 16, dtype=np.float16), "v_cache": zeros(19, 4, 2, 8, dtype=np.float16)},
        TypeError,
        r"or float8_e4m3fn, got pools of float16 and k of float32. Cast the tokens: k.astype\(k_cache.dtype\)",
    ),
    ({"k_scale": 2.0}, TypeError, "k_scale is for pools of float8_e4m3fn, got pools of float32"),
    ({"v_scale": np.ones(2, np.float32)}, TypeError, "v_scale is for pools of float8_e4m3fn"),
    ({"cu_seqlens": np.array([], np.int32)}, ValueError, r"cu_seqlens must have shape \(batch \+ 1,\) and at least one entry"),
    ({"cu_seqlens": np.ones(5, np.float32)}, TypeError, "cu_seqlens must hold integers, got float32"),
    ({"seqused_k": np.zeros(5, np.int32)}, ValueError, r"seqused_k must have shape \(batch,\) = \(4,\)"),
    ({"seqused_k": np.zeros(4, np.float32)}, TypeError, "seqused_k must hold integers, got float32"),
    ({"block_table": np.zeros((3, 4), np.int32)}, ValueError, r"block_table .* batch = 4 rows, as cu_seqlens has batch \+ 1"),
    ({"block_table": np.zeros(4, np.int32)}, ValueError, r"block_table must have shape \(batch, max_blocks\)"),
]


@pytest.mark.parametrize("change, error, text", ERRORS, ids=[text for *_, text in ERRORS])
def test_errors(change, error, text):
    arrays = inputs() | change
    for call in (lambda: jv.append_kv(**arrays), lambda: jax.eval_shape(lambda: jv.append_kv(**arrays))):
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize("scale", [np.ones(3, np.float32), np.ones((2, 1), np.float32)], ids=str)
def test_wrong_scales(scale):
    with pytest.raises(ValueError, match=r"v_scale must be a scalar or have shape \(num_kv_heads,\) = \(2,\), got shape"):
        jv.append_kv(**inputs(pool_dtype=E4M3), v_scale=scale)
