"""A paged KV cache: the keys of a sequence stand in blocks of a pool, in the order that a block table tells."""

import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES, Case
from conftest import DTYPES, PLATFORM
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from pools import as_float8, hostile_table, paged
from test_fwd import attend, random_cases
from test_primitives import CHECKS

from jax_varlen import varlen_attention

BLOCK_SIZES = (1, 2, 3, 7, 16, 64, 100, 256)
ORDERS = ("shuffled", "reversed", "straight")
LENGTHS = ("seqused_k", "cu_seqlens_k", "both")
ON_CPU = PLATFORM == "cpu"

# A batch of a serving engine: decoding, prefill, a few draft tokens, an idle slot, and a chunk of a long prompt.
MIXED = {"lens_q": (1, 40, 4, 0, 1, 70), "lens_k": (333, 40, 77, 9, 1, 200)}


def check(args, options):
    oracle.check_paged(attend(args, options), *args, **options, factor=3.0 if "softcap" in options else 2.0)


def cycled(cases):
    """Each with a block size, an order and a way to tell the lengths, so that every one of these comes with many cases."""
    ways = zip(itertools.cycle(BLOCK_SIZES), itertools.cycle(ORDERS), itertools.cycle(LENGTHS), strict=False)
    return [pytest.param(case, *way, id=f"{case}-{way[0]}-{way[1]}-{way[2]}") for case, way in zip(cases, ways, strict=False)]


@pytest.mark.parametrize("case, block_size, order, lengths", cycled(CASES))
def test_cases(case, block_size, order, lengths, dtype):
    """All that holds for packed keys holds for paged ones. No sequence sees what stands around its keys: NaN."""
    args, options = case.inputs(dtype)
    actual = attend(*paged(args, options, block_size, order=order, lengths=lengths))
    oracle.check(actual, *args, **options, factor=3.0 if "softcap" in options else 2.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_sizes(block_size, order, dtype):
    case = Case("", "", **MIXED, num_heads=8, options={"causal": True})
    check(*paged(*case.inputs(dtype), block_size, order=order))


@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
def test_paged_equals_packed(block_size, dtype):
    args, options = Case("", "", **MIXED, num_heads=8, options={"window_size": (90, 5)}).inputs(dtype)
    expected, actual = attend(args, options), attend(*paged(args, options, block_size))
    if ON_CPU:
        np.testing.assert_array_equal(actual[0], expected[0])
        np.testing.assert_array_equal(actual[1], expected[1])
    else:
        np.testing.assert_allclose(actual[0].astype(np.float32), expected[0].astype(np.float32), rtol=2e-2, atol=1e-3)
        np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5, atol=1e-5)


OPTIONS = {
    "causal": {"causal": True},
    "window": {"window_size": (50, 9)},
    "window_causal": {"window_size": (17, None), "causal": True},
    "softcap": {"softcap": 3.0, "causal": True},
    "scale": {"softmax_scale": -0.3},
    "seqused_q": {"seqused_q": (1, 33, 0, 0, 1, 69), "causal": True},
    "seqused_k": {"seqused_k": (300, 0, 77, 9, 1, 113), "causal": True},
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_mixed_batches(options, lengths, any_dtype):
    case = Case("", "", **MIXED, num_heads=6, head_dim=64, head_dim_v=40, gap=2, tail=5, options=options)
    check(*paged(*case.inputs(any_dtype), 16, lengths=lengths))


@pytest.mark.parametrize("alibi", ["heads", "batch"])
@pytest.mark.parametrize("block_size", [3, 16, 64])
def test_all_options_at_once(block_size, alibi, dtype):
    options = {"softcap": 4.0, "window_size": (120, 9), "softmax_scale": 0.2, "seqused_q": (1, 33, 4, 0, 1, 69)}
    options["seqused_k"] = (333, 30, 77, 9, 0, 199)
    case = Case("", "", **MIXED, num_heads=6, head_dim=72, head_dim_v=96, alibi=alibi, sinks="random", options=options)
    check(*paged(*case.inputs(dtype), block_size))


@pytest.mark.parametrize(
    "heads",
    [(1, 1), (4, 2), (6, 2), (5, 1), (12, 2), (7, 1), (12, 1), (16, 1), (64, 2), (64, 1), (128, 1), (8, 8)],
    ids=str,
)
@pytest.mark.parametrize("lens", [((1, 1, 1), (100, 3, 64)), ((5, 1, 30), (90, 1, 64))], ids=["decode", "mixed"])
def test_gqa_ratios(heads, lens, any_dtype):
    check(*paged(*Case("", "", *lens, *heads, 32, options={"causal": True}).inputs(any_dtype), 16))


@pytest.mark.parametrize("dims", [(1, 1), (8, 8), (37, 50), (64, 128), (96, 96), (192, 128), (256, 256), (320, 16)], ids=str)
def test_head_dims(dims, any_dtype):
    check(*paged(*Case("", "", **MIXED, head_dim=dims[0], head_dim_v=dims[1], options={"causal": True}).inputs(any_dtype), 16))


def test_keys_of_all_lengths(any_dtype):
    """One row for each length from 1 to 600: every way of dividing keys among workers."""
    lens_k = tuple(range(1, 601))
    case = Case("", "", (1,) * 600, lens_k, 4, 1, 32, options={"causal": True})
    check(*paged(*case.inputs(any_dtype), 16))


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (20, 2), (40, 2)], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_long_contexts(heads, rows, dtype):
    """Keys so many that they are divided among workers; a sink and a window once, however many there are."""
    case = Case("", "", (rows, rows, rows), (5000, 9, 3073), *heads, 64, sinks=1.0, options={"causal": True})
    check(*paged(*case.inputs(dtype), 64))
    window = Case(
        "", "", (rows, rows), (7000, 5000), *heads, 64, sinks="random", alibi="heads", options={"window_size": (4000, 0)}
    )
    check(*paged(*window.inputs(dtype), 16))


def test_a_window_with_any_division_of_the_keys(any_dtype):
    case = Case("", "", (300,), (4096,), 8, 2, 128, options={"window_size": (333, None)})
    check(*paged(*case.inputs(any_dtype), 16))


@pytest.mark.parametrize("rows", [1, 20])
def test_the_keys_of_few_rows_are_divided(rows):
    """On a CPU: in a part of their own most ones are added up apart from 2**32, and count; behind it each of them is lost."""
    length = 16_384
    v = np.ones((length // 16, 16, 1, 64), np.float32)
    v[0, 0] = 2**32
    q, cu = np.zeros((rows, 1, 64), np.float32), np.array([0, rows])
    options = {"seqused_k": np.array([length]), "block_table": np.arange(length // 16)[None]}
    with jax.default_device(jax.devices("cpu")[0]):
        out, lse = attend((q, np.ones_like(v), v, cu), options)
    ones = out.astype(np.float64) * length - 2**32
    assert (ones > length / 2).all()
    np.testing.assert_allclose(lse, np.log(length), rtol=1e-6)


def test_12288_sequences(any_dtype):
    batch, length = 12_288, 8
    args, options = Case("", "", (length,) * batch, None, 2, 1, 16, options={"causal": True}).inputs(any_dtype)
    out, lse = attend(*paged(args, options, 16))
    q, k, v, cu = args
    for first in (0, 7000, batch - 300):  # the oracle is a loop: three stretches of 300 sequences
        rows = slice(first * length, (first + 300) * length)
        oracle.check((out[rows], lse[:, rows]), q[rows], k[rows], v[rows], cu[:301], causal=True)


@pytest.mark.parametrize("pool_dtype", ["float8_e4m3fn", *DTYPES[:1]])
def test_a_pool_of_more_than_2_to_the_31_elements(pool_dtype):
    """Keys in the last blocks and in the first one; zeros everywhere else."""
    if ON_CPU and pool_dtype != "float8_e4m3fn":
        pytest.skip("needs a device with 10 GB of memory")
    shape, ids = (131_082, 16, 8, 128), np.array([131_081, 131_080, 131_075, 0])
    assert np.prod(shape) > 2**31
    rng = np.random.default_rng(0)
    blocks = rng.normal(size=(4, *shape[1:])).astype(pool_dtype)
    pool = np.zeros(shape, pool_dtype)
    pool[ids] = blocks
    q, cu = rng.normal(size=(2, 8, 128)).astype(DTYPES[0]), np.arange(3, dtype=np.int32)
    table, lengths = np.array([[0, 1], [2, 3]]), np.array([30, 20], np.int32)
    pool = jnp.asarray(pool)
    actual = attend((q, pool, pool, cu), {"seqused_k": lengths, "block_table": ids[table]})
    oracle.check_paged(actual, q, blocks, blocks, cu, seqused_k=lengths, block_table=table)


# What stands around the keys.


def same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("lengths", [(17, 1), (32, 31), (1, 33)], ids=str)
def test_the_rest_of_a_block_reaches_nothing(lengths, dtype):
    """NaN and Inf, a million, or zeros behind the last key: the same bits."""
    args, options = Case("", "", (2, 2), lengths, options={"causal": True}).inputs(dtype)
    (q, k, v, cu), options = paged(args, options, 16)
    expected = attend((q, k, v, cu), options)
    assert np.isfinite(expected[0].astype(np.float32)).all()
    nobody = np.isnan(k.astype(np.float32))
    for poison in (np.inf, 1e4, 0.0):
        pools = [np.where(nobody, np.asarray(poison, x.dtype), x) for x in (k, v)]
        same(attend((q, *pools, cu), options), expected)


def test_blocks_left_of_the_window_reach_nothing(dtype):
    """Row 0 of 20 sees key 556 and later: the blocks in front of it may hold anything."""
    args, options = Case("", "", (20,), (640,), options={"window_size": (64, None)}).inputs(dtype)
    (q, k, v, cu), options = paged(args, options, 16)
    expected = attend((q, k, v, cu), options)
    k, v = k.copy(), v.copy()
    k[options["block_table"][0, :34]] = v[options["block_table"][0, :34]] = np.nan
    same(attend((q, k, v, cu), options), expected)


def test_a_neighbour_reaches_nothing(dtype):
    args, options = Case("", "", (5, 3, 1), (40, 70, 200), options={"causal": True}).inputs(dtype)
    (q, k, v, cu), options = paged(args, options, 16)
    expected = attend((q, k, v, cu), options)
    k, v = k.copy(), v.copy()
    theirs = options["block_table"][1, :5]
    k[theirs] = v[theirs] = np.nan
    actual = attend((q, k, v, cu), options)
    others = np.r_[:5, 8:9]
    same((actual[0][others], actual[1][:, others]), (expected[0][others], expected[1][:, others]))


def test_two_sequences_share_their_first_blocks(dtype):
    """A prompt that two have in common stands in the pool once."""
    rng = np.random.default_rng(1)
    k, v = (rng.normal(size=(9, 16, 2, 64)).astype(dtype) for _ in range(2))
    q = rng.normal(size=(8, 4, 64)).astype(dtype)
    table = np.array([[4, 2, 7, 0], [4, 2, 1, 10**6], [4, -1, 3, 3]], np.int32)
    options = {"block_table": table, "seqused_k": np.array([60, 40, 16], np.int32), "causal": True}
    check((q, k, v, np.array([0, 5, 7, 8], np.int32)), options)


def test_one_block_many_times(any_dtype):
    rng = np.random.default_rng(1)
    k, v = (rng.normal(size=(3, 4, 2, 16)).astype(any_dtype) for _ in range(2))
    q = rng.normal(size=(2, 2, 16)).astype(any_dtype)
    check((q, k, v, np.array([0, 2])), {"block_table": np.full((1, 9), 2), "seqused_k": np.array([35])})


def test_memory_of_an_empty_pool_or_table(any_dtype):
    q = np.ones((3, 4, 16), any_dtype)
    cu, none = np.array([0, 2, 3]), np.zeros(2, np.int32)
    sinks = np.linspace(-1, 1, 4, dtype=np.float32)
    for num_blocks, max_blocks in ((0, 3), (2, 0), (0, 0)):
        pool, table = np.zeros((num_blocks, 16, 2, 16), any_dtype), np.full((2, max_blocks), -7, np.int32)
        for lengths in ({"seqused_k": none}, {"cu_seqlens_k": np.array([5, 5, 5])}):
            for options in ({}, {"sinks": sinks}):
                out, lse = attend((q, pool, pool, cu), {"block_table": table, **lengths, **options})
                assert not out.any()
                np.testing.assert_array_equal(lse, np.broadcast_to(options.get("sinks", np.full(4, -np.inf))[:, None], (4, 3)))
    pool, table = np.zeros((2, 16, 2, 16), any_dtype), np.zeros((0, 3), np.int32)
    for lengths in ({"seqused_k": none[:0]}, {"cu_seqlens_k": np.array([9])}):
        out, lse = attend((q, pool, pool, np.array([0])), {"block_table": table, **lengths})
        assert not out.any() and np.isneginf(lse).all()


def test_more_rows_than_keys(dtype):
    """6 rows of 4 keys: the first two see none, and out and lse say so."""
    case = Case("", "", (6,), (4,), options={"causal": True})
    args, options = paged(*case.inputs(dtype), 2)
    out, lse = attend(args, options)
    check(args, options)
    assert not out[:2].any() and np.isneginf(lse[:, :2]).all() and np.isfinite(lse[:, 2:]).all()


# Serving.


def close(actual, expected):
    """But for the order of sums, and what rounding the probabilities costs where a kernel does that."""
    for x, y in zip(actual, expected, strict=True):
        tolerance = 4 * oracle.eps(y.dtype) * np.abs(y.astype(np.float32)).max()
        np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=0, atol=tolerance)


@pytest.mark.parametrize("window_size", [(None, None), (6, None), (2, None)], ids=str)
def test_chunks_over_a_growing_cache_equal_one_prefill(window_size, dtype):
    """Three chunks of 5 tokens, each with the keys of those before it in the cache."""
    args, options = Case("", "", (15, 15), options={"causal": True, "window_size": window_size}).inputs(dtype)
    expected = attend(args, options)
    (q, k, v, _), options = paged(args, options, 4)
    for i in range(3):
        rows = np.r_[5 * i : 5 * i + 5, 15 + 5 * i : 20 + 5 * i]
        options["seqused_k"] = np.array([5 * i + 5, 5 * i + 5], np.int32)
        actual = attend((q[rows], k, v, np.array([0, 5, 10])), options)
        close(actual, (expected[0][rows], expected[1][:, rows]))


@pytest.mark.parametrize("window_size", [(None, None), (7, 0)], ids=str)
def test_decoding_equals_the_last_row_of_prefill(window_size, dtype):
    args, options = Case("", "", (50, 130), options={"causal": True, "window_size": window_size}).inputs(dtype)
    expected = attend(args, options)
    (q, k, v, _), options = paged(args, options, 16)
    close(attend((q[[49, 179]], k, v, np.arange(3)), options), (expected[0][[49, 179]], expected[1][:, [49, 179]]))


def test_one_trace_while_the_cache_grows(any_dtype):
    rng = np.random.default_rng(0)
    k, v = (rng.normal(size=(40, 16, 2, 32)).astype(any_dtype) for _ in range(2))
    q = rng.normal(size=(5, 4, 32)).astype(any_dtype)
    traces = 0

    @jax.jit
    def step(q, k, v, cu, lengths, table):
        nonlocal traces
        traces += 1
        return varlen_attention(q, k, v, cu, seqused_k=lengths, block_table=table, causal=True, return_lse=True)

    for i, lengths in enumerate(([1, 1, 1], [100, 7, 0], [7, 100, 160], [33, 32, 31])):
        lengths = np.array(lengths, np.int32)
        table = hostile_table(np.random.default_rng(i), -(-lengths // 16), 40 - int((-(-lengths // 16)).sum()))
        table = np.concatenate([table, np.full((3, 11 - table.shape[1]), -1)], 1).astype(np.int32)
        cu = np.array([[0, 1, 2, 3], [0, 3, 3, 5], [0, 1, 4, 5], [0, 0, 5, 5]][i], np.int32)
        actual = [np.asarray(x) for x in step(q, k, v, cu, lengths, table)]
        owned = np.where(np.arange(5)[:, None, None] < cu[-1], q, np.nan).astype(any_dtype)
        oracle.check_paged(actual, owned, k, v, cu, seqused_k=lengths, block_table=table, causal=True)
    assert traces == 1 and step._cache_size() == 1


def test_the_same_call_gives_the_same_bits(dtype):
    case = Case("", "", (1, 40, 1), (9000, 100, 5000), 8, 2, sinks="random", alibi="batch", options={"softcap": 9.0})
    args, options = paged(*case.inputs(dtype), 16)
    expected = attend(args, options)
    for _ in range(10):
        same(attend(args, options), expected)


def test_a_sequence_gives_the_same_bits_in_any_batch(dtype):
    """On a GPU only if it is asked for: there all keys of a batch are shared out evenly."""
    case = Case("", "", (1, 3, 40), (9000, 5000, 100), 8, 2, options={"causal": True, "deterministic": not ON_CPU})
    (q, k, v, cu), options = paged(*case.inputs(dtype), 16)
    out, lse = attend((q, k, v, cu), options)
    for b in range(3):
        rows = slice(cu[b], cu[b + 1])
        alone = options | {name: options[name][b : b + 1] for name in ("block_table", "seqused_k")}
        same(attend((q[rows], k, v, np.array([0, cu[b + 1] - cu[b]])), alone), (out[rows], lse[:, rows]))


DIGEST = """
import hashlib, sys
sys.path.insert(0, {tests!r})
import jax.numpy as jnp
from cases import Case
from pools import paged
from test_fwd import attend
options = {{"causal": True, "softcap": 9.0}}
case = Case("", "", (1, 40, 5), (9000, 100, 5000), 8, 2, sinks="random", alibi="batch", options=options)
states = [attend(*paged(*case.inputs(jnp.dtype(dtype)), 16)) for dtype in ("float32", "bfloat16")]
print(hashlib.sha256(b"".join(x.tobytes() for state in states for x in state)).hexdigest())
"""


def test_any_number_of_threads_gives_the_same_bits():
    """On a CPU: who ends last joins what the others found, in the order of the keys."""
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "JAX_PLATFORMS": "cpu"}
    digests = set()
    for threads in ("1", "2", "7"):
        environment = os.environ | paths | {"NPROC": threads, "PJRT_NPROC": threads}
        command = [sys.executable, "-P", "-c", DIGEST.format(tests=os.path.dirname(__file__))]
        digests.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert len(digests) == 1


def test_a_larger_cache_changes_no_bit(dtype):
    """How the keys are divided depends on the lengths, not on the room that the table and the pools have."""
    args, options = paged(*Case("", "", (1, 3), (9000, 5000), 8, 2, options={"causal": True}).inputs(dtype), 16)
    expected = attend(args, options)
    q, k, v, cu = args
    table = options["block_table"]
    options = options | {"block_table": np.concatenate([table, np.full_like(table, 2**30)], 1)}
    k, v = (np.concatenate([x, np.full_like(x, np.nan)]) for x in (k, v))
    same(attend((q, k, v, cu), options), expected)


def test_manual_axes(any_dtype):
    """Inside `shard_map` over heads, as tensor parallel models serve."""
    (q, k, v, cu), options = as_float8(*paged(*Case("", "", **MIXED).inputs(any_dtype), 16))
    lengths, table = (options.pop(name) for name in ("seqused_k", "block_table"))
    arrays = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "seqused_k": lengths, "block_table": table} | options
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    by_head = {"q": P(None, "heads", None), "k_scale": P("heads"), "v_scale": P("heads")}
    by_head |= {name: P(None, None, "heads", None) for name in "kv"}
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = ({name: by_head.get(name, P()) for name in arrays},)
    sharded = jax.shard_map(
        lambda arrays: varlen_attention(**arrays, return_lse=True),
        mesh=mesh, in_specs=specs, out_specs=(P(None, "heads", None), P("heads", None)),
    )  # fmt: skip
    same(jax.jit(sharded)(arrays), varlen_attention(**arrays, return_lse=True))
    exported = jax.export.export(jax.jit(sharded), platforms=("tpu",))(arrays)
    assert "stablehlo.while" in exported.mlir_module()


def test_lowers_to_one_call_of_the_kernel():
    (q, k, v, cu), options = as_float8(*paged(*Case("", "", **MIXED).inputs(jnp.dtype("bfloat16")), 16))
    options = {name: jnp.asarray(x) for name, x in options.items()}
    f = jax.jit(lambda q, k, v, cu, options: varlen_attention(q, k, v, cu, **options))
    module = jax.export.export(f, platforms=("cpu",), disabled_checks=CHECKS)(q, k, v, cu, options).mlir_module()
    assert module.count("custom_call @jax_varlen_fwd_v1") == 1
    assert "stablehlo.gather" not in module and "stablehlo.while" not in module


# Gradients.


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_there_is_no_gradient(name, wrap, any_dtype):
    (q, k, v, cu), options = paged(*Case("", "", **MIXED, sinks="random").inputs(any_dtype), 16)
    arrays = {"q": q, "k": k, "v": v, "sinks": options.pop("sinks")}
    f = lambda x: varlen_attention(cu_seqlens_q=cu, **arrays | {name: x}, **options).astype(jnp.float32).sum()
    with pytest.raises(NotImplementedError, match=r"With block_table .* no gradient: .* Give packed k and v, or stop"):
        jax.grad(wrap(f))(jnp.asarray(arrays[name]))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_there_is_no_gradient_of_scales(name, any_dtype):
    args, options = as_float8(*paged(*Case("", "", **MIXED).inputs(any_dtype), 16))
    f = lambda x: varlen_attention(*args, **options | {name: x}).astype(jnp.float32).sum()
    with pytest.raises(NotImplementedError, match=r"With block_table .* no gradient"):
        jax.grad(f)(jnp.asarray(options[name]))


def test_a_call_that_takes_no_part_in_the_gradient_is_right(any_dtype):
    (q, k, v, cu), options = paged(*Case("", "", **MIXED).inputs(any_dtype), 16)
    out = lambda q: varlen_attention(q, k, v, cu, **options).astype(jnp.float32).sum()
    value, gradient = jax.value_and_grad(lambda x: x * jax.lax.stop_gradient(out(jnp.asarray(q))))(2.0)
    np.testing.assert_allclose(value, 2 * gradient, rtol=1e-6)


# Everything at random.


@st.composite
def random_calls(draw):
    case = draw(random_cases())
    return (
        case,
        draw(st.sampled_from(BLOCK_SIZES)),
        draw(st.sampled_from(ORDERS)),
        draw(st.sampled_from(LENGTHS)),
        draw(st.booleans()),
    )


@settings(deadline=None, max_examples=80, derandomize=True)
@given(random_calls(), st.integers(0, 2))
def test_random_calls(call, dtype):
    case, block_size, order, lengths, float8 = call
    args, options = paged(*case.inputs(jnp.dtype(DTYPES[dtype % len(DTYPES)])), block_size, order=order, lengths=lengths)
    check(*as_float8(args, options) if float8 else (args, options))
