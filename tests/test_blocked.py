import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_bwd
import pytest
from cases import SELECTED, Case, cotangents
from pools import as_float8, paged

from jax_varlen import blocked

STATIC = ("window_left", "window_right", "softcap")
_fwd = jax.jit(blocked.fwd, static_argnames=STATIC)


@functools.partial(jax.jit, static_argnames=STATIC)
def _bwd(*args, out, dout, lse, dlse, **options):
    delta = jnp.einsum("qhd,qhd->hq", dout, out, preferred_element_type=jnp.float32) - dlse
    return blocked.bwd(*args, dout, lse, delta, **options)


def arguments(q, k, v, cu_q, cu_k=None, **options):
    """The positional arguments that both passes have, and the static ones."""
    left, right = (-1 if bound is None else bound for bound in options.get("window_size", (None, None)))
    scale = options.get("softmax_scale")
    args = (
        *(q, k, v, cu_q, cu_q if cu_k is None else cu_k, options.get("seqused_q"), options.get("seqused_k")),
        np.float32(q.shape[2] ** -0.5 if scale is None else scale),
        options.get("alibi_slopes"),
    )
    right = 0 if options.get("causal") else right
    return args, {"window_left": left, "window_right": right, "softcap": options.get("softcap") or 0.0}


def attend(*args, **options):
    args, static = arguments(*args, **options)
    return _fwd(*args, options.get("sinks"), **static)


def gradients(*args, dout, dlse, **options):
    """dq, dk and dv by name: sinks get theirs outside."""
    out, lse = attend(*args, **options)
    args, static = arguments(*args, **options)
    return dict(zip("qkv", _bwd(*args, out=out, dout=dout, lse=lse, dlse=dlse, **static), strict=True))


@pytest.mark.parametrize("case", SELECTED, ids=str)
def test_cases(case):
    args, options = case.inputs(jnp.float32)
    oracle.check(attend(*args, **options), *args, **options)


def attend_paged(q, k, v, cu_q, cu_k=None, **options):
    args, static = arguments(q, k, v, cu_q, **options)
    scales = (
        None if options.get(name) is None else jnp.broadcast_to(options[name], k.shape[2]) for name in ("k_scale", "v_scale")
    )
    cu_k = options.get("cu_seqlens_k")
    return _fwd(*args[:4], cu_k, *args[5:], options.get("sinks"), options["block_table"], *scales, **static)


@pytest.mark.parametrize("block_size, lengths", [(1, "both"), (16, "seqused_k"), (100, "cu_seqlens_k")])
@pytest.mark.parametrize("case", [case for case in SELECTED if case.name in ("everything", "window_long_k", "decode")], ids=str)
def test_pools(case, block_size, lengths):
    args, options = paged(*case.inputs(jnp.float32), block_size, lengths=lengths)
    oracle.check_paged(attend_paged(*args, **options), *args, **options)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_pools_of_float8(name):
    case = Case("", "", (1, 40, 3), (333, 40, 77), 4, 2, 40, 24, sinks="random", options={"causal": True})
    args, options = as_float8(*paged(*case.inputs(jnp.dtype(name)), 16))
    oracle.check_paged(attend_paged(*args, **options), *args, **options)


@pytest.mark.parametrize("num_blocks, max_blocks", [(0, 3), (2, 0), (0, 0)])
def test_an_empty_pool_or_table(num_blocks, max_blocks):
    q, pool, table = np.ones((3, 4, 8)), np.zeros((num_blocks, 16, 2, 8)), np.full((2, max_blocks), 7, np.int32)
    args, cu = (x.astype(np.float32) for x in (q, pool, pool)), np.array([0, 2, 3], np.int32)
    out, lse = attend_paged(*args, cu, block_table=table, seqused_k=np.zeros(2, np.int32))
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("table", [[[2**31 - 1, -1, 5], [-(2**31), 2, 3]], [[0, 1, 2], [0, 1, 2]]], ids=str)
def test_wrong_tables_end_without_a_failure(table):
    pool, cu = np.ones((3, 16, 2, 8), np.float32), np.array([0, 2, 3], np.int32)
    for lengths in ([48, 20], [2**31 - 1, -5]):
        lengths = np.array(lengths, np.int32)
        out, _ = attend_paged(pool[0, :3], pool, pool, cu, block_table=np.array(table, np.int32), seqused_k=lengths)
        assert np.isfinite(np.asarray(out)).all()


def check_gradients(args, options):
    options["dout"], options["dlse"] = cotangents(args, options)
    actual = gradients(*args, **options)
    if "sinks" in options:
        actual["sinks"] = oracle_bwd.gradients(*args, **options).values["sinks"].astype(np.float32)
    oracle_bwd.check(actual, *args, **options)


BACKWARD = ("no_k", "no_sequence", "rows_without_keys", "seqused_long", "window_both_sides", "everything", "batch_993")


@pytest.mark.parametrize("case", [case for case in SELECTED if case.name in BACKWARD], ids=str)
def test_gradients(case):
    check_gradients(*case.inputs(jnp.float32))


@pytest.mark.parametrize("sinks", [None, "random"])
def test_rows_that_see_no_key_give_nothing(sinks):
    case = Case("", "", (9, 130, 40), (4, 70, 41), head_dim=16, sinks=sinks, options={"causal": True})
    args, options = case.inputs(np.float32)
    dout, dlse = cotangents(args, options)
    expected = gradients(*args, **options, dout=dout, dlse=dlse)
    for x in (args[0], dout, dlse.T):
        x[:5], x[9:69] = np.nan, np.nan
    actual = gradients(*args, **options, dout=dout, dlse=dlse)
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x)


@pytest.mark.parametrize("head_dim", [37, 512])
def test_gradients_in_bfloat16(head_dim):
    case = Case("", "", (70, 3), (150, 9), 4, 2, head_dim, head_dim // 2, sinks="random", options={"causal": True})
    check_gradients(*case.inputs(jnp.dtype("bfloat16")))


@pytest.mark.parametrize("low_precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [1, 37, 320, 512])
def test_dtypes_and_head_dims(low_precision, head_dim):
    case = Case("", "", (70, 3), (150, 9), 4, 2, head_dim, max(head_dim // 2, 1), sinks="random", options={"causal": True})
    args, options = case.inputs(jnp.dtype(low_precision))
    oracle.check(attend(*args, **options), *args, **options)


def test_nan_in_a_neighbour_and_left_of_the_window_reaches_nothing():
    case = Case("", "", (20, 9), (300, 40), head_dim=16, options={"window_size": (33, None)})
    (q, k, v, cu_q, cu_k), options = case.inputs(np.float32)
    expected = attend(q, k, v, cu_q, cu_k, **options)
    q, k, v = (x.copy() for x in (q, k, v))
    q[20:], k[300:], v[300:] = np.nan, np.nan, np.nan
    k[:247], v[:247] = np.nan, np.nan  # row 0 of 20 sees 300 - 20 - 33 = 247 and later
    actual = attend(q, k, v, cu_q, cu_k, **options)
    np.testing.assert_array_equal(actual[0][:20], expected[0][:20])
    np.testing.assert_array_equal(actual[1][:, :20], expected[1][:, :20])


@pytest.mark.parametrize(
    "cu_seqlens",
    [(0, 5, 3, 20), (0, 900, 1000, 2000), (-7, -3, 5, 9), (9, 7, 5, 3), (0, 2**31 - 1, -(2**31), 4)],
    ids=str,
)
def test_wrong_offsets_end_without_a_failure(cu_seqlens):
    (q, k, v, _), _ = Case("", "", (10, 10, 10), head_dim=16).inputs(np.float32)
    cu_seqlens = np.array(cu_seqlens, np.int32)
    seqused_k = np.array([2**31 - 1, -5, 3], np.int32)
    out, lse = attend(q, k, v, cu_seqlens, seqused_k=seqused_k)
    assert np.isfinite(np.asarray(out)).all() and not np.isnan(np.asarray(lse)).any()
    dlse = np.zeros(lse.shape, np.float32)
    for x in gradients(q, k, v, cu_seqlens, seqused_k=seqused_k, dout=q, dlse=dlse).values():
        assert np.isfinite(np.asarray(x)).all()


@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "bwd"])
def test_memory_is_linear_in_tokens(backward):
    def temp_bytes(total):
        x, lse = jax.ShapeDtypeStruct((total, 4, 64), jnp.float32), jax.ShapeDtypeStruct((4, total), jnp.float32)
        args, static = arguments(x, x, x, jax.ShapeDtypeStruct((2,), jnp.int32), causal=True)
        if backward:
            lowered = _bwd.lower(*args, out=x, dout=x, lse=lse, dlse=lse, **static)
        else:
            lowered = _fwd.lower(*args, None, **static)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = temp_bytes(2048), temp_bytes(4 * 2048)
    assert large <= 4.1 * small


def test_runs_with_x64():
    args, options = Case("", "", (40, 3), (50, 9), head_dim=16, sinks="random", alibi="heads").inputs(np.float32)
    with jax.enable_x64(True):
        oracle.check(attend(*args, **options), *args, **options)
